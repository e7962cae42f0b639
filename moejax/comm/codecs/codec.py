"""Codecs: an array is encoded before it crosses a slow link, and decoded after it.

Per device; nothing here communicates. A codec encodes along the last axis of x [..., n] and keeps
the leading axes, so that the rows of an encoded [peers, n] can be sent to their peers. Its state
between steps is one float32 array, so that it can travel through the backward pass as if it were a
gradient.

Each codec states its error. Ratios against bfloat16 count scales and padding. `pack` joins all
arrays of a payload as bytes, so that they travel in one message.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.config.compression import CodecSpec
from moejax.kernels.experts.quantize import (
    Quantized,
    bytes_of,
    dequantize,
    dequantize_sum,
    quantize,
)

LOCO_AVERAGE, LOCO_RESET = 0.5, 512
Payload = Any  # a pytree of arrays, with the leading dimensions of the encoded array


class Codec:
    """Interface of codecs."""

    def state_size(self, size: int) -> int:
        """Floats of state for each row of `size` values; 0 for a codec without state."""
        return 0

    def encode(self, x: jax.Array, state: jax.Array, step: jax.Array) -> tuple[Payload, jax.Array]:
        """Encodes x [..., n]. Returns the payload and the next state [..., state_size(n)].

        Args:
          step: of the run, counted from zero.
        """
        raise NotImplementedError

    def encode_once(self, x: jax.Array) -> Payload:
        """Encodes x; only for codecs without state."""
        return self.encode(x, jnp.zeros((*x.shape[:-1], 0)), jnp.int32(0))[0]

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Returns [..., size] in float32."""
        raise NotImplementedError

    def decode_as(self, payload: Payload, size: int, dtype: DTypeLike) -> jax.Array:
        """Returns [..., size] in a dtype."""
        return self.decode(payload, size).astype(dtype)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """Returns [..., size], the sum over the first dimension, in float32."""
        return jnp.sum(self.decode(payload, size), axis=0)


