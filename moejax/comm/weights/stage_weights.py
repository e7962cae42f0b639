"""Weights of pipeline stages: gathered once a step, and their gradients reduced once.

Per device, inside shard_map. `gather_stage_weights` runs before the first tick and
`reduce_stage_gradients` after the last, on gradients that are summed over all micro-batches. Ticks
hold no traffic of weights.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from moejax.comm.weights.gather import gather_shard, reduce_gradient
from moejax.comm.weights.path import compressible
from moejax.comm.weights.shard import Shard, as_shard
from moejax.layout.layout import RANK, Layout
from moejax.layout.spec import StepSpec


def gather_stage_weights(params: Any, dims: Any, layouts: Any, spec: StepSpec) -> Any:
    """Returns each weight unsharded, as layers compute with it: a `Shard` with `gathered` alone.

    Replicated weights are returned as they are.

    Args:
      params: this device's shards, arrays or `Shard`s; [m, N], with layers stacked [L, m, N].
      dims: the dimension letters of each parameter.
      layouts: the layout of each parameter.
    """

    def gather(letters: str, layout: Layout, param: Any) -> Any:
        if layout.is_replicated(letters):
            return param
        # Router matrices and biases compute in float32; gradients of factors are summed in it.
        half = compressible(letters) and RANK not in letters
        dtype = spec.dtype if half else "float32"
        layout_spec, shard = replace(spec, layout=layout), as_shard(param)
        gather_layer = partial(gather_shard, dims=letters, spec=layout_spec, dtype=dtype)
        gathered = _by_layer(gather_layer, shard, shard, letters)  # L m N -> L M N
        return Shard(None, gathered=gathered)

    with jax.named_scope("weights"):
        return jax.tree.map(gather, dims, layouts, params)


def reduce_stage_gradients(
    gradients: Any, params: Any, dims: Any, layouts: Any, spec: StepSpec
) -> Any:
    """The transpose of `gather_stage_weights`: returns the shards' gradients, over their devices.

    Gradients of replicated weights are not reduced here.

    Args:
      gradients: float32, like the result of `gather_stage_weights`.
      params, dims, layouts: as given to `gather_stage_weights`.
    """

    def reduce(letters: str, layout: Layout, param: Any, gradient: Any) -> Any:
        if layout.is_replicated(letters):
            return gradient
        layout_spec, shard = replace(spec, layout=layout), as_shard(param)

        def reduce_layer(pair: tuple[Shard, jax.Array]) -> Shard:
            return reduce_gradient(pair[1], pair[0], letters, layout_spec)

        # L M N -> L m N
        return _by_layer(reduce_layer, (shard, gradient.gathered), shard, letters)

    return jax.tree.map(reduce, dims, layouts, params, gradients)


def _by_layer(one: Callable, stacked: Any, shard: Shard, letters: str) -> Any:
    """Applies a function to each of the layers that are stacked in a shard."""
    for _ in range(shard.weight.ndim - len(letters)):
        one = partial(jax.lax.map, one)
    return one(stacked)
