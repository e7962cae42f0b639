"""The activations of experts and MLPs: SwiGLU, its clamped form, GEGLU, and the square of ReLU.

Per device. Legend: F hidden, W = 2 F: gate and up side by side, or F without a gate; M rows of N
numbers. All compute in float32.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

# gate * sigmoid(1.702 * gate) is close to GELU. Source: Hendrycks and Gimpel 2016; gpt-oss.
SLOPE = 1.702


class Gate(NamedTuple):
    """An activation.

    Attributes:
      kind: a value of `model.activation`.
      limit: limit of clamped SwiGLU; None for others.
    """

    kind: str = "swiglu"
    limit: float | None = None


SWIGLU = Gate()


@jax.custom_vjp
def with_dots(x_MN: jax.Array, one_M1: jax.Array) -> jax.Array:
    """Returns x. The gradient of `one_M1` is each row's product with its gradient, float32.

    Args:
      one_M1: ones, which are not multiplied.
    """
    return x_MN


def _with_dots_forward(x_MN, one_M1):
    return x_MN, x_MN


def _with_dots_backward(x_MN, gradient_MN):
    return gradient_MN, row_dots(x_MN, gradient_MN)


with_dots.defvjp(_with_dots_forward, _with_dots_backward)


def row_dots(x_MN: jax.Array, y_MN: jax.Array) -> jax.Array:
    """Returns the product of each row of x and the same row of y, float32 [M, 1]."""
    return jnp.sum(x_MN.astype(jnp.float32) * y_MN.astype(jnp.float32), axis=-1, keepdims=True)


def activate(h: jax.Array, gate: Gate) -> jax.Array:
    """Returns [..., F] of h [..., W]."""
    if gate.kind in ("geglu", "relu2"):
        return geglu(h) if gate.kind == "geglu" else relu2(h)
    return swiglu(h) if gate.limit is None else clamped_swiglu(gate.limit, h)


def swiglu(h: jax.Array) -> jax.Array:
    """Returns silu(gate) * up."""
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(h.dtype)


@jax.custom_vjp
def geglu(h: jax.Array) -> jax.Array:
    """Returns gelu(gate) * up, with the form of GELU by tanh. For backward only `h` is kept.

    Sources: Shazeer 2020; Hendrycks and Gimpel 2016.
    """
    return _geglu(h)


def _geglu(h: jax.Array) -> jax.Array:
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.gelu(gate, approximate=True) * up).astype(h.dtype)


def _geglu_backward(h, gradient):
    return jax.vjp(_geglu, h)[1](gradient)


geglu.defvjp(lambda h: (geglu(h), h), _geglu_backward)


def relu2(h: jax.Array) -> jax.Array:
    """Returns the square of max(h, 0). Source: So et al., Primer (2021)."""
    positive = jax.nn.relu(h.astype(jnp.float32))
    return (positive * positive).astype(h.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def clamped_swiglu(limit: float, h: jax.Array) -> jax.Array:
    """Returns gate * sigmoid(1.702 gate) * (up + 1), with gate cut at `limit`, up at +-`limit`.

    A value at the limit passes its gradient on, as in torch: in bfloat16 many lie there. For
    backward only `h` is kept.
    """
    return _clamped(limit, h)


def _clamped(limit: float, h: jax.Array) -> jax.Array:
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    # Comparisons that are false for NaN, so that it goes through.
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return (gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)).astype(h.dtype)


def _forward(limit, h):
    return clamped_swiglu(limit, h), h


def _backward(limit, h, gradient):
    return jax.vjp(partial(_clamped, limit), h)[1](gradient)


clamped_swiglu.defvjp(_forward, _backward)