@dataclass(frozen=True)
class Cast(Codec):
    """A cast to bfloat16: error at most 2^-8 |x|, while |x| is above 2^-126."""

    def encode(self, x: jax.Array, state: jax.Array, step: jax.Array) -> tuple[Payload, jax.Array]:
        """Rounds to the nearest."""
        return x.astype(jnp.bfloat16), state

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Casts to float32."""
        return payload.astype(jnp.float32)


@dataclass(frozen=True)
class Blocks(Codec):
    """Block quantisation; `kernels.formats.Format` states the error bound.

    `kernel` and `rows_kernel` are as in `compression.CodecSpec`.
    """

    format: str
    block: int = 128
    kernel: str = "reference"
    rows_kernel: str = "separate"

    def encode(self, x: jax.Array, state: jax.Array, step: jax.Array) -> tuple[Payload, jax.Array]:
        """Rounds to the nearest value."""
        return quantize(x, self.format, block=self.block, implementation=self.kernel), state

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Multiplies by the scales."""
        return self.decode_as(payload, size, jnp.float32)

    def decode_as(self, payload: Payload, size: int, dtype: DTypeLike) -> jax.Array:
        """Multiplies by the scales, and rounds once."""
        q = Quantized(*payload)
        return dequantize(q, self.format, size, dtype=dtype, implementation=self.kernel)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """Multiplies by the scales and sums in one pass."""
        return dequantize_sum(Quantized(*payload), self.format, size, implementation=self.kernel)


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Adds the error of earlier payloads to the next input (error feedback).

    The decoded payload and the kept error add up to the input plus the previous error, up to a
    rounding of float32. With `average` below one the kept error is a moving average, with `stored`
    it is kept in blocks of eight bits, with `reset` it is set to zero every `reset` steps. All
    three together are LoCo.
    """

    codec: Codec
    average: float = 1.0
    stored: str | None = None  # a format of eight bits; None: float32
    block: int = 128
    reset: int | None = None

    def state_size(self, size: int) -> int:
        """Floats of the kept error, then of the inner codec's state."""
        return self._error_size(size) + self.codec.state_size(size)

    def encode(self, x: jax.Array, state: jax.Array, step: jax.Array) -> tuple[Payload, jax.Array]:
        """Encodes x plus the kept error; keeps the error of the payload."""
        n, error_size = x.shape[-1], self._error_size(x.shape[-1])
        old_error = self._load(state[..., :error_size], n)
        corrected = x.astype(jnp.float32) + old_error
        payload, inner_state = self.codec.encode(corrected, state[..., error_size:], step)
        error = corrected - self.decode(payload, n)
        new_error = (
            (1 - self.average) * old_error + self.average * error if self.average != 1 else error
        )
        if self.reset is not None:
            new_error = jnp.where((step + 1) % self.reset == 0, 0, new_error)
        return payload, jnp.concatenate([self._store(new_error), inner_state], axis=-1)

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Decodes as the inner codec does."""
        return self.codec.decode(payload, size)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """Decodes as the inner codec does."""
        return self.codec.decode_sum(payload, size)

    def _error_size(self, size: int) -> int:
        return size if self.stored is None else bytes_of(size, self.stored, block=self.block) // 4

    def _store(self, error: jax.Array) -> jax.Array:
        """Bit-casts the quantized bytes to float32, because state must be one float32 array."""
        if self.stored is None:
            return error
        q = quantize(error, self.stored, block=self.block)
        quads = q.values.reshape(*q.values.shape[:-2], -1, 4)
        values = jax.lax.bitcast_convert_type(quads, jnp.float32)
        return jnp.concatenate([values, q.scale], axis=-1)

    def _load(self, packed: jax.Array, size: int) -> jax.Array:
        """The inverse of `_store`: [..., size]."""
        if self.stored is None:
            return packed
        blocks = -(-size // self.block)
        values = jax.lax.bitcast_convert_type(packed[..., :-blocks], jnp.uint8)
        values = values.reshape(*packed.shape[:-1], blocks, self.block)
        return dequantize(Quantized(values, packed[..., -blocks:]), self.stored, size)


def pack(payload: Payload, lead: int = 1) -> jax.Array:
    """Joins all arrays of a payload as bytes [..., m]; keeps `lead` dimensions."""
    rows = [_bytes(leaf).reshape(*leaf.shape[:lead], -1) for leaf in jax.tree.leaves(payload)]
    return jnp.concatenate(rows, axis=-1)


def unpack(packed: jax.Array, like: Payload) -> Payload:
    """The inverse of `pack`; leading sizes may differ from `like`'s."""
    leaves, tree = jax.tree.flatten(like)
    lead, start, arrays = packed.ndim - 1, 0, []
    for leaf in leaves:
        itemsize = (leaf.dtype.itemsize,) if leaf.dtype.itemsize > 1 else ()
        shape = (*leaf.shape[lead:], *itemsize)
        piece, start = packed[..., start : start + math.prod(shape)], start + math.prod(shape)
        piece = piece.reshape(*packed.shape[:-1], *shape)
        dtype = leaf.dtype
        arrays.append(piece if dtype == jnp.uint8 else jax.lax.bitcast_convert_type(piece, dtype))
    return jax.tree.unflatten(tree, arrays)


def _bytes(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)


def build_codec(spec: CodecSpec) -> Codec:
    """Builds the codec of a gradient from its config."""
    if spec.name == "loco":
        blocks = Blocks("int4", spec.block, kernel=spec.kernel)
        return ErrorFeedback(blocks, LOCO_AVERAGE, "e4m3", spec.block, LOCO_RESET)
    codec = _plain_codec(spec)
    return ErrorFeedback(codec) if spec.feedback else codec


def build_plain_codec(spec: CodecSpec | None) -> Codec | None:
    """Builds a codec without state, for tokens or weights; None for None."""
    return None if spec is None else _plain_codec(spec)


def _plain_codec(spec: CodecSpec) -> Codec:
    if spec.name == "bfloat16":
        return Cast()
    return Blocks(spec.name, spec.block, spec.kernel, spec.rows_kernel)
