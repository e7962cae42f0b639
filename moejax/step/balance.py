"""Moves the selection biases of the experts after a step.

Per device, inside the shard_map of the training mesh. Letters: L expert layers, E experts, Q bins
(`moe.quantile`).
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.config.schema import RouterConfig
from moejax.layout.layout import Layout
from moejax.moe.quantile import balanced_bias
from moejax.moe.router import update_bias
from moejax.step.loss import LossParts
from moejax.step.model import ModelDef, layouts_of
from moejax.step.state import Tree


def moves_bias(cfg: RouterConfig) -> bool:
    """Whether steps move the selection biases."""
    return bool(cfg.bias_update_rate) or cfg.quantile_bins is not None


def move_biases(model: ModelDef, router_bias: Tree, parts: LossParts) -> Tree:
    """Returns the selection biases after a step, by loads or by quantiles.

    Wire: none for loads, which `parts` has of all devices. For quantiles the counts of this
    device's layers, L * E * Q int32, in one sum over the devices that hold these layers; with
    pipeline stages another sum over them, of the layers outside.
    """
    cfg, k = model.cfg.moe.router, model.cfg.moe.experts_per_token
    leaves, tree = jax.tree.flatten(router_bias)
    layouts = jax.tree.leaves(layouts_of(router_bias, model.cfg, model.spec))
    if cfg.quantile_bins is None:
        loads = _own_loads(parts.load_LE, router_bias, layouts)
        moved = [
            update_bias(b, load, cfg.bias_update_rate)
            for b, load in zip(leaves, loads, strict=True)
        ]
    else:
        assert parts.needed_LEQ is not None
        counts = _summed(parts.needed_LEQ, router_bias, layouts, model.layout)
        moved = [balanced_bias(n, b, k=k) for n, b in zip(counts, leaves, strict=True)]
    return jax.tree.unflatten(tree, moved)


def layers_of(x_L: jax.Array, router_bias: Tree, stages: list[int]) -> Iterator[jax.Array]:
    """Yields for each selection bias the entries of its layers.

    A bias is of one block of a layer group's pattern, stacked over repeats. Layers are in order of
    the model: the pattern's expert blocks take turns.

    Args:
      x_L: an entry for each expert layer, with any further dimensions.
      stages: for each bias, the stages whose layers `x_L` holds.
    """
    first = 0
    paths = zip(jax.tree_util.tree_leaves_with_path(router_bias), stages, strict=True)
    for _, group in groupby(paths, key=lambda leaf: _names(leaf[0][0])[:2]):
        biases = list(group)
        blocks, ((_, bias_LE), count) = len(biases), biases[0]
        repeats = len(bias_LE) * count
        own_L = x_L[first : first + repeats * blocks]
        if blocks > 1:
            by_block = own_L.reshape(repeats, blocks, *x_L.shape[1:])
            yield from (by_block[:, block] for block in range(blocks))
        else:
            yield own_L
        first += repeats * blocks


def _names(path: Any) -> list[Any]:
    return [getattr(entry, "key", None) for entry in path]


def _own_loads(load_LE: jax.Array, router_bias: Tree, layouts: list[Layout]) -> Iterator[jax.Array]:
    """Yields the loads of each bias's layers on this device."""
    found = layers_of(load_LE, router_bias, [own.size(own.stacked) for own in layouts])
    for own_LE, own in zip(found, layouts, strict=True):
        here = len(own_LE) // own.size(own.stacked)
        if own.stacked:
            first = wire.index(own.stacked) * here
            own_LE = jax.lax.dynamic_slice_in_dim(own_LE, first, here)
        yield own_LE


def _summed(
    needed_LEQ: jax.Array, router_bias: Tree, layouts: list[Layout], layout: Layout
) -> list[jax.Array]:
    """Returns the counts of each bias's layers on this device, over all tokens of the step."""
    needed_LEQ = wire.all_reduce(needed_LEQ, layout.inside.mesh_axes, tag=None)
    found = list(layers_of(needed_LEQ, router_bias, [1] * len(layouts)))
    outside = [place for place, own in enumerate(layouts) if layout.stage and not own.stacked]
    if outside:  # each stage saw some of the tokens
        joined = jnp.concatenate([found[place] for place in outside])
        joined, first = wire.all_reduce(joined, layout.stage, tag=None), 0
        for place in outside:
            count = len(found[place])
            found[place] = joined[first : first + count]
            first += count
    return found
