"""Products of a few rows and the matrices of their groups, on CPU, by `few_rows.cc`.

Per device. Legend: M rows, G groups, K summed over, N columns.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Float, Int
from moejax.runtime.program_cache import LibraryError, load_library

SOURCE = Path(__file__).with_name("few_rows.cc")
# Vectors as wide as this processor has; the order of a sum may differ between kinds of processors.
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast")
DTYPES = (jnp.float32, jnp.bfloat16)


def multiply_few_rows(
    x_MK: Float[Array, "M K"], w_GKN: Float[Array, "G K N"], sizes_G: Int[Array, " G"]
) -> Float[Array, "M N"]:
    """Returns `reference.grouped_matmul`, summed in float32, without gradients.

    Matrices of groups without rows are not read, others once. On CPU only; see `takes`.
    """
    name = f"moejax_few_rows_{x_MK.dtype.name}"
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x_MK.shape[0], w_GKN.shape[2]), x_MK.dtype))
    return call(x_MK, w_GKN, sizes_G)


def takes(x_MK: jax.Array, w_GKN: jax.Array) -> bool:
    """Returns whether `multiply_few_rows` takes arrays like these here.

    It needs a C++ compiler; stderr says it once if there is none.
    """
    return x_MK.dtype == w_GKN.dtype and x_MK.dtype in DTYPES and _register()


@functools.cache
def _register() -> bool:
    names = [f"moejax_few_rows_{jnp.dtype(dtype).name}" for dtype in DTYPES]
    try:
        library = load_library(SOURCE, names, *FLAGS)
    except LibraryError as error:
        print(f"moejax: experts of few rows run by XLA, which is slower: {error}.", file=sys.stderr)
        return False
    for name in names:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return True
