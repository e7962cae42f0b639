"""Attention on TPUs, by the splash kernel that JAX ships.

Per device. Legend as in `attention`. The kernel goes over blocks of queries and keys. It leaves
out blocks that causality or the window hide whole, and compares documents inside the others, so no
mask is made. Backward recomputes scores. For sequences of a few blocks it does so once for all
gradients, and keeps a part of the queries' gradient for each block of keys; otherwise once for the
gradient of queries, and once for the gradients of keys and values.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from moejax.annotations import Array, Float, Int
from moejax.kernels.costs import jitted, splash_flops, visited_pairs

LANES = 128  # the length is a multiple of this
BLOCK = 512  # most queries or keys of a block; larger ones waste more beside the diagonal
FUSED_BLOCK = 1024  # most keys of a block of the backward pass that computes scores once
FUSED_PARTS = 8  # most parts of the queries' gradient that are kept


def splash_attention(
    q_BTHC: Float[Array, "B T H C"],
    k_BSGC: Float[Array, "B S G C"],
    v_BSGV: Float[Array, "B S G V"],
    segment_BT: Int[Array, "B T"] | None,
    *,
    window: int | None,
    scale: float,
    sinks_H: Float[Array, " H"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H V"]:
    """Returns the result of `attention`.

    Args:
      segment_BT: None where a sequence is one document.
      interpret: run the kernel in JAX's interpreter, as tests on a CPU do.
    """
    B, T, H, C = q_BTHC.shape
    form = _Form(window, B, T, H, C, v_BSGV.shape[-1], interpret)
    q_BHTC = (q_BTHC * scale).astype(q_BTHC.dtype).transpose(0, 2, 1, 3)
    k_BGSC, v_BGSV = k_BSGC.transpose(0, 2, 1, 3), v_BSGV.transpose(0, 2, 1, 3)
    y_BHTV = _splash(form, (q_BHTC, k_BGSC, v_BGSV, sinks_H), segment_BT)
    return y_BHTV.transpose(0, 2, 1, 3)


@dataclass(frozen=True)
class _Form:
    """The static facts of a call."""

    window: int | None
    B: int
    T: int
    H: int
    C: int
    V: int
    interpret: bool

    @property
    def fused(self) -> bool:
        """True if one kernel computes all gradients; with a window it would skip few blocks."""
        parts = self.T // block_of(self.T, FUSED_BLOCK)
        return self.window is None and parts <= FUSED_PARTS

    @property
    def blocks(self) -> dict[str, Any]:
        """Queries and keys of a block, in each kernel, by the library's names."""
        rows = block_of(self.T, BLOCK)
        blocks = {"block_q": rows, "block_kv": rows, "block_q_dkv": rows, "block_kv_dkv": rows}
        if self.fused:
            return blocks | {"block_kv_dkv": block_of(self.T, FUSED_BLOCK)}
        return blocks | {"block_q_dq": rows, "block_kv_dq": rows}

    def flops(self, *kernels: str) -> int:
        """Returns the FLOPs of kernels, by the names of `costs.SPLASH`."""
        rows = block_of(self.T, BLOCK)
        keys = self.blocks["block_kv" if kernels == ("fwd",) else "block_kv_dkv"]
        pairs = self.B * self.H * visited_pairs(self.T, rows, keys, self.window)
        return sum(splash_flops(kernel, pairs, self.C, self.V) for kernel in kernels)


def block_of(length: int, most: int) -> int:
    """Returns the largest power of two times 128 that divides the length and is at most `most`."""
    parts = length // LANES
    if length != parts * LANES:
        raise ValueError(f"splash takes multiples of {LANES} positions, this is {length}")
    return min(most, LANES * (parts & -parts))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _splash(form: _Form, arrays: tuple[jax.Array | None, ...], segment_BT: jax.Array | None):
    run = jitted(_values, "attention_forward", form.flops("fwd"), form=form)
    return run(arrays, segment_BT)


def _forward(form: _Form, arrays, segment_BT):
    run = jitted(_values_and_pull, "attention_forward", form.flops("fwd"), form=form)
    return run(arrays, segment_BT)


def _backward(form: _Form, pull: Any, dy_BHTV: jax.Array):
    kernels = ("dkv_fused",) if form.fused else ("dq", "dkv")
    run = jitted(_gradients, "attention_backward", form.flops(*kernels))
    return run(pull, dy_BHTV), None


_splash.defvjp(_forward, _backward)


def _values(arrays, segment_BT, *, form: _Form):
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    shape = (form.T, form.T)
    mask = library.CausalMask(shape)
    if form.window is not None:
        mask = library.LocalMask(shape, (form.window - 1, 0), 0)
    kernel = library.make_splash_mha_single_device(
        library.MultiHeadMask([mask] * form.H),
        block_sizes=library.BlockSizes(**form.blocks, use_fused_bwd_kernel=form.fused),
        interpret=form.interpret,
    )

    def sequence(q_HTC, k_GSC, v_GSV, segment_T):
        segments = None if segment_T is None else library.SegmentIds(segment_T, segment_T)
        return kernel(q_HTC, k_GSC, v_GSV, segments, sinks_H)

    q_BHTC, k_BGSC, v_BGSV, sinks_H = arrays
    return jax.vmap(sequence)(q_BHTC, k_BGSC, v_BGSV, segment_BT)


def _values_and_pull(arrays, segment_BT, *, form: _Form):
    return jax.vjp(lambda arrays: _values(arrays, segment_BT, form=form), arrays)


def _gradients(pull, dy_BHTV):
    return pull(dy_BHTV)[0]
