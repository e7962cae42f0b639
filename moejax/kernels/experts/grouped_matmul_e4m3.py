"""Products in e4m3 of rows, sorted by group, and the matrix of their group; backward in bfloat16.

Per device. Legend: M rows, G groups, K summed over, N columns, B blocks of K, J blocks of N. Rows
have a float32 scale for each 128 of K, weights one for each 128 x 128, so that an outlier costs its
own block alone. Source: DeepSeek-V3 (2024), section 3.3.

The error against the product of unrounded numbers is e4m3's: at most 2^-3 of each term, apart from
numbers that are tiny in their block (`kernels.formats.Format` has both parts). Sums are float32
from block to block; inside one of 128, Hopper's matrix units keep about 14 bits.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Float, Int, UInt8
from moejax.kernels.costs import jitted
from moejax.kernels.experts import reference
from moejax.kernels.experts.grouped_matmul import product_gradients
from moejax.kernels.experts.quantize import Quantized, dequantize, quantize

FORMAT, BLOCK = "e4m3", 128


class QuantizedWeights(NamedTuple):
    """Matrices of groups, K last as the matrix units want it; K is padded to whole blocks."""

    values_GNK: UInt8[Array, "G N K"]
    scale_GJB: Float[Array, "G J B"]


def grouped_matmul_e4m3(
    x_MK: Float[Array, "M K"],
    w_GKN: Float[Array, "G K N"],
    sizes_G: Int[Array, " G"],
    *,
    implementation: str,
) -> Float[Array, "M N"]:
    """Multiplies each row by the matrix of its group, both rounded to e4m3; spare rows are zero.

    Rows that a codec of e4m3 in blocks of 128 sent here round to the same numbers again; only their
    scales are rounded, by the dtype in between. Gradients go straight through: they are the
    gradients of the product of the rounded rows and weights, by `kernels.experts.grouped_matmul`,
    so backward has the precision of bfloat16. For backward rows are kept as e4m3, and weights are
    rounded again.

    Args:
      x_MK: rows sorted by group.
      sizes_G: rows of each group, summing to at most M.
      implementation: "reference", or "mosaic" of bfloat16 on Hopper, N a multiple of 64 and for
        gradients K too; as in `grouped_matmul`, rows past the last group must be finite.
    """
    return _straight_through(implementation, x_MK, w_GKN, sizes_G)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(implementation, x_MK, w_GKN, sizes_G):
    return _forward(implementation, x_MK, w_GKN, sizes_G)[0]


def _forward(implementation, x_MK, w_GKN, sizes_G):
    q = quantize(x_MK, FORMAT, block=BLOCK, implementation=implementation)
    w = quantize_weights(w_GKN)
    y_MN = multiply_quantized(q, w, sizes_G, implementation=implementation)
    return y_MN.astype(x_MK.dtype), (q, w_GKN, sizes_G, jnp.zeros(0, x_MK.dtype))


def _backward(implementation, saved, gradient_MN):
    q, w_GKN, sizes_G, like = saved
    K, N = w_GKN.shape[1:]
    x_MK = dequantize(q, FORMAT, K, dtype=like.dtype, implementation=implementation)
    w_GKN = dequantize_weights(quantize_weights(w_GKN), (K, N)).astype(w_GKN.dtype)
    return product_gradients(x_MK, w_GKN, sizes_G, gradient_MN, implementation=implementation)


_straight_through.defvjp(_forward, _backward)


def multiply_quantized(
    q: Quantized, w: QuantizedWeights, sizes_G: jax.Array, *, implementation: str
) -> Float[Array, "M N"]:
    """Multiplies quantised rows by the quantised matrix of their group. Not for differentiation.

    FLOPs: 2 * rows * K * N. Rows may come as a codec of e4m3 in blocks of 128 has sent them.

    Args:
      q: values [M, B, 128], scale [M, B].
      implementation: "reference" gives float32, "mosaic" bfloat16 of sums in float32.
    """
    M = q.scale.shape[0]
    N, K = w.values_GNK.shape[1:]
    if implementation == "reference":
        x_MK, w_GKN = dequantize(q, FORMAT, K), dequantize_weights(w, (K, N))
        return reference.grouped_matmul(x_MK, w_GKN, sizes_G)
    from moejax.kernels.mosaic import grouped_matmul_e4m3 as mosaic  # not in JAX before 0.11

    if implementation != "mosaic":
        raise ValueError(f"no implementation {implementation}")
    arrays = (_numbers(q.values.reshape(M, K)), q.scale, _numbers(w.values_GNK), w.scale_GJB)
    return jitted(mosaic.grouped_matmul, "products", M, K, N)(*arrays, sizes_G)


def quantize_weights(w_GKN: jax.Array) -> QuantizedWeights:
    """Rounds matrices in blocks of 128 x 128; partial blocks are filled with zeros."""
    G, K, N = w_GKN.shape
    J, B = -(-N // BLOCK), -(-K // BLOCK)
    w_GKN = jnp.pad(w_GKN, ((0, 0), (0, B * BLOCK - K), (0, J * BLOCK - N)))
    blocks = w_GKN.reshape(G, B, BLOCK, J, BLOCK).transpose(0, 3, 1, 4, 2)
    q = quantize(blocks.reshape(G, J, B, -1), FORMAT, block=BLOCK * BLOCK)
    values = q.values.reshape(G, J, B, BLOCK, BLOCK).swapaxes(2, 3)
    return QuantizedWeights(values.reshape(G, -1, B * BLOCK)[:, :N], q.scale[..., 0])


def dequantize_weights(w: QuantizedWeights, shape: tuple[int, int]) -> jax.Array:
    """Returns the matrices [G, K, N] in float32, with (K, N) = shape."""
    K, N = shape
    scale_GNK = jnp.repeat(jnp.repeat(w.scale_GJB, BLOCK, axis=1)[:, :N], BLOCK, axis=2)
    w_GNK = _numbers(w.values_GNK).astype(jnp.float32) * scale_GNK
    return w_GNK[:, :, :K].swapaxes(1, 2)


def _numbers(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
