"""States of gradient codecs on their way through the backward pass, beside their weights.

Per device, inside shard_map. Training keeps a codec's state with a dimension of devices, which a
device has one entry of. `attach_residuals` takes that dimension away and adds the `EncodeContext`;
`detach_residuals` puts it back.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codecs.codec import EncodeContext
from moejax.comm.weights.compressed import ReduceState
from moejax.comm.weights.shard import attach, detach
from moejax.layout.layout import Layout


class Residual(NamedTuple):
    """The state of the codec of one weight's gradient, on this device."""

    state: Any  # a `ReduceState`
    context: Any  # [6], an `EncodeContext` as float32, which JAX can differentiate: `to_floats`


def attach_residuals(
    params: Any, states: Any, dims: Any, context: EncodeContext, layout: Layout
) -> Any:
    """Returns the parameters as `Shard`s, with codec states where their gradients have a codec.

    Args:
      params: arrays [*layers, *shard].
      states: a `ReduceState` of arrays [*layers, 1, ...] for each parameter, or None.
      dims: the dimension letters of each parameter, without layers.
      context: its key is the same on all devices. Each parameter, layer and device gets its own.
    """
    numbers = itertools.count()
    key = jax.random.fold_in(context.key, wire.index(layout.mesh_axes))

    def floats(number: jax.Array) -> jax.Array:
        return to_floats(context._replace(key=jax.random.fold_in(key, number)))

    def enter(param: jax.Array, letters: str, state: ReduceState | None) -> Residual | None:
        if state is None:
            return None
        layers = param.shape[: param.ndim - len(letters)]
        own_state = jax.tree.map(lambda s: jnp.squeeze(s, len(layers)), state)
        own = jnp.array([next(numbers) for _ in range(math.prod(layers))])
        return Residual(own_state, jax.vmap(floats)(own).reshape(*layers, -1))

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


def to_floats(context: EncodeContext) -> jax.Array:
    """Returns a context as float32, which holds each half of a 32-bit word exactly."""
    step = jnp.asarray(context.step).astype(jnp.uint32)
    words = jnp.concatenate([step[None], jax.random.key_data(context.key)])
    return jnp.concatenate([words >> 16, words & 0xFFFF]).astype(jnp.float32)


def from_floats(floats: jax.Array) -> EncodeContext:
    """The inverse of `to_floats`."""
    high, low = jnp.split(floats.astype(jnp.uint32), 2)
    words = (high << 16) | low
    return EncodeContext(words[0].astype(jnp.int32), jax.random.wrap_key_data(words[1:]))
