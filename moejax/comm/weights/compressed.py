"""Compressed reductions: a value is quantised twice, however many devices take part.

Per device, inside shard_map. A ring that quantised at each of its steps would add an error at each.
Here every device encodes its parts once and sends each part to the device that sums it. That device
decodes the parts, sums them in float32, and encodes the sum once more to send it back.

Letters: S devices along the scatter axes, C along the axes of copies, n values of a part. For
`LowRank`: S matrices of a rows and b columns, with factors of r columns; P = S C parts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec
from moejax.comm.codecs.low_rank import LowRank
from moejax.comm.codecs.pack import pack, unpack
from moejax.layout.layout import Axes


class ReduceState(NamedTuple):
    """A codec's state for both encodings, float32; None where the codec has none."""

    parts: jax.Array | None  # [S * C, p], for the parts that this device sends
    total: jax.Array | None  # [1, t], for the sum that it sends back; LowRank: right factors


def empty_state(
    codecs: Sequence[Codec | LowRank], scatter: int, copies: int, size: int
) -> ReduceState:
    """Returns the state before the first call, large enough for each of the codecs.

    Args:
      scatter, copies: S and C, numbers of devices.
      size: n.
    """
    part_size = max((codec.state_size(size) for codec in codecs), default=0)
    total_sizes = [
        scatter * codec.factor_size(copies * size)
        if isinstance(codec, LowRank)
        else codec.state_size(size) * (copies > 1)
        for codec in codecs
    ]
    return ReduceState(
        jnp.zeros((scatter * copies, part_size)), jnp.zeros((1, max(total_sizes, default=0)))
    )


def reduce_parts(
    x_SCn: jax.Array,
    scatter: Axes,
    copies: Axes,
    codec: Codec | LowRank,
    state: ReduceState,
    step: jax.Array,
) -> tuple[jax.Array, ReduceState]:
    """Sums `x[s]` over all devices of both axes, for the devices at index s along `scatter`.

    Wire per device: all_to_all (S C - 1) e, then all_gather (C - 1) e, where e is the bytes of n
    encoded values. For `LowRank`: see `_reduce_low_rank`.

    Args:
      x_SCn: this device's values for each index along `scatter`, cut in C parts.
      state: the state that the previous call returned, or `empty_state`.
      step: of the run, counted from zero.

    Returns:
      [C, n] float32: the sum, the same on all devices along `copies`; and the next state.
    """
    if isinstance(codec, LowRank):
        return _reduce_low_rank(x_SCn, scatter, copies, codec, state)
    S, C, n = x_SCn.shape
    axes = scatter + copies
    state_size = codec.state_size(n)
    old_state = _front(state.parts, S * C, state_size)
    payload, part_state = codec.encode(x_SCn.reshape(S * C, n), old_state, step)
    state = state._replace(parts=_over(state.parts, part_state))
    packed = wire.all_to_all(pack(payload), axes, tag=None)  # S*C e -> S*C e
    total_1n = codec.decode_sum(unpack(packed, payload), n)[None]
    if C == 1:
        return total_1n, state
    old_state = _front(state.total, 1, state_size)
    payload, total_state = codec.encode(total_1n, old_state, step)
    packed = wire.all_gather(pack(payload), copies, dim=0, tag=None)  # 1 e -> C e
    state = state._replace(total=_over(state.total, total_state))
    return codec.decode(unpack(packed, payload), n), state


def _front(state: jax.Array | None, rows: int, used: int) -> jax.Array:
    """Returns the first `used` values of each row, this codec's own. Other codecs may need more."""
    return jnp.zeros((rows, 0)) if state is None else state[:, :used]


def _over(state: jax.Array | None, front: jax.Array) -> jax.Array | None:
    """Returns `state` with the first values of each row replaced by `front`."""
    if state is None:
        return None
    return jnp.concatenate([front, state[..., front.shape[-1] :]], axis=-1)


def _reduce_low_rank(
    x_SCn: jax.Array, scatter: Axes, copies: Axes, codec: LowRank, state: ReduceState
) -> tuple[jax.Array, ReduceState]:
    """`reduce_parts` by low-rank factors of S matrices [a, b], one for each index along `scatter`.

    Wire per device: two all-reduces, of S a r and of S b r float32. The errors that all devices
    keep add up to the error of the sum.
    """
    S, C, n = x_SCn.shape
    axes = scatter + copies
    a, b, r = codec.shape(C * n)
    used = S * b * r
    compensated_Pn = x_SCn.reshape(S * C, n).astype(jnp.float32) + _front(state.parts, S * C, n)
    padding = (0, 0), (0, a * b - C * n)
    m_Sab = jnp.pad(compensated_Pn.reshape(S, C * n), padding).reshape(S, a, b)
    old_q_Sbr = _front(state.total, 1, used).reshape(S, b, r)
    random_Sbr = jax.random.normal(jax.random.key(0), old_q_Sbr.shape)
    q_Sbr = jnp.where(jnp.any(old_q_Sbr != 0), old_q_Sbr, random_Sbr)
    p_Sar = jnp.einsum("Sab,Sbr->Sar", m_Sab, q_Sbr)
    p_Sar = wire.all_reduce(p_Sar, axes, tag=None)  # S a r -> S a r
    p_Sar = jnp.linalg.qr(p_Sar)[0]
    own_Sbr = jnp.einsum("Sab,Sar->Sbr", m_Sab, p_Sar)
    q_Sbr = wire.all_reduce(own_Sbr, axes, tag=None)  # S b r -> S b r

    def product(q_Sbr: jax.Array) -> jax.Array:
        return jnp.einsum("Sar,Sbr->Sab", p_Sar, q_Sbr).reshape(S, -1)[:, : C * n]

    error = compensated_Pn - product(own_Sbr).reshape(S * C, n)
    index = wire.index(scatter) if scatter else 0
    total_Cn = jax.lax.dynamic_index_in_dim(product(q_Sbr), index, keepdims=False).reshape(C, n)
    part_state = _over(state.parts, error)
    return total_Cn, ReduceState(part_state, _over(state.total, q_Sbr.reshape(1, used)))
