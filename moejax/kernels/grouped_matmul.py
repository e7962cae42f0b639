"""Products of rows, sorted by group, and the matrix of their group; with gradients.

Per device. Legend: M rows, G groups, K summed over, N columns. FLOPs: 2 * rows * K * N, of each
gradient as many. `reference.grouped_matmul` says what all of these compute.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.annotations import Array, Float, Int
from moejax.kernels import reference
from moejax.kernels.costs import jitted

# Each by the name that `select` knows it by.
IMPLEMENTATIONS = ("mosaic", "tokamax", "ragged_dot", "reference")


def grouped_matmul(
    x_MK: Float[Array, "M K"],
    w_GKN: Float[Array, "G K N"],
    sizes_G: Int[Array, " G"],
    *,
    implementation: str,
) -> Float[Array, "M N"]:
    """Multiplies each row by the matrix of its group; rows past the last group are zero.

    Args:
      x_MK: rows sorted by group; "mosaic" and "tokamax" take bfloat16, on Hopper.
      sizes_G: rows of each group, summing to at most M.
      implementation: "mosaic" sums gradients of weights over rows that it multiplies by zero, so
        rows past the last group must be finite, and their gradients too.
    """
    assert implementation in IMPLEMENTATIONS, implementation
    if implementation == "mosaic":
        return _mosaic(x_MK, w_GKN, sizes_G)
    if implementation == "tokamax":
        return _tokamax(x_MK, w_GKN, sizes_G)
    multiply = lax.ragged_dot if implementation == "ragged_dot" else reference.grouped_matmul
    return multiply(x_MK, w_GKN, sizes_G)


@jax.custom_vjp
def _mosaic(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return _multiply(x_MK, w_GKN, sizes_G)


def _mosaic_forward(x_MK, w_GKN, sizes_G):
    return _mosaic(x_MK, w_GKN, sizes_G), (x_MK, w_GKN, sizes_G)


def _mosaic_backward(saved, gradient_MN):
    x_MK, w_GKN, sizes_G = saved
    return product_gradients(x_MK, w_GKN, sizes_G, gradient_MN, implementation="mosaic")


_mosaic.defvjp(_mosaic_forward, _mosaic_backward)


def product_gradients(
    x_MK: jax.Array,
    w_GKN: jax.Array,
    sizes_G: jax.Array,
    gradient_MN: jax.Array,
    *,
    implementation: str,
) -> tuple[jax.Array, jax.Array, None]:
    """Returns the gradients of `grouped_matmul` by rows and by weights, and none by sizes."""
    if implementation == "reference":
        pull = jax.vjp(lambda x, w: reference.grouped_matmul(x, w, sizes_G), x_MK, w_GKN)[1]
        return *pull(gradient_MN), None
    assert implementation == "mosaic", implementation
    dx_MK = _multiply_transposed(gradient_MN, w_GKN, sizes_G)
    return dx_MK, _sum_outer(x_MK, gradient_MN, sizes_G, w_GKN.dtype), None


def _multiply(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    from moejax.kernels.mosaic import grouped_matmul as mosaic  # not in JAX before 0.11

    return jitted(mosaic.grouped_matmul, "products", *x_MK.shape, w_GKN.shape[2])(
        x_MK, w_GKN, sizes_G
    )


def _multiply_transposed(y_MN: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return jitted(_transposed, "products", *y_MN.shape, w_GKN.shape[1])(y_MN, w_GKN, sizes_G)


def _transposed(y_MN, w_GKN, sizes_G):
    from moejax.kernels.mosaic import grouped_matmul as mosaic

    return mosaic.grouped_matmul(y_MN, w_GKN, sizes_G, transposed=True)


def _sum_outer(x_MK: jax.Array, y_MN: jax.Array, sizes_G: jax.Array, dtype: Any) -> jax.Array:
    run = jitted(_outer, "products", *x_MK.shape, y_MN.shape[1])
    return run(x_MK, y_MN, sizes_G, jnp.zeros(0, dtype))


def _outer(x_MK, y_MN, sizes_G, like):
    from moejax.kernels.mosaic import grouped_outer as mosaic

    return mosaic.grouped_outer(x_MK, y_MN, sizes_G, like.dtype)


def _tokamax(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """By tokamax's kernel of that name: left to choose, it may take XLA's dense product."""
    import tokamax  # type: ignore[import-not-found]

    y_MN = tokamax.ragged_dot(x_MK, w_GKN, sizes_G, implementation="mosaic_gpu")
    inside_M = jnp.arange(x_MK.shape[0]) < jnp.sum(sizes_G)
    return jnp.where(inside_M[:, None], y_MN, 0)


@jax.custom_vjp
def swiglu_mlp(
    x_MD: jax.Array, w_in_GDUF: jax.Array, w_out_GFD: jax.Array, sizes_G: jax.Array
) -> jax.Array:
    """Each row through the SwiGLU of its group, by Mosaic kernels: `expert_mlp` of bfloat16.

    The first product and the activation are one kernel, which also keeps what backward needs.
    """
    return _swiglu_forward(x_MD, w_in_GDUF, w_out_GFD, sizes_G)[0]


def _swiglu_forward(x_MD, w_in_GDUF, w_out_GFD, sizes_G):
    from moejax.kernels.mosaic import grouped_matmul as mosaic

    hidden = w_in_GDUF.shape[2] * w_in_GDUF.shape[3]
    run = jitted(mosaic.grouped_swiglu, "products", *x_MD.shape, hidden)
    a_MF, h_MH = run(x_MD, w_in_GDUF, sizes_G)
    return _multiply(a_MF, w_out_GFD, sizes_G), (x_MD, h_MH, w_in_GDUF, w_out_GFD, sizes_G)


def _swiglu_backward(saved, dy_MD):
    x_MD, h_MH, w_in_GDUF, w_out_GFD, sizes_G = saved
    da_MF = _multiply_transposed(dy_MD, w_out_GFD, sizes_G)
    a_MF, pull = jax.vjp(swiglu, h_MH)
    (dh_MH,) = pull(da_MF)
    dw_out_GFD = _sum_outer(a_MF, dy_MD, sizes_G, w_out_GFD.dtype)
    dw_in_GDH = _sum_outer(x_MD, dh_MH, sizes_G, w_in_GDUF.dtype)
    w_in_GDH = w_in_GDUF.reshape(*w_in_GDUF.shape[:2], -1)
    dx_MD = _multiply_transposed(dh_MH, w_in_GDH, sizes_G)
    return dx_MD, dw_in_GDH.reshape(w_in_GDUF.shape), dw_out_GFD, None


swiglu_mlp.defvjp(_swiglu_forward, _swiglu_backward)


def swiglu(h_MH: jax.Array) -> jax.Array:
    """silu(gate) * up, in float32, of gate and up side by side."""
    gate_MF, up_MF = jnp.split(h_MH.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate_MF) * up_MF).astype(h_MH.dtype)
