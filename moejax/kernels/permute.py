"""Moves rows between token order, buckets and expert order: gathers forward and backward.

Per device. Legend: N tokens, K choices of a token, M rows, D width.

Both index arrays are known (row to source, token to rows), so both directions are gathers. A
scatter-add is slow on CPU and not reproducible on GPU. An index equal to the length of the array it
indexes gives a row of zeros.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp


def rows_at(x_MD: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows of x by index; zeros for an index past the end. Not for differentiation."""
    return jnp.take(x_MD, index, axis=0, mode="fill", fill_value=0)


def any_rows_at(x_MD: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows of x by index; some row for an index past the end. Not for differentiation."""
    return jnp.take(x_MD, index, axis=0, mode="clip")


@jax.custom_vjp
def permute(x_ND: jax.Array, source_M: jax.Array, slot_NK: jax.Array) -> jax.Array:
    """Returns `y_MD` with `y[m] = x[source[m]]`.

    Args:
      source_M: the row of x each row of y copies; N for a row of zeros.
      slot_NK: the inverse: the rows of y that copy row n; M for none.
    """
    return rows_at(x_ND, source_M)


def _permute_forward(x_ND, source_M, slot_NK):
    return permute(x_ND, source_M, slot_NK), slot_NK


def _permute_backward(slot_NK, gradient_MD):
    return sum_rows(gradient_MD, slot_NK), None, None


def sum_rows(y_MD: jax.Array, slot_NK: jax.Array) -> jax.Array:
    """Returns `x_ND` with `x[n]` = the sum over k of `y[slot[n, k]]`, added up in float32."""
    K = slot_NK.shape[1]
    if K == 1:
        return rows_at(y_MD, slot_NK[:, 0])
    return _sum_parts(y_MD, (slot_NK < y_MD.shape[0]).astype(jnp.float32), slot_NK)


permute.defvjp(_permute_forward, _permute_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(x_MD: jax.Array, index_CR: jax.Array, inverse_CM: jax.Array, chunk: int) -> jax.Array:
    """Returns `y_RD` with `y[r] = x[index[r]]`, of a chunk; each row is taken once at most.

    Rows that take none are some row of x, and so are gradients of rows that none takes: nobody may
    read them. That saves the masks of `permute`, each a kernel of its own.

    Args:
      index_CR: indices of all C chunks, so that backward keeps these arrays, not a part per chunk.
      inverse_CM: the row of y that takes row m.
    """
    return any_rows_at(x_MD, index_CR[chunk])


def _take_rows_forward(x_MD, index_CR, inverse_CM, chunk):
    return take_rows(x_MD, index_CR, inverse_CM, chunk), inverse_CM


def _take_rows_backward(chunk, inverse_CM, gradient_RD):
    return any_rows_at(gradient_RD, inverse_CM[chunk]), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


@jax.custom_vjp
def weighted_sum(
    y_MD: jax.Array, weight_NK: jax.Array, slot_NK: jax.Array, assignment_M: jax.Array
) -> jax.Array:
    """Returns `x_ND`, each token's K results weighted and summed in float32, in y's dtype.

    Args:
      slot_NK: the row of y that holds the result of assignment (n, k); M if it was dropped.
      assignment_M: the inverse: n * K + k for the assignment a row answers; N * K for none.
    """
    return _sum_parts(y_MD, jnp.where(slot_NK < y_MD.shape[0], weight_NK, 0), slot_NK)


def _sum_parts(y_MD: jax.Array, weight_NK: jax.Array, slot_NK: jax.Array) -> jax.Array:
    """The sum of each token's rows times their weights, which are zero where there is no row.

    A mask of the rows themselves would be a kernel for each k.
    """
    parts = [
        weight_NK[:, k, None] * any_rows_at(y_MD, slot_NK[:, k]).astype(jnp.float32)
        for k in range(slot_NK.shape[1])
    ]
    return functools.reduce(jnp.add, parts).astype(y_MD.dtype)


def _weighted_sum_forward(y_MD, weight_NK, slot_NK, assignment_M):
    saved = (y_MD, weight_NK, slot_NK, assignment_M)
    return weighted_sum(*saved), saved


def _weighted_sum_backward(saved, gradient_ND):
    y_MD, weight_NK, slot_NK, assignment_M = saved
    source_M = assignment_M // slot_NK.shape[1]
    dweight_NK = dots_of_choices(row_dots(y_MD, gradient_ND, source_M), slot_NK)
    weight_M = weight_at(weight_NK, assignment_M)
    gradient_MD = weighted_rows_at(gradient_ND, source_M, weight_M)
    return gradient_MD.astype(y_MD.dtype), dweight_NK.astype(weight_NK.dtype), None, None


weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)


def weight_at(weight_NK: jax.Array, assignment_M: jax.Array) -> jax.Array:
    """Returns the weight of each row's assignment; 0 for none."""
    return jnp.take(weight_NK.reshape(-1), assignment_M, mode="fill", fill_value=0)


def weighted_rows_at(x_MD: jax.Array, index: jax.Array, weight: jax.Array) -> jax.Array:
    """`rows_at`, each row times its weight, in x's dtype. Not for differentiation."""
    rows = rows_at(x_MD, index).astype(jnp.float32)
    return (weight[..., None] * rows).astype(x_MD.dtype)


def row_dots(y_MD: jax.Array, gradient_ND: jax.Array, source_M: jax.Array) -> jax.Array:
    """Returns float32 [M]: each row of y times its source's gradient; 0 for source N."""
    gradient_MD = rows_at(gradient_ND, source_M)
    return jnp.sum(y_MD.astype(jnp.float32) * gradient_MD.astype(jnp.float32), axis=-1)


def dots_of_choices(dot_M: jax.Array, slot_NK: jax.Array) -> jax.Array:
    """Returns the gradient of `weighted_sum` by its weights, float32 [N, K], from `row_dots`."""
    return jnp.take(dot_M, slot_NK, mode="fill", fill_value=0)
