"""Error feedback: what a codec leaves out is added to what it encodes next."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.comm.codecs.codec import Codec, EncodeContext, Payload
from moejax.kernels.quantize import Quantized, bytes_of, dequantize, quantize


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Adds what earlier payloads left out to what is encoded next.

    What was sent and what is kept add up to what was to be sent, up to a rounding of float32. With
    `average` below one the state is a moving average of the errors instead, and with `stored` it is
    kept in blocks of eight bits, and forgotten every `reset` steps: together LoCo.
    """

    codec: Codec
    average: float = 1.0
    stored: str | None = None  # a format of eight bits; None: float32
    block: int = 128
    reset: int | None = None

    def state_size(self, size: int) -> int:
        """What is kept, then the inner codec's own state."""
        return self._kept(size) + self.codec.state_size(size)

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Encodes x and what is kept; keeps what the payload leaves out."""
        n, kept = x.shape[-1], self._kept(x.shape[-1])
        before = self._load(state[..., :kept], n)
        whole = x.astype(jnp.float32) + before
        payload, inner = self.codec.encode(whole, state[..., kept:], context)
        error = whole - self.decode(payload, n)
        after = (1 - self.average) * before + self.average * error if self.average != 1 else error
        if self.reset is not None:
            after = jnp.where((context.step + 1) % self.reset == 0, 0, after)
        return payload, jnp.concatenate([self._store(after), inner], axis=-1)

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """As the inner codec does."""
        return self.codec.decode(payload, size)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """As the inner codec does."""
        return self.codec.decode_sum(payload, size)

    def wire_bytes(self, size: int) -> int:
        """As of the inner codec."""
        return self.codec.wire_bytes(size)

    def _kept(self, size: int) -> int:
        return size if self.stored is None else bytes_of(size, self.stored, block=self.block) // 4

    def _store(self, error: jax.Array) -> jax.Array:
        """Bytes in the clothes of float32: see the module's docstring."""
        if self.stored is None:
            return error
        q = quantize(error, self.stored, block=self.block)
        words = q.values.reshape(*q.values.shape[:-2], -1, 4)
        values = jax.lax.bitcast_convert_type(words, jnp.float32)
        return jnp.concatenate([values, q.scale], axis=-1)

    def _load(self, kept: jax.Array, size: int) -> jax.Array:
        if self.stored is None:
            return kept
        blocks = -(-size // self.block)
        values = jax.lax.bitcast_convert_type(kept[..., :-blocks], jnp.uint8)
        values = values.reshape(*kept.shape[:-1], blocks, self.block)
        return dequantize(Quantized(values, kept[..., -blocks:]), self.stored, size)
