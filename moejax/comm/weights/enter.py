"""Weights that enter once for a step of which micro-batches run in turn through stages.

Per device, inside shard_map. `enter_weights` gathers every weight, whatever its layers, and
`leave_gradients` reduces the gradients that all micro-batches added up. What happens between the
two holds no traffic of weights.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from moejax.comm.weights.adapters import Adapter, WithAdapter
from moejax.comm.weights.gather import Entered, gathered, reduced, shard_of
from moejax.comm.weights.path import compressible
from moejax.layout.layout import RANK, Layout
from moejax.layout.spec import StepSpec


def enter_weights(params: Any, dims: Any, layouts: Any, spec: StepSpec) -> Any:
    """Returns all weights as this device computes with them, each an `Entered`.

    Those that every device holds stay as they are.

    Args:
      params: this device's shards, in any of their forms; layers may be stacked.
      dims: the dimension letters of each parameter.
      layouts: the layout of each parameter.
    """

    def enter(letters: str, layout: Layout, entry: Any) -> Any:
        if layout.is_whole(letters):
            return entry
        # The router's matrix and biases are computed with in float32; factors are added up in it.
        half = compressible(letters) and RANK not in letters
        dtype = spec.dtype if half else "float32"
        own = replace(spec, layout=layout)
        gather = _by_layer(lambda shard: gathered(shard, letters, own, dtype), entry, letters)
        return Entered(gather(entry))

    with jax.named_scope("weights"):
        return jax.tree.map(enter, dims, layouts, params)


def leave_gradients(gradients: Any, params: Any, dims: Any, layouts: Any, spec: StepSpec) -> Any:
    """The transpose of `enter_weights`: the gradients of the shards, reduced over their devices.

    Gradients of what every device holds are not summed here.

    Args:
      gradients: of what `enter_weights` returned, in float32.
    """

    def leave(letters: str, layout: Layout, entry: Any, gradient: Any) -> Any:
        if layout.is_whole(letters):
            return gradient
        own = replace(spec, layout=layout)
        reduce = _by_layer(lambda both: reduced(both[1], both[0], letters, own), entry, letters)
        return reduce((entry, gradient.whole))

    return jax.tree.map(leave, dims, layouts, params, gradients)


def adapters_in(weights: Any) -> Any:
    """The inverse of `attach_adapters`: returns the adapters, None for a weight without one."""

    def adapter_of(w: Any) -> Adapter | None:
        return w.adapter if isinstance(w, WithAdapter) else None

    return jax.tree.map(adapter_of, weights, is_leaf=is_entry)


def with_adapters(weights: Any, adapters: Any) -> Any:
    """Returns weights with other adapters, where they have some."""

    def replaced(w: Any, adapter: Adapter | None) -> Any:
        return w if adapter is None else WithAdapter(w.weight, adapter)

    return jax.tree.map(replaced, weights, adapters, is_leaf=is_entry)


def is_entry(x: Any) -> bool:
    """Whether a node of a tree is an entered weight, with or without its adapter."""
    return isinstance(x, (Entered, WithAdapter))


def _by_layer(one: Callable, entry: Any, letters: str) -> Callable:
    """Maps a function of one layer over the layers that are stacked in an entry."""
    for _ in range(shard_of(entry).ndim - len(letters)):
        one = _mapped(one)
    return one


def _mapped(one: Callable) -> Callable:
    return lambda stacked: jax.lax.map(one, stacked)
