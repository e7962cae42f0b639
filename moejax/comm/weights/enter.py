"""Weights that enter once a step, for pipeline stages that run micro-batches in turn.

Per device, inside shard_map. `enter_weights` gathers every weight, whatever its layers, and
`leave_gradients` reduces the gradients that all micro-batches added up. Nothing between the two
sends weights.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from moejax.comm.weights.gather import gather_shard, reduce_gradient
from moejax.comm.weights.path import compressible
from moejax.comm.weights.shard import Shard, as_shard
from moejax.layout.layout import RANK, Layout
from moejax.layout.spec import StepSpec


def enter_weights(params: Any, dims: Any, layouts: Any, spec: StepSpec) -> Any:
    """Returns each weight as this device computes with it: a `Shard` with `gathered` alone.

    Replicated weights stay as they are.

    Args:
      params: this device's shards, arrays or `Shard`s; layers may be stacked.
      dims: the dimension letters of each parameter.
      layouts: the layout of each parameter.
    """

    def enter(letters: str, layout: Layout, param: Any) -> Any:
        if layout.is_replicated(letters):
            return param
        # The router's matrix and biases are computed with in float32; factors are added up in it.
        half = compressible(letters) and RANK not in letters
        dtype = spec.dtype if half else "float32"
        own, shard = replace(spec, layout=layout), as_shard(param)
        gather = _by_layer(lambda one: gather_shard(one, letters, own, dtype), shard, letters)
        return Shard(None, gathered=gather(shard))

    with jax.named_scope("weights"):
        return jax.tree.map(enter, dims, layouts, params)


def leave_gradients(gradients: Any, params: Any, dims: Any, layouts: Any, spec: StepSpec) -> Any:
    """The transpose of `enter_weights`: the gradients of the shards, reduced over their devices.

    Gradients of replicated weights are not summed here.

    Args:
      gradients: in float32, as `enter_weights` returned the weights.
    """

    def leave(letters: str, layout: Layout, param: Any, gradient: Any) -> Any:
        if layout.is_replicated(letters):
            return gradient
        own, shard = replace(spec, layout=layout), as_shard(param)

        def reduce(both: tuple[Shard, jax.Array]) -> Shard:
            return reduce_gradient(both[1], both[0], letters, own)

        return _by_layer(reduce, shard, letters)((shard, gradient.gathered))

    return jax.tree.map(leave, dims, layouts, params, gradients)


def _by_layer(one: Callable, shard: Shard, letters: str) -> Callable:
    """Maps a function of one layer over the layers that are stacked in a shard."""
    for _ in range(shard.weight.ndim - len(letters)):
        one = _mapped(one)
    return one


def _mapped(one: Callable) -> Callable:
    return lambda stacked: jax.lax.map(one, stacked)
