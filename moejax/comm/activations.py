"""Activations on the tensor axis: the layout between blocks, and the way in and out of a block.

Per device, inside shard_map. Letters: B sequences, T positions, t positions between blocks, D
width. `Layout.sequence_sharded` decides the layout between blocks: sharded over positions
(t = T / tensor) or replicated (t = T). A block that shards heads or hidden width needs all
positions and ends with partial sums. An expert layer needs each token on one tensor rank only, so
that no token is sent twice.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import wire
from moejax.layout.layout import Layout

ACTIVATIONS = "activations"  # named scope of these collectives


def enter_tensor(x_BtD: jax.Array, layout: Layout) -> jax.Array:
    """Gives every tensor rank all positions of its sequences."""
    with jax.named_scope(ACTIVATIONS):
        return wire.all_gather(x_BtD, layout.tensor, dim=1) if layout.sequence_sharded else x_BtD


def enter_tensor_together(parts: Sequence[jax.Array], layout: Layout) -> Sequence[jax.Array]:
    """`enter_tensor` of several activations [B, t, any], in one gather."""
    if not layout.sequence_sharded or layout.size(layout.tensor) == 1:
        return parts
    joined = enter_tensor(jnp.concatenate(parts, axis=-1), layout)
    ends = itertools.accumulate(part.shape[-1] for part in parts[:-1])
    return jnp.split(joined, list(ends), axis=-1)


def leave_tensor(y_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Sums the tensor ranks' partial results, and returns them in the layout between blocks."""
    with jax.named_scope(ACTIVATIONS):
        if layout.sequence_sharded:
            return wire.reduce_scatter(y_BTD, layout.tensor, dim=1)
        return wire.all_reduce(y_BTD, layout.tensor)


def own_positions(x_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Cuts this tensor rank's positions out of all positions; nothing is sent."""
    length = x_BTD.shape[1] // layout.size(layout.tensor)
    start = wire.index(layout.tensor) * length
    return lax.dynamic_slice_in_dim(x_BTD, start, length, axis=1)


def split_positions(x_BtD: jax.Array, layout: Layout) -> jax.Array:
    """Cuts this tensor rank's positions out of an activation between blocks; nothing is sent."""
    if layout.sequence_sharded or layout.size(layout.tensor) == 1:
        return x_BtD
    return own_positions(x_BtD, layout)


def join_positions(y_BtD: jax.Array, layout: Layout) -> jax.Array:
    """Undoes `split_positions`: returns to the layout between blocks."""
    with jax.named_scope(ACTIVATIONS):
        return y_BtD if layout.sequence_sharded else wire.all_gather(y_BtD, layout.tensor, dim=1)


def leave_replicated(y_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Brings complete results, held by every tensor rank, to the layout between blocks."""
    return own_positions(y_BTD, layout) if layout.sequence_sharded else y_BTD
