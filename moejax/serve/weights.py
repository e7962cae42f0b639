"""Weights as generation holds them: in the dtype of their products, and each layer's apart.

A checkpoint stacks the layers of a group, which training scans. XLA copies the layers that a loop
slices, and for the few tokens of a decoding step the copy takes longer than their products.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.comm.host import to_device
from moejax.comm.weights.adapters import Adapter
from moejax.config.pattern import layer_groups
from moejax.runtime.processes import ALONE, Processes
from moejax.step.adapters import full_name
from moejax.step.state import TrainState, Tree
from moejax.step.train_step import TrainStep


class Separator:
    """Cuts the stacked weights of a run into layers. A further state compiles nothing."""

    def __init__(self, apart: TrainStep, processes: Processes = ALONE):
        """Takes the functions for weights with each layer apart; several processes share it."""
        self._apart, self._processes = apart, processes
        self._made: dict[Any, Any] = {}

    def take(self, state: TrainState, *, keep: bool = False) -> TrainState:
        """Returns the weights of a state with each layer apart. All processes call it.

        Adapters are not merged into their weights, so that texts come from the run's arithmetic.
        Arrays that need no change are handed on, and not copied.

        Args:
          state: a state of a run on the same devices, in any dtype and layout: that of pipeline
            stages, for example.
          keep: whether the state lives on. If not, its arrays are deleted as they are cut. Either
            way a device holds one further layer at a time beside its arguments and results.
        """
        held = self._apart.abstract
        taken = {
            part: self._taken(getattr(state, part), getattr(held, part), keep)
            for part in ("params", "router_bias", "frozen")
        }
        return state._replace(optimizer=(), reduction=None, load_LE=None, **taken)

    def _taken(self, tree: Tree, held: Tree, keep: bool) -> Tree:
        """Moves weights, and cuts the stacked ones of a layer group into groups of one repeat."""
        if tree is None:
            return None
        taken = {
            name: jax.tree.map(partial(self._moved, keep=keep), part, tree[name])
            for name, part in held.items()
            if name != "groups"
        }
        if "groups" in tree:
            taken["groups"] = self._layers(tree["groups"], held["groups"], keep)
        return taken

    def _layers(self, groups: Tree, held: Tree, keep: bool) -> Tree:
        apart, first = {}, 0
        for number, (_, repeats) in enumerate(layer_groups(self._apart.cfg.model)):
            if number in groups:
                cut = partial(self._cut, repeats=repeats, keep=keep)
                layers = jax.tree.map(cut, held[first], groups[number])
                for repeat in range(repeats):
                    apart[first + repeat] = jax.tree.map(
                        lambda _, own, repeat=repeat: own[repeat], held[first], layers
                    )
            first += repeats
        return apart

    def _cut(self, held: Any, stacked: jax.Array, *, repeats: int, keep: bool) -> list[jax.Array]:
        """Returns an array's parts of one repeat each."""
        if repeats == 1:
            return [self._moved(held, stacked, keep=keep)]
        shared = stacked.sharding.shard_shape(stacked.shape)[0] < repeats
        function = self._jitted(_layer_of_stages if shared else _layer, held)
        parts = [self._call(function, stacked, repeat) for repeat in range(repeats)]
        if not keep:
            stacked.delete()
        return parts

    def _moved(self, held: Any, array: jax.Array, *, keep: bool) -> jax.Array:
        """Returns an array in the dtype and the sharding in which it is held."""
        alike = array.sharding.is_equivalent_to(held.sharding, array.ndim)
        if alike and array.dtype == held.dtype:
            return array
        moved = self._call(self._jitted(_cast, held), array)
        if not keep:
            array.delete()
        return moved

    def _jitted(self, function: Any, held: Any) -> Any:
        key = function, held.dtype, held.sharding
        if key not in self._made:
            cast = partial(function, dtype=held.dtype)
            self._made[key] = jax.jit(cast, out_shardings=held.sharding)
        return self._made[key]

    def _call(self, function: Any, *arguments: Any) -> jax.Array:
        """Calls a function, and waits: a collective is under way at a time."""
        if self._processes.count > 1:
            function = self._processes.compile(function, *arguments)
        return function(*arguments).block_until_ready()


def _cast(x: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    return to_device(x).astype(dtype)


def _layer(stacked: jax.Array, repeat: Any, *, dtype: DTypeLike) -> jax.Array:
    return to_device(jax.lax.dynamic_slice_in_dim(stacked, repeat, 1)).astype(dtype)


def _layer_of_stages(stacked: jax.Array, repeat: Any, *, dtype: DTypeLike) -> jax.Array:
    """As `_layer`, of layers that devices share: a sum sends one layer, a slice would send all."""
    own = jnp.arange(len(stacked)).reshape(-1, *[1] * (stacked.ndim - 1)) == repeat
    return jnp.sum(jnp.where(own, stacked.astype(dtype), 0), axis=0, keepdims=True)


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
