"""States of gradient codecs: their shapes and their shardings."""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from moejax.comm.codecs.build import build_codec
from moejax.comm.weights.compressed import empty_state
from moejax.comm.weights.path import class_of, compressible, parts_shape, path_of
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec


def residual_shapes(spec: StepSpec, param: Any, dims: str, layout: Layout) -> Any:
    """Returns shapes of the codec state of a parameter's gradient, or None; see `TrainState`.

    Args:
      param: an array or its shape; layers may be stacked.
      layout: of the parameter.
    """
    policy = spec.compression
    path = path_of(dims, layout)
    codecs = [build_codec(codec) for codec in policy.all_of(class_of(dims))]
    if not codecs or not path.slow or not compressible(dims):
        return None
    num_layer_dims = param.ndim - len(dims)
    shape = parts_shape(math.prod(param.shape[num_layer_dims:]), dims, layout)
    state = jax.eval_shape(lambda: empty_state(codecs, *shape))
    leading = (*param.shape[:num_layer_dims], layout.size(layout.mesh_axes))
    return jax.tree.map(
        # None for an empty state: checkpoints hold no empty arrays.
        lambda s: jax.ShapeDtypeStruct(leading + s.shape, s.dtype) if s.size else None,
        state,
    )


def residual_specs(states: Any, params: Any, dims: Any, layouts: Any) -> Any:
    """Returns shardings of the arrays of `residual_shapes`: each device holds its own state.

    Args:
      layouts: the layout of each parameter.
    """

    def spec(param: Any, letters: str, layout: Layout, state: Any) -> Any:
        leading = layout.stack_spec(param.ndim - len(letters))
        return jax.tree.map(lambda _: PartitionSpec(*leading, layout.mesh_axes), state)

    return jax.tree.map(spec, params, dims, layouts, states)
