"""Error feedback: the error of a payload is added to the next input."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.comm.codecs.codec import Codec, Payload
from moejax.kernels.experts.quantize import Quantized, bytes_of, dequantize, quantize


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
