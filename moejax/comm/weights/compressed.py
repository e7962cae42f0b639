"""Compressed reductions: two errors are injected, however many devices take part.

Per device, inside shard_map. A ring that quantised at each of its turns would inject an error each
time. Here every device encodes its parts once and sends each to the device that sums it, sums are
taken in float32 of what was decoded, and each sum is encoded once more on its way back.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec, EncodeContext
from moejax.comm.codecs.low_rank import LowRank
from moejax.comm.codecs.pack import pack, unpack
from moejax.layout.layout import Axes


class ReduceState(NamedTuple):
    """What the codec remembers at both of its places, float32; None where that is nothing."""

    parts: jax.Array | None  # [devices, p], of the parts that this device sends
    total: jax.Array | None  # [1, t], of the sum that it sends back; of LowRank the right factors


def empty_state(
    codecs: Sequence[Codec | LowRank], scatter: int, copies: int, size: int
) -> ReduceState:
    """The state before the first call, with room for each of the codecs.

    Args:
      scatter, copies: devices along those axes of `reduce_parts`.
      size: n of a part there.
    """
    parts = max((codec.state_size(size) for codec in codecs), default=0)
    totals = [
        scatter * codec.factor_size(copies * size)
        if isinstance(codec, LowRank)
        else codec.state_size(size) * (copies > 1)
        for codec in codecs
    ]
    return ReduceState(jnp.zeros((scatter * copies, parts)), jnp.zeros((1, max(totals, default=0))))


def reduce_parts(
    x_SCn: jax.Array,
    scatter: Axes,
    copies: Axes,
    codec: Codec | LowRank,
    state: ReduceState,
    context: EncodeContext,
) -> tuple[jax.Array, ReduceState]:
    """Sums part [s] over all devices of both axes, for the devices at place s along `scatter`.

    Wire per device, with b the codec's bytes of n values, and S and C the devices along the axes:
    all_to_all (S C - 1) b, then all_gather (C - 1) b. Of LowRank: see `_reduce_low_rank`.

    Args:
      x_SCn: [S, C, n]: this device's part for each place along `scatter`, cut in C.
      state: of the call before, or `empty_state`.
      context: its key is this device's own, so that no two round alike.

    Returns:
      [C, n] float32: the sum, the same on all devices along `copies`; and the next state.
    """
    if isinstance(codec, LowRank):
        return _reduce_low_rank(x_SCn, scatter, copies, codec, state)
    S, C, n = x_SCn.shape
    axes = scatter + copies
    keys = jax.random.split(context.key)
    used = codec.state_size(n)
    before = _front(state.parts, S * C, used)
    payload, parts = codec.encode(x_SCn.reshape(S * C, n), before, context._replace(key=keys[0]))
    state = state._replace(parts=_over(state.parts, parts))
    arrived = unpack(wire.all_to_all(pack(payload), axes, tag=None), payload)
    total_1n = codec.decode_sum(arrived, n)[None]
    if C == 1:
        return total_1n, state
    before = _front(state.total, 1, used)
    payload, total = codec.encode(total_1n, before, context._replace(key=keys[1]))
    packed = wire.all_gather(pack(payload), copies, dim=0, tag=None)
    state = state._replace(total=_over(state.total, total))
    return codec.decode(unpack(packed, payload), n), state


def _front(whole: jax.Array | None, rows: int, used: int) -> jax.Array:
    """The first values of each row, which are the codec's: there may be room for others."""
    return jnp.zeros((rows, 0)) if whole is None else whole[:, :used]


def _over(whole: jax.Array | None, front: jax.Array) -> jax.Array | None:
    """`whole` [rows, m] with its first values replaced."""
    if whole is None:
        return None
    return jnp.concatenate([front, whole[..., front.shape[-1] :]], axis=-1)


def _reduce_low_rank(
    x_SCn: jax.Array, scatter: Axes, copies: Axes, codec: LowRank, state: ReduceState
) -> tuple[jax.Array, ReduceState]:
    """`reduce_parts` by the factors of S matrices [a, b], each the part for one place.

    Wire per device: two all-reduces, of S a r and of S b r float32. What the devices keep adds up
    to what the sum leaves out.
    """
    S, C, n = x_SCn.shape
    axes = scatter + copies
    a, b, r = codec.shape(C * n)
    used = S * b * r
    whole_SC = x_SCn.reshape(S * C, n).astype(jnp.float32) + _front(state.parts, S * C, n)
    m_Sab = jnp.pad(whole_SC.reshape(S, C * n), ((0, 0), (0, a * b - C * n))).reshape(S, a, b)
    before = _front(state.total, 1, used).reshape(S, b, r)
    first = jax.random.normal(jax.random.key(0), before.shape)
    q_Sbr = jnp.where(jnp.any(before != 0), before, first)
    p_Sar = wire.all_reduce(jnp.einsum("Sab,Sbr->Sar", m_Sab, q_Sbr), axes, tag=None)
    p_Sar = jnp.linalg.qr(p_Sar)[0]
    own_Sbr = jnp.einsum("Sab,Sar->Sbr", m_Sab, p_Sar)
    q_Sbr = wire.all_reduce(own_Sbr, axes, tag=None)

    def product(q_Sbr: jax.Array) -> jax.Array:
        return jnp.einsum("Sar,Sbr->Sab", p_Sar, q_Sbr).reshape(S, -1)[:, : C * n]

    error = whole_SC - product(own_Sbr).reshape(S * C, n)
    place = wire.index(scatter) if scatter else 0
    total_Cn = jax.lax.dynamic_index_in_dim(product(q_Sbr), place, keepdims=False).reshape(C, n)
    parts = _over(state.parts, error)
    return total_Cn, ReduceState(parts, _over(state.total, q_Sbr.reshape(1, used)))
