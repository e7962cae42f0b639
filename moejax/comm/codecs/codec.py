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

from moejax.kernels.experts.quantize import Quantized, dequantize, dequantize_sum, quantize

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
