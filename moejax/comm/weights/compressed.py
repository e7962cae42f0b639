"""Compressed reductions: a value is quantised twice, however many devices take part.

Per device, inside shard_map. A ring that quantised at each of its steps would add an error at each.
Here every device encodes its parts once and sends each part to the device that sums it. That device
decodes the parts, sums them in float32, and encodes the sum once more to send it back.

Letters: S devices along the scatter axes, C along the axes of copies, n values of a part.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec, pack, unpack
from moejax.layout.layout import Axes


class ReduceState(NamedTuple):
    """A codec's state for both encodings, float32; None where the codec has none."""

    parts: jax.Array | None  # [S * C, p], for the parts that this device sends
    total: jax.Array | None  # [1, t], for the sum that it sends back


def empty_state(codecs: Sequence[Codec], scatter: int, copies: int, size: int) -> ReduceState:
    """Returns the state before the first call, large enough for each of the codecs.

    Args:
      scatter, copies: S and C, numbers of devices.
      size: n.
    """
    largest = max((codec.state_size(size) for codec in codecs), default=0)
    return ReduceState(
        jnp.zeros((scatter * copies, largest)), jnp.zeros((1, largest * (copies > 1)))
    )


def reduce_parts(
    x_SCn: jax.Array,
    scatter: Axes,
    copies: Axes,
    codec: Codec,
    state: ReduceState,
    step: jax.Array,
) -> tuple[jax.Array, ReduceState]:
    """Sums `x[s]` over all devices of both axes, for the devices at index s along `scatter`.

    Wire per device: all_to_all (S C - 1) e, then all_gather (C - 1) e, where e is the bytes of n
    encoded values.

    Args:
      x_SCn: this device's values for each index along `scatter`, cut in C parts.
      state: the state that the previous call returned, or `empty_state`.
      step: of the run, counted from zero.

    Returns:
      [C, n] float32: the sum, the same on all devices along `copies`; and the next state.
    """
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
