"""Codec states that travel through the backward pass beside the weights.

Per device, inside shard_map. The codec of a weight's gradient has a state. It enters forward beside
the weight, and the next state leaves backward as its "gradient". The `EncodeContext` enters too.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codecs.codec import EncodeContext
from moejax.comm.weights.compressed import ReduceState
from moejax.layout.layout import Layout


@jax.tree_util.register_dataclass
@dataclass
class WithResidual:
    """A parameter's shard with the state of its gradient's codec, on this device.

    Differentiating with respect to it gives the reduced gradient and the next state.
    """

    weight: Any  # an array; Any because JAX builds trees of other leaves too
    state: Any  # a `ReduceState`
    context: Any  # an `EncodeContext` as float32, which JAX can differentiate: see `to_floats`


def attach_residuals(
    params: Any, states: Any, dims: Any, context: EncodeContext, layout: Layout
) -> Any:
    """Puts codec states beside the parameters whose gradients have a codec.

    Args:
      dims: the dimension letters of each parameter; leading dimensions without one are layers.
      context: its key is the same on all devices. Each parameter, layer and device gets its own.
    """
    numbers = itertools.count()
    key = jax.random.fold_in(context.key, wire.index(layout.mesh_axes))

    def floats(number: jax.Array) -> jax.Array:
        return to_floats(context._replace(key=jax.random.fold_in(key, number)))

    def attach(param: jax.Array, letters: str, state: ReduceState | None) -> Any:
        if state is None:
            return param
        layers = param.shape[: param.ndim - len(letters)]
        own_state = jax.tree.map(lambda s: jnp.squeeze(s, len(layers)), state)
        own = jnp.array([next(numbers) for _ in range(math.prod(layers))])
        return WithResidual(param, own_state, jax.vmap(floats)(own).reshape(*layers, -1))

    return jax.tree.map(attach, params, dims, states)


def to_floats(context: EncodeContext) -> jax.Array:
    """A context as float32, which holds each half of a 32-bit word exactly."""
    step = jnp.asarray(context.step).astype(jnp.uint32)
    words = jnp.concatenate([step[None], jax.random.key_data(context.key)])
    return jnp.concatenate([words >> 16, words & 0xFFFF]).astype(jnp.float32)


def from_floats(floats: jax.Array) -> EncodeContext:
    """The inverse of `to_floats`."""
    high, low = jnp.split(floats.astype(jnp.uint32), 2)
    words = (high << 16) | low
    return EncodeContext(words[0].astype(jnp.int32), jax.random.wrap_key_data(words[1:]))


def detach_residuals(gradients: Any, dims: Any) -> tuple[Any, Any]:
    """The inverse of `attach_residuals`: returns gradients, and the next states."""

    def state(gradient: Any, letters: str) -> Any:
        if not isinstance(gradient, WithResidual):
            return None
        stack = gradient.weight.ndim - len(letters)
        return jax.tree.map(lambda s: jnp.expand_dims(s, stack), gradient.state)

    def weight(gradient: Any) -> jax.Array:
        return gradient.weight if isinstance(gradient, WithResidual) else gradient

    return (
        jax.tree.map(weight, gradients, is_leaf=has_residual),
        jax.tree.map(state, gradients, dims, is_leaf=has_residual),
    )


def has_residual(x: Any) -> bool:
    """Whether a codec's state stands beside a weight."""
    return isinstance(x, WithResidual)


def without_residuals(tree: Any) -> Any:
    """Drops the states: gradients of these weights are reduced without a codec."""
    return jax.tree.map(lambda x: x.weight if has_residual(x) else x, tree, is_leaf=has_residual)
