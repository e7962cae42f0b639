"""Codecs: what an array is turned into before it crosses a slow link, and back.

Per device; nothing here communicates. A codec works along the last axis of x [..., n] and keeps the
leading ones, so that the parts of an encoded [peers, n] can be sent to their peers. What it must
remember between steps is one float32 array, its state, so that a state can travel through the
backward pass as if it were a gradient.

Errors are stated beside each codec; ratios against bfloat16 count scales, indices and padding.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.kernels.quantize import Quantized, bytes_of, dequantize, dequantize_sum, quantize

Payload = Any  # a pytree of arrays; leading dimensions as those of what was encoded


class EncodeContext(NamedTuple):
    """When something is encoded, and where: what a codec may depend on beside its input."""

    step: jax.Array  # counted from zero
    key: jax.Array  # for random rounding: of this device, step, micro-batch and parameter alone
    part: jax.Array | int = 0  # the micro-batch, counted from zero in each step


class Codec:
    """Something that encodes arrays."""

    def state_size(self, size: int) -> int:
        """Floats of state for each last axis of `size` values; 0 for a codec without one."""
        return 0

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Encodes x [..., n]. Returns the payload and the next state [..., state_size(n)]."""
        raise NotImplementedError

    def encode_once(self, x: jax.Array) -> Payload:
        """Encodes x with a codec that remembers nothing and draws nothing."""
        nothing = jnp.zeros((*x.shape[:-1], 0))
        return self.encode(x, nothing, EncodeContext(jnp.int32(0), jax.random.key(0)))[0]

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Returns [..., size] in float32."""
        raise NotImplementedError

    def decode_as(self, payload: Payload, size: int, dtype: DTypeLike) -> jax.Array:
        """Returns [..., size] in a dtype."""
        return self.decode(payload, size).astype(dtype)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """Returns [..., size], the sum over the first dimension, in float32."""
        return jnp.sum(self.decode(payload, size), axis=0)

    def wire_bytes(self, size: int) -> int:
        """Bytes of a payload of `size` values, all counted."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cast(Codec):
    """Another dtype. bfloat16: error at most 2^-8 |x|, while |x| is above 2^-126."""

    dtype: str = "bfloat16"

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Rounds to the nearest."""
        return x.astype(self.dtype), state

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Widens."""
        return payload.astype(jnp.float32)

    def wire_bytes(self, size: int) -> int:
        """As many bytes a value as the dtype has."""
        return size * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Blocks(Codec):
    """Block quantisation; the bound is that of `kernels.formats.Format`.

    `kernel` and `rows_kernel`: as of `compression.CodecSpec`.
    """

    format: str
    block: int = 128
    stochastic: bool = False
    kernel: str = "reference"
    rows_kernel: str = "separate"

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Rounds to the nearest, or to either neighbour with the key."""
        key = context.key if self.stochastic else None
        kernel = "reference" if self.stochastic else self.kernel
        return quantize(x, self.format, block=self.block, key=key, implementation=kernel), state

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Scales back."""
        return self.decode_as(payload, size, jnp.float32)

    def decode_as(self, payload: Payload, size: int, dtype: DTypeLike) -> jax.Array:
        """Scales back, and rounds once."""
        q = Quantized(*payload)
        return dequantize(q, self.format, size, dtype=dtype, implementation=self.kernel)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """Scales back and adds up in one pass."""
        return dequantize_sum(Quantized(*payload), self.format, size, implementation=self.kernel)

    def wire_bytes(self, size: int) -> int:
        """Values, padding and scales."""
        return bytes_of(size, self.format, block=self.block)
