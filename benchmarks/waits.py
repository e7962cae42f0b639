"""Foreign functions that wait and take no core, in place of what computes or sends."""

import ctypes
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from moejax.moe import dispatch
from moejax.runtime.program_cache import compile_library

NAMES = ("wait_keeps", "wait_frees", "wait_rows")
BACKWARD = 2.0  # the experts' backward pass over their forward pass


def register() -> None:
    """Compiles and registers the functions.

    Raises:
      RuntimeError: g++ is missing or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "waits.so"
        reason = compile_library(Path(__file__).with_suffix(".cc"), library)
        if reason is not None:
            raise RuntimeError(reason)
        loaded = ctypes.CDLL(str(library))
    for name in NAMES:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")


def wait(kind: str, x: jax.Array, seconds: float) -> jax.Array:
    """Returns x after a while.

    Args:
      kind: "keeps" the thread that runs the program, or "frees" it.
    """
    call = jax.ffi.ffi_call(f"wait_{kind}", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, seconds=np.float64(seconds))


def wait_rows(x_MD: jax.Array, sizes_G: jax.Array, seconds: float) -> jax.Array:
    """Returns x after so many seconds for each row that the sizes count; frees the thread."""
    call = jax.ffi.ffi_call("wait_rows", jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype))
    return call(x_MD, sizes_G.astype(jnp.int32), seconds=np.float64(seconds))


@contextmanager
def timed_experts(seconds: float | None) -> Iterator[None]:
    """Layers traced meanwhile have experts that take so long a row, and compute nothing.

    Args:
      seconds: of the forward pass; backward takes twice as long. None: experts as they are.
    """
    if seconds is None:
        yield
        return
    alone = partial(_timed_mlp, seconds)
    adding = partial(_timed_mlp_adding, seconds)
    with (
        mock.patch.object(dispatch, "expert_mlp", alone),
        mock.patch.object(dispatch, "expert_mlp_adding", adding),
    ):
        yield


def _timed_mlp(seconds: float, x_MD, w_in, w_out, sizes_G, **_: Any) -> jax.Array:
    return wait_rows(x_MD, sizes_G, seconds)


def _timed_mlp_adding(
    seconds: float, x_MD, params, sums, sizes_G, *, one_M1=None, **_: Any
) -> tuple[jax.Array, Any]:
    return _adding(seconds, x_MD, sums, sizes_G, one_M1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _adding(seconds, x_MD, sums, sizes_G, one_M1):
    return wait_rows(x_MD, sizes_G, seconds), sums


def _adding_forward(seconds, x_MD, sums, sizes_G, one_M1):
    return _adding(seconds, x_MD, sums, sizes_G, one_M1), (sizes_G, one_M1)


def _adding_backward(seconds, saved, gradients):
    (sizes_G, one_M1), (dy_MD, dsums) = saved, gradients
    dx_MD = wait_rows(dy_MD, sizes_G, BACKWARD * seconds)
    dots_M1 = None if one_M1 is None else dx_MD[:, :1].astype(one_M1.dtype)
    return dx_MD, dsums, None, dots_M1


_adding.defvjp(_adding_forward, _adding_backward)
