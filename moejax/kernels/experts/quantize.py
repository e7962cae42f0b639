"""Block quantisation: rows of floats to a byte or half a byte each, with a float32 scale a block.

Per device. A block is a run of neighbours along the last axis; its scale maps its largest magnitude
to the largest number of the format. A block with an infinity or NaN in it decodes to NaN, so that
a broken gradient stays visible; a block of zeros decodes to zeros.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.kernels.formats import FORMATS, TINY, Format


class Quantized(NamedTuple):
    """A quantised array, with the leading dimensions of the array.

    Attributes:
      values: [..., blocks, block] uint8; of four bits [..., blocks, block / 2], low half first.
      scale: [..., blocks] float32.
    """

    values: jax.Array
    scale: jax.Array


def quantize(
    x: jax.Array,
    name: str,
    *,
    block: int,
    implementation: str = "reference",
) -> Quantized:
    """Quantises x along its last axis; a last block that is not full is padded with zeros.

    Not for differentiation, nor is any function here.

    Args:
      x: [..., n] of any float dtype.
      name: a key of `formats.FORMATS`.
      implementation: "reference" or "mosaic"; see `kernels.select`.
    """
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    x = x.reshape(*x.shape[:-1], -1, block)
    if implementation == "reference":
        return _quantize(x, FORMATS[name])
    from moejax.kernels.mosaic import quantize as mosaic  # needs JAX 0.11

    if implementation != "mosaic":
        raise ValueError(f"no implementation {implementation}")
    x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    values, scale = mosaic.quantize(x.reshape(-1, block), name)
    return Quantized(values.reshape(*x.shape[:-1], -1), scale.reshape(x.shape[:-1]))


def _quantize(x: jax.Array, kind: Format) -> Quantized:
    """The reference, of x [..., blocks, block]."""
    x = x.astype(jnp.float32)
    # Infinity for NaN: XLA's maximum over long arrays may lose a NaN on CPU (seen with JAX 0.12).
    top = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf), axis=-1)
    scale = jnp.where(jnp.isfinite(top), top * (1 / kind.largest), jnp.nan)
    # A scale of zero, or flushed to zero, stands for zeros.
    y = x * jnp.where(scale >= TINY, 1 / scale, 0)[..., None]
    y = y if kind.relative else jnp.round(y)  # the conversion rounds to the nearest
    y = jnp.clip(y, -kind.largest, kind.largest).astype(kind.dtype)
    values = jax.lax.bitcast_convert_type(y, jnp.uint8)
    # Without it XLA for GPUs takes rounding to a float format and back for nothing at all.
    values = jax.lax.optimization_barrier(values) if kind.relative else values
    if kind.bits == 4:
        halves = values.reshape(*values.shape[:-1], -1, 2) & 15
        values = halves[..., 0] | (halves[..., 1] << 4)
    return Quantized(values, scale)


def dequantize(
    q: Quantized,
    name: str,
    size: int,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str = "reference",
) -> jax.Array:
    """Returns the array [..., size] that was quantised."""
    if implementation == "reference":
        return _dequantize(q, FORMATS[name], size).astype(dtype)
    return dequantize_sum(
        Quantized(q.values[None], q.scale[None]),
        name,
        size,
        dtype=dtype,
        implementation=implementation,
    )


def dequantize_sum(
    q: Quantized,
    name: str,
    size: int,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str = "reference",
) -> jax.Array:
    """Returns the sum [..., size] of quantised arrays over the first dimension, the peers.

    The sum is in float32.
    """
    if implementation == "reference":
        return jnp.sum(_dequantize(q, FORMATS[name], size), axis=0).astype(dtype)
    from moejax.kernels.mosaic import quantize as mosaic

    if implementation != "mosaic":
        raise ValueError(f"no implementation {implementation}")
    P, blocks = q.values.shape[0], q.scale.shape[1:]
    values = q.values.reshape(P, -1, q.values.shape[-1])
    x = mosaic.dequantize_sum(values, q.scale.reshape(P, -1), name, jnp.dtype(dtype))
    return x.reshape(*blocks[:-1], -1)[..., :size]


def _dequantize(q: Quantized, kind: Format, size: int) -> jax.Array:
    """The reference, in float32."""
    values = q.values
    if kind.bits == 4:
        halves = jnp.stack([values & 15, values >> 4], axis=-1)
        values = halves.reshape(*values.shape[:-1], -1)
        # Two's complement of four bits: the sign bit moves to the byte's.
        y = jax.lax.bitcast_convert_type(values << 4, jnp.int8) >> 4
    else:
        y = jax.lax.bitcast_convert_type(values, kind.dtype)
    x = y.astype(jnp.float32) * q.scale[..., None]
    return x.reshape(*x.shape[:-2], -1)[..., :size]


def bytes_of(size: int, name: str, *, block: int) -> int:
    """Returns the bytes of `size` values on the wire, with padding and scales."""
    blocks = -(-size // block)
    return blocks * (block * FORMATS[name].bits // 8 + 4)
