"""Weights as generation holds them: adapters added, and each layer's apart.

A checkpoint stacks the layers of a group, which training scans. What a loop slices is copied, and
for the few tokens of a decoding step that takes longer than their products.
"""

from functools import partial

import jax

from moejax.comm.weights.adapters import WithAdapter, add_adapter, attach_adapters
from moejax.config.pattern import layer_groups
from moejax.step.adapters import matrices_in
from moejax.step.state import TrainState, Tree
from moejax.step.train_step import TrainStep


def separate(state: TrainState, stored: TrainStep) -> TrainState:
    """Returns the state with adapters in their weights and each layer apart; deletes its arrays.

    Args:
      state: of `stored`.
    """
    params = state.params if state.frozen is None else _adapted(state, stored)
    return state._replace(
        params=_apart(params, stored), router_bias=_apart(state.router_bias, stored), frozen=None
    )


def _adapted(state: TrainState, stored: TrainStep) -> Tree:
    """Adds adapters to their weights, and takes matrices to the dtype in which they multiply."""
    model = stored.model

    def add(weight: jax.Array | WithAdapter, letters: str, held: jax.ShapeDtypeStruct) -> jax.Array:
        def whole(weight: jax.Array | WithAdapter) -> jax.Array:
            if isinstance(weight, WithAdapter):
                weight = add_adapter(weight, letters, model.spec.adapter_scale)
            return weight.astype(held.dtype)

        result = jax.jit(whole, out_shardings=held.sharding)(weight).block_until_ready()
        jax.tree.map(lambda x: x.delete(), weight)
        return result

    return jax.tree.map(
        add,
        attach_adapters(state.frozen, state.params),
        model.frozen_dims,
        matrices_in(stored.cfg.model.dtype, model.frozen_dims, stored.abstract.frozen),
        is_leaf=lambda x: isinstance(x, WithAdapter),
    )


def _apart(tree: Tree, stored: TrainStep) -> Tree:
    """Cuts the stacked weights of each layer group into groups of one repeat."""
    if "groups" not in tree:
        return tree
    apart, first = {}, 0
    for number, (_, repeats) in enumerate(layer_groups(stored.cfg.model)):
        if number in tree["groups"]:
            leaves, structure = jax.tree.flatten(tree["groups"][number])
            cut = [_cut(leaf, repeats) for leaf in leaves]
            for repeat, own in enumerate(zip(*cut, strict=True)):
                apart[first + repeat] = jax.tree.unflatten(structure, own)
        first += repeats
    return {**tree, "groups": apart}


def _cut(stacked: jax.Array, repeats: int) -> list[jax.Array]:
    """Returns an array's parts of one repeat each, sharded as it is, and deletes it."""
    if repeats == 1:
        return [stacked]
    part = partial(jax.lax.dynamic_slice_in_dim, slice_size=1)
    part = jax.jit(part, out_shardings=stacked.sharding)
    parts = jax.block_until_ready([part(stacked, repeat) for repeat in range(repeats)])
    stacked.delete()
    return parts
