"""States of gradient codecs: their shapes, and their way through backward beside their weights.

Per device, inside shard_map, but for shapes and shardings. Training keeps a codec's state with a
dimension of devices, which a device has one entry of. `attach_residuals` takes that dimension away
and adds the run's step; `detach_residuals` puts it back.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moejax.comm.codecs.codec import build_codec
from moejax.comm.weights.compressed import ReduceState, empty_state
from moejax.comm.weights.path import class_of, compressible, parts_shape, path_of
from moejax.comm.weights.shard import attach, detach
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec


class Residual(NamedTuple):
    """The state of the codec of one weight's gradient, on this device."""

    state: Any  # a `ReduceState`
    step: Any  # of the run; float32, which JAX can differentiate, exact below 2^24


def attach_residuals(params: Any, states: Any, dims: Any, step: jax.Array) -> Any:
    """Returns the parameters as `Shard`s, with codec states where their gradients have a codec.

    Args:
      params: arrays [*layers, *shard].
      states: a `ReduceState` of arrays [*layers, 1, ...] for each parameter, or None.
      dims: the dimension letters of each parameter, without layers.
      step: counted from zero.
    """

    def enter(param: jax.Array, letters: str, state: ReduceState | None) -> Residual | None:
        if state is None:
            return None
        layers = param.shape[: param.ndim - len(letters)]
        own_state = jax.tree.map(lambda s: jnp.squeeze(s, len(layers)), state)
        return Residual(own_state, jnp.broadcast_to(step.astype(jnp.float32), layers))

    return attach(params, residuals=jax.tree.map(enter, params, dims, states))


def detach_residuals(gradients: Any, dims: Any) -> tuple[Any, Any]:
    """The inverse of `attach_residuals`: returns the gradients of weights, and the next states."""
    found = detach(gradients)

    def leave(gradient: jax.Array, letters: str, residual: Residual | None) -> ReduceState | None:
        if residual is None:
            return None
        stack = gradient.ndim - len(letters)
        return jax.tree.map(lambda s: jnp.expand_dims(s, stack), residual.state)

    return found.weight, jax.tree.map(leave, found.weight, dims, found.residual)


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
    leading = (*param.shape[:num_layer_dims], layout.size(layout.sites + layout.mesh_axes))
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
        return jax.tree.map(
            lambda _: PartitionSpec(*leading, layout.sites + layout.mesh_axes), state
        )

    return jax.tree.map(spec, params, dims, layouts, states)
