"""Activations on the tensor axis: what a block receives and what it gives back.

Per device, inside shard_map. Between blocks an activation is either sharded over positions
(`x_BtD`, t = T / tensor) or replicated (t = T), by `Layout.sequence_sharded`. Blocks that shard
heads or hidden width need all positions and leave partial sums; expert layers need each token on
one tensor rank only, so that no duplicate is ever sent.
"""

import jax
from jax import lax

from moejax.comm import wire
from moejax.layout.layout import Layout

ACTIVATIONS = "activations"  # the scope of this traffic in the program


def enter_tensor(x_BtD: jax.Array, layout: Layout) -> jax.Array:
    """All positions of the sequence, on every tensor rank."""
    with jax.named_scope(ACTIVATIONS):
        return wire.all_gather(x_BtD, layout.tensor, dim=1) if layout.sequence_sharded else x_BtD


def leave_tensor(y_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Sums the tensor ranks' partial results into the layout that blocks exchange."""
    with jax.named_scope(ACTIVATIONS):
        if layout.sequence_sharded:
            return wire.reduce_scatter(y_BTD, layout.tensor, dim=1)
        return wire.all_reduce(y_BTD, layout.tensor)


def own_positions(x_BTD: jax.Array, layout: Layout) -> jax.Array:
    """This tensor rank's positions out of all; nothing moves."""
    length = x_BTD.shape[1] // layout.size(layout.tensor)
    start = wire.index(layout.tensor) * length
    return lax.dynamic_slice_in_dim(x_BTD, start, length, axis=1)


def split_positions(x_BtD: jax.Array, layout: Layout) -> jax.Array:
    """This tensor rank's positions of what blocks exchange; nothing moves."""
    if layout.sequence_sharded or layout.size(layout.tensor) == 1:
        return x_BtD
    return own_positions(x_BtD, layout)


def join_positions(y_BtD: jax.Array, layout: Layout) -> jax.Array:
    """Undoes `split_positions`: back to the layout that blocks exchange."""
    with jax.named_scope(ACTIVATIONS):
        return y_BtD if layout.sequence_sharded else wire.all_gather(y_BtD, layout.tensor, dim=1)


def leave_replicated(y_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Whole results that every tensor rank holds, in the layout that blocks exchange."""
    return own_positions(y_BTD, layout) if layout.sequence_sharded else y_BTD
