"""Products of rows, sorted by group, and the matrix of their group; biases; with gradients.

Per device. Legend: M rows, G groups, K summed over, N columns; of experts D width, F hidden, U gate
and up, W = 2 F. FLOPs: 2 * rows * K * N, and as many for each gradient.
All of these compute `reference.grouped_matmul`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.kernels.costs import jitted
from moejax.kernels.experts import megablox, reference
from moejax.kernels.experts.activation import row_dots, swiglu
from moejax.kernels.kept import GATE_AND_UP

# XLA's tiles for TPUs have as many rows as divide them, up to 256.
ROWS_OF_XLA = 256


def grouped_matmul(
    x_MK: Float[Array, "M K"],
    w_GKN: Float[Array, "G K N"],
    sizes_G: Int[Array, " G"],
    *,
    implementation: str,
) -> Float[Array, "M N"]:
    """Multiplies each row by the matrix of its group; rows past the last group are zero.

    Args:
      x_MK: rows sorted by group; "mosaic" and "tokamax" take bfloat16, on Hopper; "megablox" takes
        it on TPUs.
      sizes_G: rows of each group, summing to at most M.
      implementation: as in `kernels.select`. "mosaic" sums gradients of weights over rows that it
        multiplies by zero, so rows past the last group must be finite, and their gradients too.
    """
    multiply = {
        "mosaic": _mosaic,
        "tokamax": _tokamax,
        "megablox": megablox.grouped_matmul,
        "ragged_dot": _ragged_dot,
        "reference": reference.grouped_matmul,
    }[implementation]
    return multiply(x_MK, w_GKN, sizes_G)


@jax.custom_vjp
def _mosaic(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return _multiply(x_MK, w_GKN, schedule_experts(sizes_G, x_MK.shape[0]))


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
    if implementation != "mosaic":
        raise ValueError(f"no implementation {implementation}")
    schedule = schedule_experts(sizes_G, gradient_MN.shape[0])
    dx_MK = _multiply_transposed(gradient_MN, w_GKN, schedule)
    return dx_MK, _sum_outer(x_MK, gradient_MN, schedule, w_GKN), None


def schedule_experts(sizes_G: Int[Array, " G"], num_rows: int) -> Int[Array, "..."]:
    """Returns the schedule that Mosaic kernels need to multiply rows.

    Products of the same rows share it. Computed for all chunks at once it takes fewer kernels.

    Args:
      sizes_G: rows of each group, summing to at most `num_rows`.
    """
    from moejax.kernels.mosaic import grouped_matmul as mosaic  # not in JAX before 0.11

    return mosaic.schedule_products(sizes_G, num_rows)


def _multiply(x_MK: jax.Array, w_GKN: jax.Array, schedule: Any) -> jax.Array:
    from moejax.kernels.mosaic import grouped_matmul as mosaic

    return jitted(mosaic.grouped_matmul, "products", *x_MK.shape, w_GKN.shape[2])(
        x_MK, w_GKN, schedule
    )


def _multiply_transposed(y_MN: jax.Array, w_GKN: jax.Array, schedule: Any) -> jax.Array:
    return jitted(_transposed, "products", *y_MN.shape, w_GKN.shape[1])(y_MN, w_GKN, schedule)


def _transposed(y_MN, w_GKN, schedule):
    from moejax.kernels.mosaic import grouped_matmul as mosaic

    return mosaic.grouped_matmul(y_MN, w_GKN, schedule, transposed=True)


def _sum_outer(x_MK: jax.Array, y_MN: jax.Array, schedule: Any, like: jax.Array) -> jax.Array:
    """The gradient of a matrix of each group, in its dtype."""
    options = {"groups": like.shape[0], "dtype": like.dtype}
    run = jitted(_outer, "products", *x_MK.shape, y_MN.shape[1], **options)
    return run(x_MK, y_MN, schedule)


def _outer(x_MK, y_MN, schedule, *, groups, dtype):
    from moejax.kernels.mosaic import grouped_outer as mosaic

    return mosaic.grouped_outer(x_MK, y_MN, schedule, groups, dtype)


def _ragged_dot(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Multiplies by XLA, whose kernel for TPUs does not write rows past the last group.

    The kernel takes multiples of 8 rows; other numbers of rows XLA multiplies by every matrix.
    """
    M = x_MK.shape[0]
    if missing := -M % ROWS_OF_XLA:
        x_MK = jnp.pad(x_MK, ((0, missing), (0, 0)))
    return megablox.inside(lax.ragged_dot(x_MK, w_GKN, sizes_G)[:M], sizes_G)


