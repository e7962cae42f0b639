"""Weights that enter once for a step of which micro-batches run in turn through stages.

Per device, inside shard_map. `enter_weights` gathers every weight, whatever its layers, and
`leave_gradients` reduces the gradients that all micro-batches added up. What happens between the
two holds no traffic of weights.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from moejax.comm.weights.adapters import (
    Adapter,
    WithAdapter,
    add_adapter,
    factor_gradients,
)
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
        # The router's matrix and biases are computed with in float32, and adapters added in it.
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


def add_entered(weights: Any, adapters: Any, dims: Any, scale: float) -> Any:
    """Returns entered weights with their adapters added. Layers may be stacked.

    Args:
      adapters: for each weight an `Adapter` that entered, or None.
    """

    def added(letters: str, weight: Any, adapter: Adapter | None) -> Any:
        if adapter is None:
            return weight
        own = WithAdapter(weight.whole, Adapter(*map(_whole_of, adapter)))
        return Entered(add_adapter(own, letters, scale).astype(weight.whole.dtype))

    return jax.tree.map(added, dims, weights, adapters)


def entered_factor_gradients(gradients: Any, adapters: Any, dims: Any, scale: float) -> Any:
    """Returns the gradients of adapters, float32, from those of `add_entered`'s results.

    Arguments as of `add_entered`.
    """

    def factors(letters: str, gradient: Any, adapter: Adapter | None) -> Adapter | None:
        if adapter is None:
            return None
        whole = gradient.whole
        own = Adapter(*(_whole_of(x).astype(whole.dtype) for x in adapter))
        of_layer = partial(factor_gradients, dims=letters, scale=scale)
        for _ in range(whole.ndim - len(letters)):
            of_layer = jax.vmap(of_layer)
        results = zip(of_layer(whole, own), adapter, strict=True)
        return Adapter(*(Entered(g) if isinstance(x, Entered) else g for g, x in results))

    return jax.tree.map(factors, dims, gradients, adapters)


def _whole_of(entry: Any) -> jax.Array:
    return entry.whole if isinstance(entry, Entered) else entry


def _by_layer(one: Callable, entry: Any, letters: str) -> Callable:
    """Maps a function of one layer over the layers that are stacked in an entry."""
    for _ in range(shard_of(entry).ndim - len(letters)):
        one = _mapped(one)
    return one


def _mapped(one: Callable) -> Callable:
    return lambda stacked: jax.lax.map(one, stacked)
