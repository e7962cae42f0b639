"""Rows on their way over a slow link: moved and quantised at once, dequantised and summed at once.

Per device. What `kernels.permute` and `kernels.quantize` do one after the other, without the rows
in full width between them. An index equal to the length of what it points into means "nothing".
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.kernels.permute import rows_at
from moejax.kernels.quantize import FORMATS, Quantized, dequantize, quantize


def permute_quantize(
    x_ND: jax.Array,
    source_M: jax.Array,
    name: str,
    *,
    block: int,
    implementation: str = "reference",
) -> Quantized:
    """Quantises the rows `x[source[m]]`; N stands for a row of zeros. Not for differentiation.

    What rows bring home decoded has the gradient that `kernels.permute` says, and the gradient of
    `dequantize_combine` goes out through this one, its scales times the weights.

    Args:
      name: a key of `kernels.quantize.FORMATS`.
      implementation: "reference" or "mosaic".
    """
    if implementation == "reference":
        return quantize(rows_at(x_ND, source_M), name, block=block)
    from moejax.kernels.mosaic import quantized_rows as mosaic

    assert implementation == "mosaic", implementation
    x_ND = jnp.pad(x_ND, ((0, 0), (0, -x_ND.shape[1] % block)))
    x_NBC = x_ND.reshape(x_ND.shape[0], -1, block)
    return Quantized(*mosaic.permute_quantize(x_NBC, source_M, name))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def dequantize_combine(
    q: Quantized,
    weight_NK: jax.Array,
    place_NK: jax.Array,
    assignment_M: jax.Array,
    name: str,
    size: int,
    dtype: DTypeLike = jnp.float32,
    implementation: str = "reference",
) -> jax.Array:
    """Returns `x_ND`, each token's K quantised rows weighted and summed in float32.

    Differentiable in the weights and the scales.

    Args:
      q: [M, blocks, ...], rows of `size` values in the format `name`.
      place_NK: the row that holds the result of assignment (n, k); M if it was dropped.
      assignment_M: the inverse: n * K + k for the assignment a row answers; N * K for none.
      implementation: "reference" or "mosaic".
    """
    if implementation == "reference":
        y_MD = dequantize(q, name, size)
        parts = [
            weight_NK[:, k, None] * rows_at(y_MD, place_NK[:, k]) for k in range(place_NK.shape[1])
        ]
        return sum(parts[1:], parts[0]).astype(dtype)
    from moejax.kernels.mosaic import quantized_rows as mosaic

    assert implementation == "mosaic", implementation
    arrays = (q.values, q.scale, weight_NK, place_NK)
    x_NBC = mosaic.dequantize_combine(*arrays, name, jnp.dtype(dtype))
    return x_NBC.reshape(x_NBC.shape[0], -1)[:, :size]


def _combine_forward(q, weight_NK, place_NK, assignment_M, *options):
    saved = (q, weight_NK, place_NK, assignment_M)
    return dequantize_combine(*saved, *options), saved


def _combine_backward(name, size, dtype, implementation, saved, gradient_ND):
    """Both need, for each block, the product of its numbers and the gradient they meet."""
    q, weight_NK, place_NK, assignment_M = saved
    M, B = q.scale.shape
    ones = Quantized(q.values, jnp.ones_like(q.scale))
    whole = (
        q.values.shape[-1] * B * 8 // FORMATS[name].bits
    )  # with what the last block is padded by
    number_MD = dequantize(ones, name, whole)
    gradient_ND = jnp.pad(gradient_ND, ((0, 0), (0, whole - size))).astype(jnp.float32)
    gradient_MD = rows_at(gradient_ND, assignment_M // place_NK.shape[1])
    dot_MB = jnp.sum((number_MD * gradient_MD).reshape(M, B, -1), axis=-1)
    weight_M = jnp.take(weight_NK.reshape(-1), assignment_M, mode="fill", fill_value=0)
    dot_M = jnp.sum(dot_MB * q.scale, axis=-1)
    dweight_NK = jnp.take(dot_M, place_NK, mode="fill", fill_value=0).astype(weight_NK.dtype)
    dq = jax.tree.map(lambda _: None, q)._replace(scale=dot_MB * weight_M[:, None])
    return dq, dweight_NK, None, None


dequantize_combine.defvjp(_combine_forward, _combine_backward)
