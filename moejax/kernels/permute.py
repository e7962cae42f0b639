"""Moves rows between token order, buckets and expert order: gathers forward and backward.

Per device. Legend: N tokens, K choices of a token, M rows, D width.

Both index arrays are known (row to source, token to rows), so both directions are gathers. A
scatter-add is slow on CPU and not reproducible on GPU. An index equal to the length of the array it
indexes gives a row of zeros.
"""

import functools

import jax
import jax.numpy as jnp


def rows_at(x_MD: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows of x by index; zeros for an index past the end. Not for differentiation."""
    return jnp.take(x_MD, index, axis=0, mode="fill", fill_value=0)


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
    parts = [rows_at(y_MD, slot_NK[:, k]).astype(jnp.float32) for k in range(K)]
    return functools.reduce(jnp.add, parts).astype(y_MD.dtype)


permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def collect(y_MD: jax.Array, slot_NK: jax.Array, source_M: jax.Array) -> jax.Array:
    """Returns `x_ND` with `x[n]` = the sum over k of `y[slot[n, k]]`: the transpose of `permute`.

    Args:
      slot_NK: the rows of y that belong to row n; M for none.
      source_M: the inverse: the row of x each row of y belongs to; N for none.
    """
    return sum_rows(y_MD, slot_NK)


def _collect_forward(y_MD, slot_NK, source_M):
    return collect(y_MD, slot_NK, source_M), source_M


def _collect_backward(source_M, gradient_ND):
    return rows_at(gradient_ND, source_M), None, None


collect.defvjp(_collect_forward, _collect_backward)


@jax.custom_vjp
def weighted_sum(
    y_MD: jax.Array, weight_NK: jax.Array, slot_NK: jax.Array, assignment_M: jax.Array
) -> jax.Array:
    """Returns `x_ND`, each token's K results weighted and summed in float32, in y's dtype.

    Args:
      slot_NK: the row of y that holds the result of assignment (n, k); M if it was dropped.
      assignment_M: the inverse: n * K + k for the assignment a row answers; N * K for none.
    """
    K = slot_NK.shape[1]
    parts = [
        weight_NK[:, k, None] * rows_at(y_MD, slot_NK[:, k]).astype(jnp.float32) for k in range(K)
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