def _tokamax(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Multiplies by tokamax's own kernel: left to choose, it may take XLA's dense product."""
    import tokamax  # type: ignore[import-not-found]

    y_MN = tokamax.ragged_dot(x_MK, w_GKN, sizes_G, implementation="mosaic_gpu")
    return megablox.inside(y_MN, sizes_G)


@jax.custom_vjp
def add_bias(
    x_MN: Float[Array, "M N"],
    bias_GN: Float[Array, "G N"],
    sizes_G: Int[Array, " G"],
    one_M1: Float[Array, "M 1"] | None = None,
) -> Float[Array, "M N"]:
    """Adds to each row the bias of its group, in float32; rows past the last group stay.

    The gradient of a bias is the sum over its group's rows, in float32: a product with ones, as a
    scatter would be slow on CPU and not reproducible on GPU. FLOPs: 2 * M * G * N.

    Args:
      bias_GN: float32.
      sizes_G: rows of each group, summing to at most M.
      one_M1: as in `activation.with_dots`, for the bias of each row.
    """
    return (x_MN.astype(jnp.float32) + _bias_of_rows(x_MN, bias_GN, sizes_G)).astype(x_MN.dtype)


def _bias_of_rows(x_MN, bias_GN, sizes_G):
    """The bias of each row; zero past the last group."""
    group_M = jnp.sum(jnp.arange(x_MN.shape[0])[:, None] >= jnp.cumsum(sizes_G), axis=1)
    return jnp.take(bias_GN, group_M, axis=0, mode="fill", fill_value=0)


def _add_bias_forward(x_MN, bias_GN, sizes_G, one_M1):
    return add_bias(x_MN, bias_GN, sizes_G), (sizes_G, None if one_M1 is None else bias_GN)


def _add_bias_backward(saved, gradient_MN):
    sizes_G, bias_GN = saved
    row_M, ends_G = jnp.arange(gradient_MN.shape[0])[:, None], jnp.cumsum(sizes_G)
    own_MG = (row_M >= ends_G - sizes_G) & (row_M < ends_G)
    inside_MN = jnp.where(row_M < ends_G[-1], gradient_MN, 0)
    dbias_GN = lax.dot_general(
        own_MG.astype(gradient_MN.dtype),
        inside_MN,
        (((0,), (0,)), ((), ())),
        precision="highest",  # float32 is not rounded on its way into the product
        preferred_element_type=jnp.float32,
    )
    if bias_GN is None:
        return gradient_MN, dbias_GN, None, None
    bias_MN = _bias_of_rows(gradient_MN, bias_GN, sizes_G)
    return gradient_MN, dbias_GN, None, row_dots(bias_MN, gradient_MN)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def swiglu_mlp(
    x_MD: jax.Array,
    w_in_GDUF: jax.Array,
    w_out_GFD: jax.Array,
    one_M1: jax.Array | None,
    schedule_C: jax.Array,
    chunk: int,
) -> jax.Array:
    """Each row through the SwiGLU of its group, by Mosaic kernels: `expert_mlp` of bfloat16.

    The first product and the activation are one kernel, which also stores gate and up for backward.

    Args:
      one_M1: as in `expert_mlp`.
      schedule_C: from `schedule_experts`, of all chunks: backward keeps it whole.
      chunk: the number of this one.
    """
    return _swiglu_forward(x_MD, w_in_GDUF, w_out_GFD, one_M1, schedule_C, chunk)[0]


def _swiglu_forward(x_MD, w_in_GDUF, w_out_GFD, one_M1, schedule_C, chunk):
    from moejax.kernels.mosaic import grouped_matmul as mosaic

    hidden = w_in_GDUF.shape[2] * w_in_GDUF.shape[3]
    run = jitted(mosaic.grouped_swiglu, "products", *x_MD.shape, hidden)
    schedule = schedule_C[chunk]
    a_MF, h_MW = run(x_MD, w_in_GDUF, schedule)
    h_MW = checkpoint_name(h_MW, GATE_AND_UP)
    saved = x_MD, h_MW, w_in_GDUF, w_out_GFD, one_M1, schedule_C
    return _multiply(a_MF, w_out_GFD, schedule), saved


def _swiglu_backward(chunk, saved, dy_MD):
    x_MD, h_MW, w_in_GDUF, w_out_GFD, one_M1, schedule_C = saved
    schedule = schedule_C[chunk]
    da_MF = _multiply_transposed(dy_MD, w_out_GFD, schedule)
    a_MF, pull = jax.vjp(swiglu, h_MW)
    (dh_MW,) = pull(da_MF)
    dw_out_GFD = _sum_outer(a_MF, dy_MD, schedule, w_out_GFD)
    dw_in_GDW = _sum_outer(x_MD, dh_MW, schedule, w_in_GDUF)
    w_in_GDW = w_in_GDUF.reshape(*w_in_GDUF.shape[:2], -1)
    dx_MD = _multiply_transposed(dh_MW, w_in_GDW, schedule)
    dots_M1 = None if one_M1 is None else row_dots(a_MF, da_MF)
    return dx_MD, dw_in_GDW.reshape(w_in_GDUF.shape), dw_out_GFD, dots_M1, None


swiglu_mlp.defvjp(_swiglu_forward, _swiglu_backward)
