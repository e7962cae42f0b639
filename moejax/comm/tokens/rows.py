"""Rows of tokens at the home end of an exchange: copied and encoded, or decoded and summed.

Per device; nothing here communicates. Where a codec's blocks have a kernel for both
(`CodecSpec.rows_kernel`) each is one pass over memory; else `kernels.permute` and the codec take
turns. A codec of None leaves rows as they are. Sources, places and items are those of
`comm.tokens.buckets`, all parts and peers after each other.
"""

from dataclasses import replace
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.comm.codecs.codec import Blocks, Codec, Payload
from moejax.comm.tokens.buckets import SlotMap
from moejax.kernels import permute
from moejax.kernels.quantize import Quantized
from moejax.kernels.quantized_rows import dequantize_combine, permute_quantize


def encode_rows(
    codec: Codec | None, x_ND: jax.Array, source_S: jax.Array, weight_S: jax.Array | None = None
) -> Payload:
    """Encodes the rows `x[source]`, each on its own.

    Args:
      source_S: of any number of dimensions; N for a row of zeros.
      weight_S: float32, by which rows are multiplied first.
    """
    if not _in_one_pass(codec):
        if weight_S is None:
            return encode(codec, permute.rows_at(x_ND, source_S))
        return encode(codec, permute.weighted_rows_at(x_ND, source_S, weight_S))
    q = permute_quantize(
        x_ND,
        source_S.reshape(-1),
        codec.format,
        block=codec.block,
        weight_M=None if weight_S is None else weight_S.reshape(-1),
        implementation=codec.rows_kernel,
    )
    return jax.tree.map(lambda a: a.reshape(*source_S.shape, *a.shape[1:]), q)


def sum_encoded(
    codec: Codec | None,
    payload_S: Payload,
    weight_NK: jax.Array | None,
    places: SlotMap,
    size: int,
    dtype: DTypeLike,
) -> jax.Array:
    """Returns [N, size]: the rows of each token decoded, weighted and added up in float32.

    Args:
      weight_NK: None: rows are added up as they are.
    """
    if _in_one_pass(codec):
        return dequantize_combine(
            Quantized(*payload_S),
            weight_NK,
            places.slot_MK,
            codec.format,
            size,
            dtype=dtype,
            implementation=codec.rows_kernel,
        )
    y_SD = decode(codec, payload_S, size, dtype)
    if weight_NK is None:
        return permute.sum_rows(y_SD, places.slot_MK)
    return permute.weighted_sum(y_SD, weight_NK, *places)


def encoded_weight_gradient(
    codec: Codec | None, payload_S: Payload, gradient_ND: jax.Array, places: SlotMap
) -> jax.Array:
    """The gradient of `sum_encoded` by its weights, float32 [N, K]."""
    size, dtype = gradient_ND.shape[1], gradient_ND.dtype
    if _in_one_pass(codec):
        # In plain JAX, which XLA fuses with the sums, so that no row is stored in full width.
        codec, dtype = replace(codec, kernel="reference"), jnp.float32
    y_SD = decode(codec, payload_S, size, dtype)
    return permute.weight_gradient(y_SD, gradient_ND, *places)


def encode(codec: Codec | None, x: jax.Array) -> Payload:
    """Encodes x along its last axis."""
    return x if codec is None else codec.encode_once(x)


def decode(codec: Codec | None, payload: Payload, size: int, dtype: DTypeLike) -> jax.Array:
    """Undoes `encode`: [..., size]."""
    return payload if codec is None else codec.decode_as(payload, size, dtype)


def _in_one_pass(codec: Codec | None) -> TypeGuard[Blocks]:
    return isinstance(codec, Blocks) and codec.rows_kernel != "separate"
