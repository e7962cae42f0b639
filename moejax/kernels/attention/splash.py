"""Attention on TPUs: the splash kernel that JAX ships, told the keys that each query sees.

Per device. Legend as in `kernels.attention.ranged`; N blocks of queries, M blocks of keys.

The kernel goes over pairs of blocks, of queries and of keys. JAX lists the pairs to visit from a
mask, pair by pair, while it traces. Here the device lists them from the ranges, so that the program
does not grow with the sequence, and queries may lie in any order. Backward recomputes scores. For
keys of a few blocks it does so once for all gradients, and keeps a part of the queries' gradient
for each block of keys; otherwise once for the gradient of queries, and once for the gradients of
keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.attention.blocked import MASKED
from moejax.kernels.costs import jitted, splash_flops

LANES = 128  # a block has a multiple of this many queries and keys
BLOCK = 512  # most queries or keys of a block; larger ones waste more beside the diagonal
FUSED_BLOCK = 1024  # most keys of a block of the backward pass that computes scores once
FUSED_PARTS = 8  # most parts of the queries' gradient that are kept
INTERPRET = False  # whether JAX interprets the kernel, as tests on a CPU do


def forward(q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, *, scale: float, extent: Any):
    """Returns the mean of the values [B, T, H, V], in their dtype, and the log, in float32."""
    form = _form(q_BTHC, k_BSGC, v_BSGV, scale, extent)
    of_queries, of_keys = [_scaled(q_BTHC, form)], [k_BSGC, v_BSGV]
    run = jitted(_forward, "attention_forward", form.flops("fwd"), form=form)
    arrays = _padded(form, form.keys, of_queries, of_keys, first_BT, last_BT)
    y_BHTV, log_BHT = lax.map(lambda arrays: run(*arrays), arrays)
    return y_BHTV.swapaxes(1, 2)[:, : form.T], log_BHT.swapaxes(1, 2)[:, : form.T]


def gradients(
    q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, y_BTHV, log_BTH, dy_BTHV, *, scale, extent: Any
):
    """Returns the gradients of q, k and v.

    Args:
      y_BTHV, log_BTH: results of all pieces together, sinks included.
    """
    form = _form(q_BTHC, k_BSGC, v_BSGV, scale, extent)
    dot_BTH = jnp.sum(y_BTHV.astype(jnp.float32) * dy_BTHV, axis=-1)
    of_queries = [_scaled(q_BTHC, form), dy_BTHV.astype(v_BSGV.dtype), log_BTH, dot_BTH]
    kernels, keys = ("dq", "dkv"), form.keys
    if form.fused:
        kernels, keys = ("dkv_fused",), form.fused_keys
    run = jitted(_gradients, "attention_backward", form.flops(*kernels), keys=keys, form=form)
    arrays = _padded(form, keys, of_queries, [k_BSGC, v_BSGV], first_BT, last_BT)
    dq_BHTC, dk_BGSC, dv_BGSV = lax.map(lambda arrays: run(*arrays), arrays)
    dq_BHTC = (dq_BHTC.astype(jnp.float32) * scale).astype(q_BTHC.dtype)
    dk_BSGC, dv_BSGV = (x.swapaxes(1, 2)[:, : form.S] for x in (dk_BGSC, dv_BGSV))
    return dq_BHTC.swapaxes(1, 2)[:, : form.T], dk_BSGC, dv_BSGV


@dataclass(frozen=True)
class _Form:
    """The static facts of a call. T and S are without padding."""

    T: int
    S: int
    H: int
    C: int
    V: int
    scale: float
    extent: Any
    interpret: bool

    @property
    def fused(self) -> bool:
        """True if one kernel computes all gradients; with a window it would skip few blocks."""
        return self.extent.most is None and FUSED_PARTS * self.fused_keys >= self.S

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return _block(self.extent.run or self.T, BLOCK)

    @property
    def keys(self) -> int:
        return _block(self.S, BLOCK)

    @property
    def fused_keys(self) -> int:
        return _block(self.S, FUSED_BLOCK)

    def steps_over_keys(self, blocks: int, keys: int) -> int:
        """Returns how many of all blocks of keys one of queries visits at most."""
        most, run = self.extent.most, self.extent.run
        if most is None or (run is not None and run % self.rows):
            return blocks
        return min(blocks, (self.rows + most) // keys + 2)  # its queries lie side by side

    def steps_over_queries(self, blocks: int, keys: int) -> int:
        """Returns how many of all blocks of queries one of keys is visited by at most."""
        if self.extent.most is None or self.extent.run is not None:
            return blocks
        return min(blocks, (keys + self.extent.most) // self.rows + 2)

    def flops(self, *kernels: str) -> int:
        """Returns the FLOPs of kernels for a sequence, by the names of `costs.SPLASH`."""
        keys = self.fused_keys if kernels == ("dkv_fused",) else self.keys
        visits = self.extent.visits(self.T, self.S, self.rows, keys)
        pairs = round(self.H * visits * self.rows * keys)
        return sum(splash_flops(kernel, pairs, self.C, self.V) for kernel in kernels)


def _form(q_BTHC, k_BSGC, v_BSGV, scale: float, extent: Any) -> _Form:
    _, T, H, C = q_BTHC.shape
    return _Form(T, k_BSGC.shape[1], H, C, v_BSGV.shape[-1], scale, extent, INTERPRET)


def _block(length: int, most: int) -> int:
    """Returns the size of blocks for a length, which is padded to a multiple of it.

    The largest power of two times 128 up to `most` that divides the length, if there is one.
    """
    parts = -(-length // LANES)
    if length % LANES:  # to be padded in any case
        return min(most, LANES * parts)
    return min(most, LANES * (parts & -parts))


class Sight(NamedTuple):
    """The keys that each query sees, as the kernel takes them.

    Attributes:
      seen_T: whether a query sees any key.
      visited_NM: whether a query of a block sees a key of another.
      number_T: what `sees` is told of a query.
      labels: of queries and of keys, equal where they may see each other; None: everywhere.
      sees: whether a key may be seen, from a query's number and the key's place.
    """

    seen_T: jax.Array
    visited_NM: jax.Array
    number_T: jax.Array
    labels: tuple[jax.Array, jax.Array] | None
    sees: Callable[[jax.Array, jax.Array], jax.Array]


def _sight(first_T: jax.Array, last_T: jax.Array, S: int, keys: int, form: _Form) -> Sight:
    """Returns the sight of padded queries of padded keys, S of them in blocks of `keys`."""
    first_T = jnp.maximum(first_T, 0)
    seen_T = last_T >= first_T
    low_N = jnp.min(jnp.where(seen_T, first_T, S).reshape(-1, form.rows), axis=1) // keys
    high_N = jnp.max(jnp.where(seen_T, last_T, -1).reshape(-1, form.rows), axis=1) // keys
    place_M = jnp.arange(S // keys)
    visited_NM = (place_M >= low_N[:, None]) & (place_M <= high_N[:, None])
    most = form.extent.most
    if most is None:
        # A range begins where a document does, so that keys are of one document between two begins.
        begins_S = jnp.zeros(S, jnp.int32).at[jnp.where(seen_T, first_T, S)].set(1, mode="drop")
        label_S = jnp.cumsum(begins_S)
        label_T = jnp.where(seen_T, label_S[jnp.minimum(first_T, S - 1)], -1)
        return Sight(seen_T, visited_NM, last_T, (label_T, label_S), _not_later)
    if not fits(form.S, min(form.S, most)):
        raise ValueError(f"splash takes no window of {most} among {form.S} keys")
    bits = _place_shift(S)
    count_T = jnp.where(seen_T, last_T - first_T + 1, 0)
    number_T = jnp.left_shift(first_T, bits) | count_T
    return Sight(seen_T, visited_NM, number_T, None, partial(_within, bits=bits))


def fits(keys: int, most: int) -> bool:
    """Whether a place among keys and a count of at most `most` of them fit in one number."""
    return most.bit_length() <= _place_shift(keys + FUSED_BLOCK)


def _place_shift(keys: int) -> int:
    """Bits of a number of 32 that are left beside the place of a key."""
    return 32 - (keys - 1).bit_length()


def _not_later(number, place):
    return place <= number


def _within(number, place, *, bits: int):
    back = place - lax.shift_right_logical(number, jnp.full_like(number, bits))
    return (back >= 0) & (back < (number & ((1 << bits) - 1)))


def _listed(visited_NM: jax.Array, steps: int) -> tuple[jax.Array, jax.Array]:
    """Returns the blocks to visit of each row in turn, and whether there are so many."""
    order_NM = jnp.argsort(~visited_NM, axis=1, stable=True)
    count_N1 = jnp.sum(visited_NM, axis=1, keepdims=True)
    step_J = jnp.arange(steps)
    # Steps that visit nothing stay at the last block, so that none is fetched for them.
    place_NJ = jnp.clip(step_J, 0, jnp.maximum(count_N1 - 1, 0))
    return jnp.take_along_axis(order_NM, place_NJ, axis=1), step_J < count_N1


def _info(number_T: jax.Array, block_NM: jax.Array, visited_NM: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    # Small types: a core has 1 MiB for scalars.
    lists = {"data_next": block_NM[None].astype(jnp.int16)}
    lists["block_mask"] = visited_NM[None].astype(jnp.int8)
    facts: dict[str, Any] = lists | {"q_sequence": number_T}
    return info.MaskInfo(**facts, mask_next=None, partial_mask_blocks=None)


def _options(form: _Form, sight: Sight) -> dict[str, Any]:
    """Returns the arguments that all kernels take."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    return {
        "segment_ids": None if sight.labels is None else kernel.SegmentIds(*sight.labels),
        "sinks": None,  # they join after all pieces
        "mask_value": kernel.DEFAULT_MASK_VALUE,
        "is_mqa": False,
        "mask_function": sight.sees,
        "attn_logits_soft_cap": None,
        "interpret": form.interpret,
    }


