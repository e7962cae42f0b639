"""A stage's view of the weights of a model whose last layer groups are spread over stages.

Per device, inside the shard_map of the training mesh. All weights enter once a step
(`comm.weights.enter`). Adapters are trained alone, where there are any: they stand beside their
weights, and backward gives gradients of what is trained and of nothing else.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm.weights.enter import enter_weights
from moejax.comm.weights.shard import attach, detach
from moejax.step.model import ModelDef, layouts_of
from moejax.step.state import TrainState, Tree


class StagedWeights:
    """The weights that this device computes with.

    Attributes:
      chunks: number of chunks of layers on a stage, each a layer group.
      groups: names of these groups.
      trained: what is trained of all weights: the weights, or adapters.
      outer: weights of everything but the stages' layers, with their adapters.
      layers: weights of this stage's layers, those of its chunks one after the other.
      adapters: of these layers; None if all weights are trained.
    """

    def __init__(self, model: ModelDef, state: TrainState, params: Tree):
        """Takes what is trained as `params`, which may have the states of codecs beside it."""
        self.chunks = model.cfg.model.stage_chunks
        self.trained = every = enter_weights(params, model.dims, model.layouts, model.spec)
        if state.frozen is not None:
            layouts = layouts_of(state.frozen, model.cfg, model.spec)
            every = enter_weights(state.frozen, model.frozen_dims, layouts, model.spec)
        self.groups = sorted(every["groups"])[-self.chunks :]
        self.outer, self.layers = self.outer_of(every), self.stacked(every["groups"])
        self.adapters = None
        if state.frozen is not None:
            self.adapters = self.stacked(self.trained["groups"])
            self.outer = attach(self.outer, adapters=self.outer_of(self.trained))

    def stacked(self, groups: Tree) -> Tree:
        """Returns arrays of the stages' groups, those of the chunks one after the other."""
        own = [groups[group] for group in self.groups]
        return own[0] if len(own) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *own)

    def outer_of(self, tree: Tree) -> Tree:
        """Returns the part of a tree like the parameters that is outside of the stages' layers."""
        others = {g: own for g, own in tree["groups"].items() if g not in self.groups}
        return {**tree, "groups": others}

    def join(self, outer: Tree, layers: Tree) -> Tree:
        """Returns a tree like the parameters."""
        count = self.chunks

        def part(chunk: int) -> Tree:
            return jax.tree.map(lambda x: x if count == 1 else jnp.split(x, count)[chunk], layers)

        own = {group: part(chunk) for chunk, group in enumerate(self.groups)}
        return {**outer, "groups": {**outer["groups"], **own}}

    @property
    def repeats(self) -> int:
        """Repeats of a chunk on this stage: what runs, and is kept, one after the other."""
        return len(jax.tree.leaves(self.layers)[0]) // self.chunks

    @property
    def trained_layers(self) -> Tree:
        """The layers' weights if they are trained, else their adapters."""
        return self.layers if self.adapters is None else self.adapters

    def layer(self, index: jax.Array) -> Tree:
        """Returns the weights of one of this stage's repeats, of all its chunks."""
        weights = at(self.layers, index)
        if self.adapters is None:
            return weights
        return attach(weights, adapters=at(self.adapters, index))

    def trained_of(self, weights: Tree) -> Tree:
        """Returns the part of weights that is trained: all, or their adapters."""
        return weights if self.adapters is None else detach(weights).adapter

    def put_trained(self, weights: Tree, trained: Tree) -> Tree:
        """Returns weights with other values of what is trained of them."""
        return trained if self.adapters is None else attach(weights, adapters=trained)

    def outer_with(self, part: Tree) -> Tree:
        """Returns `outer` with other values of a part of what is trained of it."""
        return self.put_trained(self.outer, put_part(self.trained_of(self.outer), part))

    def trains(self, *names: str) -> bool:
        """Whether anything is trained of a part of `outer`."""
        part = self.trained
        for name in names:
            part = part[name]
        return bool(jax.tree.leaves(part))


def at(stacked: Tree, index: jax.Array) -> Tree:
    """Returns one entry of stacked arrays."""
    return jax.tree.map(partial(lax.dynamic_index_in_dim, index=index, keepdims=False), stacked)


def put_part(outer: Tree, part: Tree) -> Tree:
    """Returns a tree like `StagedWeights.outer`, or its gradients, with a part of it replaced."""
    return {**outer, **part, "embedding": {**outer["embedding"], **part["embedding"]}}
