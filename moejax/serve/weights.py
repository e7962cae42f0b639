"""Weights as generation holds them: in the dtype of their products, and each layer's apart.

A checkpoint stacks the layers of a group, which training scans. XLA copies the layers that a loop
slices, and for the few tokens of a decoding step the copy takes longer than their products.
"""

from functools import partial

import jax

from moejax.comm.weights.adapters import Adapter
from moejax.config.pattern import layer_groups
from moejax.step.adapters import full_name, matrices_in
from moejax.step.state import TrainState, Tree
from moejax.step.train_step import TrainStep


def separate(state: TrainState, stored: TrainStep) -> TrainState:
    """Returns a state of `stored` with each layer apart; deletes its arrays.

    Adapters are not merged into their weights, so that texts come from the run's arithmetic.
    """
    frozen = None if state.frozen is None else _apart(_narrowed(state.frozen, stored), stored)
    return state._replace(
        params=_apart(state.params, stored),
        router_bias=_apart(state.router_bias, stored),
        frozen=frozen,
    )


def targets_apart(stored: TrainStep) -> tuple[str, ...] | None:
    """Returns the full names of parameters with adapters, where each layer is apart.

    Patterns of `lora.targets` may name groups, which have other numbers there. None if the run
    trains all weights.
    """
    if stored.model.frozen_dims is None:
        return None
    adapters = jax.tree_util.tree_flatten_with_path(
        stored.dims, is_leaf=lambda x: isinstance(x, Adapter)
    )[0]
    groups = [repeats for _, repeats in layer_groups(stored.cfg.model)]
    return tuple(name for path, _ in adapters for name in _names_apart(full_name(path), groups))


def _names_apart(name: str, groups: list[int]) -> list[str]:
    """Returns the names of a parameter of each repeat of its group."""
    if not name.startswith("groups."):
        return [name]
    _, number, rest = name.split(".", 2)
    first = sum(groups[: int(number)])
    return [f"groups.{first + repeat}.{rest}" for repeat in range(groups[int(number)])]


def _narrowed(frozen: Tree, stored: TrainStep) -> Tree:
    """Takes frozen matrices to the dtype in which they multiply."""
    dims, dtype = stored.model.frozen_dims, stored.cfg.model.dtype

    def narrow(weight: jax.Array, held: jax.ShapeDtypeStruct) -> jax.Array:
        if weight.dtype == held.dtype:
            return weight
        cast = jax.jit(lambda x: x.astype(held.dtype), out_shardings=held.sharding)
        result = cast(weight).block_until_ready()
        weight.delete()
        return result

    return jax.tree.map(narrow, frozen, matrices_in(dtype, dims, stored.abstract.frozen))


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
