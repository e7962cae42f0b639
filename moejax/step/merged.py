"""The weights of a run with adapters as one set of weights: each adapter added to its weight."""

import jax
import jax.numpy as jnp

from moejax.comm import gloo
from moejax.comm.weights.adapters import WithAdapter, add_adapter, attach_adapters
from moejax.step.state import TrainState, Tree
from moejax.step.train_step import TrainStep


def merged_weights(train_step: TrainStep, state: TrainState) -> Tree:
    """Returns all weights in float32, sharded as in the state; sends nothing.

    Without adapters they are the state's own.
    """
    if state.frozen is None:
        return state.params
    dims, scale = train_step.model.frozen_dims, train_step.spec.adapter_scale

    def merge(frozen: Tree, adapters: Tree) -> Tree:
        def of(letters: str, w: jax.Array | WithAdapter) -> jax.Array:
            if isinstance(w, WithAdapter):
                return add_adapter(w, letters, scale)
            return w.astype(jnp.float32)

        return jax.tree.map(of, dims, attach_adapters(frozen, adapters))

    specs = jax.tree.map(lambda x: x.sharding.spec, train_step.abstract)
    arguments = (specs.frozen, specs.params)
    mapped = gloo.shard_map(merge, train_step.mesh, arguments, specs.frozen)
    return jax.jit(mapped)(state.frozen, state.params)
