"""Rows for a slow link: moved and quantised in one pass, dequantised and summed in one pass.

Per device. Legend: N tokens, K choices of a token, M rows, D width, B blocks of a row, C values of
a block. Fuses `kernels.permute` and `kernels.experts.quantize`, so that rows are never stored in
full width between them. An index equal to the length of the array that it indexes means "nothing".
Not for differentiation: gradients of tokens travel as rows of their own (`comm.tokens.pipeline`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.kernels.costs import jitted
from moejax.kernels.experts.quantize import Quantized, bytes_of, dequantize, quantize
from moejax.kernels.permute import rows_at


def permute_quantize(
    x_ND: jax.Array,
    source_M: jax.Array,
    name: str,
    *,
    block: int,
    weight_M: jax.Array | None = None,
    implementation: str = "reference",
) -> Quantized:
    """Quantises the rows `weight[m] * x[source[m]]`; N stands for a row of zeros.

    Args:
      name: a key of `kernels.formats.FORMATS`.
      weight_M: float32; None: rows are taken as they are.
      implementation: "reference" or "mosaic"; see `kernels.select`.
    """
    if implementation == "reference":
        rows_MD = rows_at(x_ND, source_M)
        if weight_M is not None:
            rows_MD = weight_M[:, None] * rows_MD.astype(jnp.float32)
        return quantize(rows_MD, name, block=block)
    from moejax.kernels.mosaic import quantized_rows as mosaic

    if implementation != "mosaic":
        raise ValueError(f"no implementation {implementation}")
    x_ND = jnp.pad(x_ND, ((0, 0), (0, -x_ND.shape[1] % block)))
    x_NBC = x_ND.reshape(x_ND.shape[0], -1, block)
    row = x_ND.shape[1] * x_ND.dtype.itemsize + bytes_of(x_ND.shape[1], name, block=block)
    run = jitted(mosaic.permute_quantize, "rows", source_M.shape[0], row, name=name)
    return Quantized(*run(x_NBC, source_M, weight_M))


def dequantize_combine(
    q: Quantized,
    weight_NK: jax.Array | None,
    slot_NK: jax.Array,
    name: str,
    size: int,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str = "reference",
) -> jax.Array:
    """Returns `x_ND`, each token's K quantised rows weighted and summed in float32.

    Args:
      q: [M, blocks, ...], rows of `size` values in the format `name`.
      weight_NK: None: rows are summed as they are.
      slot_NK: the row that holds the result of assignment (n, k); M if it was dropped.
      implementation: "reference" or "mosaic"; see `kernels.select`.
    """
    if implementation == "reference":
        y_MD = dequantize(q, name, size)
        parts = [rows_at(y_MD, slot_NK[:, k]) for k in range(slot_NK.shape[1])]
        if weight_NK is not None:
            parts = [weight_NK[:, k, None] * part for k, part in enumerate(parts)]
        return functools.reduce(jnp.add, parts).astype(dtype)
    from moejax.kernels.mosaic import quantized_rows as mosaic

    if implementation != "mosaic":
        raise ValueError(f"no implementation {implementation}")
    if weight_NK is None:
        weight_NK = jnp.ones(slot_NK.shape, jnp.float32)
    (N, K), dtype = slot_NK.shape, jnp.dtype(dtype)
    row = K * ((q.values.size + 4 * q.scale.size) // q.scale.shape[0]) + size * dtype.itemsize
    run = jitted(mosaic.dequantize_combine, "rows", N, row, name=name, dtype=dtype)
    x_NBC = run(q.values, q.scale, weight_NK, slot_NK)
    return x_NBC.reshape(x_NBC.shape[0], -1)[:, :size]
