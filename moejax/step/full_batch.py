"""The parts of a step that are done once for its full batch, around micro-batches' gradients.

Per device, inside the shard_map of the training mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.weights.reduce import reduce_replicated
from moejax.model.ahead import targets_ahead
from moejax.step.model import ModelDef
from moejax.step.state import Batch, TrainState, Tree


class NumTargets(NamedTuple):
    """Numbers of valid targets of the full batch, at least 1; float32."""

    next: jax.Array
    ahead: jax.Array | None = None  # of the tokens after the next, with `model.predict_ahead`


def count_targets(model: ModelDef, batch: Batch) -> NumTargets:
    """Counts the targets of all devices."""

    def total(target_BT: jax.Array) -> jax.Array:
        num_targets = wire.all_reduce(jnp.sum(target_BT >= 0), model.layout.row_axes)
        return jnp.maximum(num_targets, 1).astype(jnp.float32)

    return NumTargets(*map(total, _targets(model, batch)))


def count_own_targets(model: ModelDef, batch: Batch) -> list[jax.Array]:
    """Returns this device's numbers of valid targets: of the next tokens, and of those after."""
    return [jnp.sum(target_BT >= 0).astype(jnp.float32) for target_BT in _targets(model, batch)]


def _targets(model: ModelDef, batch: Batch) -> list[jax.Array]:
    targets = [batch.target_BT]
    if model.cfg.model.predict_ahead:
        targets.append(targets_ahead(batch.target_BT, batch.segment_BT))
    return targets


def noise_key(model: ModelDef, state: TrainState) -> jax.Array:
    """Returns the key of a step's router noise."""
    key = jax.random.fold_in(jax.random.key(model.cfg.train.seed), state.step)
    # The first of two, so that runs of before go on to the same bits.
    return jax.random.split(key)[0]


def reduce_replicated_gradients(model: ModelDef, gradients: Tree) -> Tree:
    """Sums the gradients of replicated parameters, such as norm scales."""
    leaves, tree = jax.tree.flatten(gradients)
    both = list(zip(jax.tree.leaves(model.dims), jax.tree.leaves(model.layouts), strict=True))
    for layout in dict.fromkeys((model.layout, model.layout.inside)):
        of_layout = [(i, dims) for i, (dims, own) in enumerate(both) if own == layout]
        replicated = [i for i, dims in of_layout if layout.is_replicated(dims)]
        sums = reduce_replicated([leaves[i] for i in replicated], layout)
        for i, total in zip(replicated, sums, strict=True):
            leaves[i] = total
    return jax.tree.unflatten(tree, leaves)
