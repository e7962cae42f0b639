"""Rows on their source device: tokens copied and encoded, or results decoded and summed.

Per device; nothing here communicates. A codec with a fused kernel (`CodecSpec.rows_kernel`) needs
one pass over memory for both; otherwise `kernels.permute` and the codec run one after the other. A
codec of None leaves rows as they are.

Letters: those of `comm.tokens`; `kernels` call S rows M. `SlotMap.slot_MK` is [N, K] here.
"""

from typing import TypeGuard

import jax
from jax.typing import DTypeLike

from moejax.comm.codecs.codec import Blocks, Codec, Payload
from moejax.comm.tokens.buckets import SlotMap
from moejax.kernels import permute
from moejax.kernels.experts.quantize import Quantized
from moejax.kernels.experts.quantized_rows import dequantize_combine, permute_quantize


def encode_rows(
    codec: Codec | None, x_ND: jax.Array, source_S: jax.Array, weight_S: jax.Array | None = None
) -> Payload:
    """Encodes the rows `x[source]`, each by itself.

    Args:
      source_S: token of each slot, N for a row that nobody reads; S may be several dimensions.
      weight_S: float32; each row is multiplied by its weight before it is encoded.
    """
    if not _in_one_pass(codec):
        if weight_S is None:
            return encode(codec, permute.any_rows_at(x_ND, source_S))
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
    slot_map: SlotMap,
    size: int,
    dtype: DTypeLike,
) -> jax.Array:
    """Returns [N, size]: the rows of each token decoded, weighted and added up in float32.

    Args:
      weight_NK: None adds rows up unweighted.
    """
    if _in_one_pass(codec):
        return dequantize_combine(
            Quantized(*payload_S),
            weight_NK,
            slot_map.slot_MK,
            codec.format,
            size,
            dtype=dtype,
            implementation=codec.rows_kernel,
        )
    y_SD = decode(codec, payload_S, size, dtype)
    if weight_NK is None:
        return permute.sum_rows(y_SD, slot_map.slot_MK)
    return permute.weighted_sum(y_SD, weight_NK, *slot_map)


def encode(codec: Codec | None, x: jax.Array) -> Payload:
    """Encodes x along its last axis."""
    return x if codec is None else codec.encode_once(x)


def decode(codec: Codec | None, payload: Payload, size: int, dtype: DTypeLike) -> jax.Array:
    """Undoes `encode`: [..., size]."""
    return payload if codec is None else codec.decode_as(payload, size, dtype)


def _in_one_pass(codec: Codec | None) -> TypeGuard[Blocks]:
    return isinstance(codec, Blocks) and codec.rows_kernel != "separate"
