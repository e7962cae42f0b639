"""Pipeline stages: hidden states to the next stage, gradients to the one before.

Per device, inside shard_map. Sends are chains without a way around: XLA's decomposer of cyclic
permutes lets zeros arrive where a permute has more than one cycle (openxla/xla#45222).

Letters: those of `layout.layout`; P stages.
"""

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.layout.layout import Layout


def to_next(x_BtD: jax.Array, layout: Layout) -> jax.Array:
    """Sends hidden states to the next stage; zeros arrive at the first. Wire: all of x."""
    last = layout.size(layout.stage) - 1
    with jax.named_scope("stage"):
        return wire.ppermute(x_BtD, layout.stage, [(i, i + 1) for i in range(last)])


def to_previous(x_BtD: jax.Array, layout: Layout) -> jax.Array:
    """Sends to the stage before; zeros arrive at the last. Wire: all of x."""
    last = layout.size(layout.stage) - 1
    with jax.named_scope("stage"):
        return wire.ppermute(x_BtD, layout.stage, [(i + 1, i) for i in range(last)])


def spread_positions(y_BtD: jax.Array, layout: Layout) -> jax.Array:
    """Gives each stage its share of the positions of the last stage's hidden states.

    Wire: (P - 1) / P of y.
    """
    stages = layout.size(layout.stage)
    B, t, D = y_BtD.shape
    y_PBtD = jnp.moveaxis(y_BtD.reshape(B, stages, t // stages, D), 1, 0)
    with jax.named_scope("stage"):
        return wire.all_to_all(y_PBtD, layout.stage, tag=None)[-1]


def collect_positions(dy_BtD: jax.Array, layout: Layout) -> jax.Array:
    """The transpose of `spread_positions`: the last stage gets all positions, others get zeros.

    Wire: (P - 1) / P of the result.
    """
    stages = layout.size(layout.stage)
    dy_PBtD = jnp.zeros((stages, *dy_BtD.shape), dy_BtD.dtype).at[-1].set(dy_BtD)
    with jax.named_scope("stage"):
        dy_PBtD = wire.all_to_all(dy_PBtD, layout.stage, tag=None)
    B, _, D = dy_BtD.shape
    return jnp.moveaxis(dy_PBtD, 0, 1).reshape(B, -1, D)


def own_positions(target_BT: jax.Array, layout: Layout) -> jax.Array:
    """Cuts out of all positions those that `spread_positions` gives this stage.

    They are in the order in which `comm.activations.enter_tensor` joins those of tensor ranks.
    """
    stages = layout.size(layout.stage)
    ranks = layout.size(layout.tensor) if layout.sequence_sharded else 1
    B, T = target_BT.shape
    split = target_BT.reshape(B, ranks, stages, T // ranks // stages)
    own = jax.lax.dynamic_index_in_dim(split, wire.index(layout.stage), axis=2, keepdims=False)
    return own.reshape(B, -1)


def join_positions(x_MBT: jax.Array, layout: Layout) -> jax.Array:
    """Undoes `own_positions`, with all stages' shares. Wire: x of each stage, gathered."""
    stages = layout.size(layout.stage)
    ranks = layout.size(layout.tensor) if layout.sequence_sharded else 1
    M, B, length = x_MBT.shape
    with jax.named_scope("stage"):
        x_PMBT = wire.all_gather(x_MBT[None], layout.stage, dim=0, tag=None)
    split = x_PMBT.reshape(stages, M, B, ranks, length // ranks)
    return jnp.moveaxis(split, 0, 3).reshape(M, B, -1)
