"""Activations on the tensor axis: what a block receives and what it gives back.

Per device, inside shard_map. Between blocks an activation is either sharded over positions
(`x_BtD`, t = T / tensor) or replicated (t = T), by `Layout.sequence_sharded`. Blocks that shard
heads or hidden width need all positions and leave partial sums; expert layers need each token on
one tensor rank only, so that no duplicate is ever sent.
"""

import jax
from jax import lax

from moejax.comm import wire
from moejax.dims import Layout


def enter_tensor(x_BtD: jax.Array, layout: Layout) -> jax.Array:
    """All positions of the sequence, on every tensor rank."""
    return wire.all_gather(x_BtD, layout.tensor, dim=1) if layout.sequence_sharded else x_BtD


def leave_tensor(y_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Sums the tensor ranks' partial results into the layout that blocks exchange."""
    if layout.sequence_sharded:
        return wire.reduce_scatter(y_BTD, layout.tensor, dim=1)
    return wire.all_reduce(y_BTD, layout.tensor)


def split_positions(x_BtD: jax.Array, layout: Layout) -> jax.Array:
    """This tensor rank's positions; nothing moves."""
    parts = layout.size(layout.tensor)
    if layout.sequence_sharded or parts == 1:
        return x_BtD
    length = x_BtD.shape[1] // parts
    return lax.dynamic_slice_in_dim(x_BtD, wire.index(layout.tensor) * length, length, axis=1)


def join_positions(y_BtD: jax.Array, layout: Layout) -> jax.Array:
    """Undoes `split_positions`: back to the layout that blocks exchange."""
    return y_BtD if layout.sequence_sharded else wire.all_gather(y_BtD, layout.tensor, dim=1)