def _padded(form: _Form, keys: int, of_queries, of_keys, first_BT, last_BT):
    """Returns arrays of whole blocks, positions before channels; added queries see nothing."""
    missing_T, missing_S = -form.T % form.rows, -form.S % keys

    def pad(x, missing, value=0):
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), constant_values=value)

    rows = [pad(x, missing_T).swapaxes(1, 2) for x in of_queries]
    columns = [pad(x, missing_S).swapaxes(1, 2) for x in of_keys]
    return *rows, *columns, pad(first_BT, missing_T), pad(last_BT, missing_T, -1)


def _forward(q_HTC, k_GSC, v_GSV, first_T, last_T, *, form: _Form):
    """Returns the results of a sequence."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    sight = _sight(first_T, last_T, k_GSC.shape[1], form.keys, form)
    steps = form.steps_over_keys(sight.visited_NM.shape[1], form.keys)
    y_HTV, (log_HT,) = kernel._splash_attention_forward(
        _info(sight.number_T, *_listed(sight.visited_NM, steps)),
        q_HTC,
        k_GSC,
        v_GSV,
        block_sizes=kernel.BlockSizes(block_q=form.rows, block_kv=form.keys),
        residual_checkpoint_name=None,
        save_residuals=True,
        **_options(form, sight),
    )
    return jnp.where(sight.seen_T[:, None], y_HTV, 0), jnp.where(sight.seen_T, log_HT, MASKED)


def _scaled(q_BTHC: jax.Array, form: _Form) -> jax.Array:
    return (q_BTHC * form.scale).astype(q_BTHC.dtype)


def _gradients(
    q_HTC, dy_HTV, log_HT, dot_HT, k_GSC, v_GSV, first_T, last_T, *, keys: int, form: _Form
):
    """Returns the gradients of a sequence."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    sight = _sight(first_T, last_T, k_GSC.shape[1], keys, form)
    visited_NM = sight.visited_NM
    layouts = {f"{which}_layout": kernel.QKVLayout.HEAD_DIM_MINOR for which in "qkv"}
    options = {"bq": form.rows, "bkv": keys, **layouts, **_options(form, sight)}
    operands = {"q": q_HTC, "k": k_GSC, "v": v_GSV, "do": dy_HTV}
    operands |= {"logsumexp": log_HT, "di": dot_HT}
    if form.fused:
        # Each part of the queries' gradient is written at its step: all blocks, in order.
        place_N1 = jnp.arange(visited_NM.shape[0])[:, None]
        block_NM = lax.cummax(jnp.where(visited_NM, place_N1, 0), axis=0)
    else:
        steps = form.steps_over_queries(visited_NM.shape[0], keys)
        block_NM, visited_NM = (x.T for x in _listed(visited_NM.T, steps))
    dq_HTC, dk_GSC, dv_GSV = kernel._splash_attention_bwd_dkv(
        **operands,
        bkv_compute=keys,
        mask_info=_info(sight.number_T, block_NM, visited_NM),
        use_fused_bwd_kernel=form.fused,
        **options,
    )
    if not form.fused:
        steps = form.steps_over_keys(sight.visited_NM.shape[1], keys)
        info = _info(sight.number_T, *_listed(sight.visited_NM, steps))
        dq_HTC = kernel._splash_attention_bwd_dq(**operands, mask_info=info, **options)
    return dq_HTC, dk_GSC, dv_GSV
