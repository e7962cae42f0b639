"""Products of rows, sorted by group, and the matrix of their group; with gradients.

Per device. Legend: M rows, G groups, K summed over, N columns. FLOPs: 2 * rows * K * N, of each
gradient as many. `reference.grouped_matmul` says what all of these compute.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.kernels import reference

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
    from moejax.kernels.mosaic import grouped_matmul as mosaic  # not in JAX before 0.11

    return mosaic.grouped_matmul(x_MK, w_GKN, sizes_G)


def _mosaic_forward(x_MK, w_GKN, sizes_G):
    return _mosaic(x_MK, w_GKN, sizes_G), (x_MK, w_GKN, sizes_G)


def _mosaic_backward(saved, gradient_MN):
    from moejax.kernels.mosaic import grouped_matmul as mosaic

    x_MK, w_GKN, sizes_G = saved
    dx_MK = mosaic.grouped_matmul(gradient_MN, w_GKN, sizes_G, transposed=True)
    return dx_MK, mosaic.grouped_outer(x_MK, gradient_MN, sizes_G, w_GKN.dtype), None


_mosaic.defvjp(_mosaic_forward, _mosaic_backward)


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

    a_MF, h_MH = mosaic.grouped_swiglu(x_MD, w_in_GDUF, sizes_G)
    y_MD = mosaic.grouped_matmul(a_MF, w_out_GFD, sizes_G)
    return y_MD, (x_MD, h_MH, w_in_GDUF, w_out_GFD, sizes_G)


def _swiglu_backward(saved, dy_MD):
    from moejax.kernels.mosaic import grouped_matmul as mosaic

    x_MD, h_MH, w_in_GDUF, w_out_GFD, sizes_G = saved
    da_MF = mosaic.grouped_matmul(dy_MD, w_out_GFD, sizes_G, transposed=True)
    a_MF, pull = jax.vjp(swiglu, h_MH)
    (dh_MH,) = pull(da_MF)
    dw_out_GFD = mosaic.grouped_outer(a_MF, dy_MD, sizes_G, w_out_GFD.dtype)
    dw_in_GDH = mosaic.grouped_outer(x_MD, dh_MH, sizes_G, w_in_GDUF.dtype)
    w_in_GDH = w_in_GDUF.reshape(*w_in_GDUF.shape[:2], -1)
    dx_MD = mosaic.grouped_matmul(dh_MH, w_in_GDH, sizes_G, transposed=True)
    return dx_MD, dw_in_GDH.reshape(w_in_GDUF.shape), dw_out_GFD, None


swiglu_mlp.defvjp(_swiglu_forward, _swiglu_backward)


def swiglu(h_MH: jax.Array) -> jax.Array:
    """silu(gate) * up, in float32, of gate and up side by side."""
    gate_MF, up_MF = jnp.split(h_MH.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate_MF) * up_MF).astype(h_MH.dtype)
