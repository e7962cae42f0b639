"""States of gradient codecs on their way through the backward pass, beside their weights.

Per device, inside shard_map. Training keeps a codec's state with a dimension of devices, which a
device has one entry of. `attach_residuals` takes that dimension away and adds the run's step;
`detach_residuals` puts it back.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm.weights.compressed import ReduceState
from moejax.comm.weights.shard import attach, detach


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
