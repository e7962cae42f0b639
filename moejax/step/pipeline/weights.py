"""Weights of a model whose last layer groups are spread over stages, as one stage holds them.

Per device, inside the shard_map of the training mesh. All weights are gathered once a step
(`comm.weights.stage_weights`). With adapters the adapters alone are trained: they stand beside
their frozen weights, and backward returns gradients of the adapters alone.

Letters: V virtual stages on a stage, L this stage's layers, of all its virtual stages.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm.weights.shard import attach, detach
from moejax.comm.weights.stage_weights import gather_stage_weights
from moejax.step.model import ModelDef, layouts_of
from moejax.step.state import TrainState, Tree


class StagedWeights:
    """The gathered weights that this device computes with.

    Attributes:
      virtual_stages: on each stage. Each has a layer group of its own, spread over the stages.
      groups: names of these groups.
      trained: the trained part of all weights: the weights themselves, or adapters.
      outer: weights outside of the stages' layers, with their adapters.
      layers: weights of this stage's layers [L, ...], virtual stage by virtual stage.
      adapters: of these layers [L, ...]; None if all weights are trained.
    """

    def __init__(self, model: ModelDef, state: TrainState, params: Tree):
        """Gathers the weights.

        Args:
          params: trained parameters, arrays or `Shard`s with states of codecs.
        """
        self.virtual_stages = model.cfg.model.stage_chunks
        weights = gather_stage_weights(params, model.dims, model.layouts, model.spec)
        self.trained = weights
        if state.frozen is not None:
            layouts = layouts_of(state.frozen, model.cfg, model.spec)
            weights = gather_stage_weights(state.frozen, model.frozen_dims, layouts, model.spec)
        self.groups = sorted(weights["groups"])[-self.virtual_stages :]
        self.outer, self.layers = self.outer_of(weights), self.stacked(weights["groups"])
        self.adapters = None
        if state.frozen is not None:
            self.adapters = self.stacked(self.trained["groups"])
            self.outer = attach(self.outer, adapters=self.outer_of(self.trained))

    def stacked(self, groups: Tree) -> Tree:
        """Returns arrays [L, ...] of the stages' groups, virtual stage by virtual stage."""
        arrays = [groups[group] for group in self.groups]
        if len(arrays) == 1:
            return arrays[0]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *arrays)

    def outer_of(self, tree: Tree) -> Tree:
        """Returns the part of a tree like the parameters that is outside of the stages' layers."""
        others = {g: group for g, group in tree["groups"].items() if g not in self.groups}
        return {**tree, "groups": others}

    def join(self, outer: Tree, layers: Tree) -> Tree:
        """Returns a tree like the parameters, of trees like `outer` and `layers`."""
        count = self.virtual_stages

        def part(v: int) -> Tree:
            return jax.tree.map(lambda x: x if count == 1 else jnp.split(x, count)[v], layers)

        groups = {group: part(v) for v, group in enumerate(self.groups)}
        return {**outer, "groups": {**outer["groups"], **groups}}

    @property
    def repeats(self) -> int:
        """Layers of a virtual stage on this stage, L / V. A layer is a repeat of a layer group."""
        return len(jax.tree.leaves(self.layers)[0]) // self.virtual_stages

    @property
    def trained_layers(self) -> Tree:
        """The layers' weights if they are trained, else their adapters; [L, ...]."""
        return self.layers if self.adapters is None else self.adapters

    def layer(self, index: jax.Array) -> Tree:
        """Returns the weights of one of this stage's L layers, with its adapters."""
        weights = entry(self.layers, index)
        if self.adapters is None:
            return weights
        return attach(weights, adapters=entry(self.adapters, index))

    def trained_of(self, weights: Tree) -> Tree:
        """Returns the trained part of weights: all, or their adapters."""
        return weights if self.adapters is None else detach(weights).adapter

    def replace_trained(self, weights: Tree, trained: Tree) -> Tree:
        """Returns weights whose trained part is replaced."""
        return trained if self.adapters is None else attach(weights, adapters=trained)

    def outer_with(self, part: Tree) -> Tree:
        """Returns `outer`, with some of its trained weights replaced by `part`."""
        return self.replace_trained(self.outer, replace_part(self.trained_of(self.outer), part))

    def trains(self, *names: str) -> bool:
        """Whether any weight is trained below this path of `outer`."""
        part = self.trained
        for name in names:
            part = part[name]
        return bool(jax.tree.leaves(part))


def entry(stacked: Tree, index: jax.Array) -> Tree:
    """Returns one entry of each array of a tree along its first dimension, [...] of [n, ...]."""
    return jax.tree.map(partial(lax.dynamic_index_in_dim, index=index, keepdims=False), stacked)


def replace_part(outer: Tree, part: Tree) -> Tree:
    """Returns a tree like `StagedWeights.outer` with the entries of `part` in place of its own."""
    return {**outer, **part, "embedding": {**outer["embedding"], **part["embedding"]}}
