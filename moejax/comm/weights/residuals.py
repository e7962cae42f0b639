"""What a codec remembers, beside the weight whose gradient it encodes, through the backward pass.

Per device, inside shard_map. A state enters beside its weight and its next value leaves as its
"gradient"; when and where something is encoded enters with it.
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
    """A parameter's shard, and what the codec of its gradient remembers, on this device.

    Differentiating with respect to it gives the reduced gradient and the next state.
    """

    weight: Any  # an array; jax builds trees of other things too
    state: Any  # a `ReduceState`
    when: Any  # a `EncodeContext` in float32, so that it may be differentiated: see `to_floats`


def attach_residuals(
    params: Any, states: Any, dims: Any, context: EncodeContext, layout: Layout
) -> Any:
    """The parameters, with what codecs remember beside those that have one.

    Args:
      context: its key is the same on all devices. Each parameter, layer and device gets its own.
    """
    numbers = itertools.count()
    key = jax.random.fold_in(context.key, wire.index(layout.mesh_axes))

    def when(number: jax.Array) -> jax.Array:
        return to_floats(context._replace(key=jax.random.fold_in(key, number)))

    def beside(param: jax.Array, letters: str, state: ReduceState | None) -> Any:
        if state is None:
            return param
        stack = param.shape[: param.ndim - len(letters)]
        own = jax.tree.map(lambda s: jnp.squeeze(s, len(stack)), state)
        which = jnp.array([next(numbers) for _ in range(math.prod(stack))])
        return WithResidual(param, own, jax.vmap(when)(which).reshape(*stack, -1))

    return jax.tree.map(beside, params, dims, states)


def to_floats(context: EncodeContext) -> jax.Array:
    """A context as float32, which holds every half of a 32-bit word exactly."""
    counts = jnp.stack([jnp.asarray(n).astype(jnp.uint32) for n in (context.step, context.part)])
    words = jnp.concatenate([counts, jax.random.key_data(context.key)])
    return jnp.concatenate([words >> 16, words & 0xFFFF]).astype(jnp.float32)


def from_floats(when: jax.Array) -> EncodeContext:
    """The inverse of `to_floats`."""
    high, low = jnp.split(when.astype(jnp.uint32), 2)
    words = (high << 16) | low
    step, part = words[:2].astype(jnp.int32)
    return EncodeContext(step, jax.random.wrap_key_data(words[2:]), part)


def detach_residuals(gradients: Any, dims: Any) -> tuple[Any, Any]:
    """The inverse of `attach_residuals`: gradients, and the next states."""

    def state(gradient: Any, letters: str) -> Any:
        if not isinstance(gradient, WithResidual):
            return None
        stack = gradient.weight.ndim - len(letters)
        return jax.tree.map(lambda s: jnp.expand_dims(s, stack), gradient.state)

    def weight(gradient: Any) -> jax.Array:
        return gradient.weight if isinstance(gradient, WithResidual) else gradient

    return (
        jax.tree.map(weight, gradients, is_leaf=_is_carried),
        jax.tree.map(state, gradients, dims, is_leaf=_is_carried),
    )


def _is_carried(x: Any) -> bool:
    return isinstance(x, WithResidual)


def without_residuals(tree: Any) -> Any:
    """The weights of a tree alone: their gradients travel as they are."""
    return jax.tree.map(lambda x: x.weight if _is_carried(x) else x, tree, is_leaf=_is_carried)
