"""Compressed reductions: two errors are injected, however many devices take part.

Per device, inside shard_map. A ring that quantised at each of its turns would inject an error each
time. Here every device encodes its parts once and sends each to the device that sums it, sums are
taken in float32 of what was decoded, and each sum is encoded once more on its way back.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codec import Codec, Moment, Payload
from moejax.dims import Axes


class ReduceState(NamedTuple):
    """What the codec remembers at both of its places, float32."""

    parts: jax.Array  # [devices, state_size(n)], of the parts that this device sends
    total: jax.Array  # [1, state_size(n)], of the sum that it sends back; [1, 0] if it sends none


def first_state(codec: Codec, devices: int, size: int, *, copied: bool) -> ReduceState:
    """The state of `reduce_parts` before its first call: of `devices` parts of `size` values."""
    kept = codec.state_size(size)
    return ReduceState(jnp.zeros((devices, kept)), jnp.zeros((1, kept if copied else 0)))


def reduce_parts(
    x_SCn: jax.Array, scatter: Axes, copies: Axes, codec: Codec, state: ReduceState, moment: Moment
) -> tuple[jax.Array, ReduceState]:
    """Sums part [s] over all devices of both axes, for the devices at place s along `scatter`.

    Wire per device, with b the codec's bytes of n values, and S and C the devices along the axes:
    all_to_all (S C - 1) b, then all_gather (C - 1) b.

    Args:
      x_SCn: [S, C, n]: this device's part for each place along `scatter`, cut in C.
      state: of the call before, or `first_state`.

    Returns:
      [C, n] float32: the sum, the same on all devices along `copies`; and the next state.
    """
    S, C, n = x_SCn.shape
    axes = scatter + copies
    # No two devices round alike.
    keys = jax.random.split(jax.random.fold_in(moment.key, wire.index(axes)))
    payload, parts = codec.encode(
        x_SCn.reshape(S * C, n), state.parts, moment._replace(key=keys[0])
    )
    arrived = _unpack(wire.all_to_all(_pack(payload), axes, tag=None), payload)
    total_1n = jnp.sum(codec.decode(arrived, n), axis=0, keepdims=True)
    if C == 1:
        return total_1n, ReduceState(parts, state.total)
    payload, total = codec.encode(total_1n, state.total, moment._replace(key=keys[1]))
    packed = wire.all_gather(_pack(payload), copies, dim=0, tag=None)
    return codec.decode(_unpack(packed, payload), n), ReduceState(parts, total)


def _pack(payload: Payload) -> jax.Array:
    """All arrays [P, ...] of a payload as bytes [P, m], so that they travel as one."""
    rows = [_bytes(leaf).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(payload)]
    return jnp.concatenate(rows, axis=1)


def _bytes(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)


def _unpack(packed: jax.Array, like: Payload) -> Payload:
    """The inverse of `_pack`; of any number of rows."""
    leaves, tree = jax.tree.flatten(like)
    found, start = [], 0
    for leaf in leaves:
        width = leaf.nbytes // leaf.shape[0]
        piece, start = packed[:, start : start + width], start + width
        itemsize = (leaf.dtype.itemsize,) if leaf.dtype.itemsize > 1 else ()
        piece = piece.reshape(-1, *leaf.shape[1:], *itemsize)
        dtype = leaf.dtype
        found.append(piece if dtype == jnp.uint8 else jax.lax.bitcast_convert_type(piece, dtype))
    return jax.tree.unflatten(tree, found)
