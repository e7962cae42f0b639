"""A codec that is as strong as what it leaves out allows."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.comm.codecs.codec import Codec, EncodeContext, Payload


@dataclass(frozen=True)
class AdaptiveCodec(Codec):
    """One of several codecs, from mild to strong, with error feedback (after GraVAC).

    A step that measures writes into the state the squared error that each level would make, and the
    sum of squares of what it encodes, both summed over micro-batches. From these `choose_level`
    takes the strongest level that keeps enough.
    """

    levels: tuple[Codec, ...]  # from mild to strong, without feedback
    level: int = 0
    measures: bool = False

    def state_size(self, size: int) -> int:
        """Error that is fed back, the largest of the levels' own states, squared errors."""
        return size + self._inner(size) + len(self.levels) + 1

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Encodes x plus the fed-back error with the level; keeps what the payload leaves out."""
        n, codec = x.shape[-1], self.levels[self.level]
        end = n + self._inner(n)
        used = n + codec.state_size(n)
        whole = x.astype(jnp.float32) + state[..., :n]
        payload, inner = codec.encode(whole, state[..., n:used], context)
        error = whole - self.decode(payload, n)
        squared_errors = state[..., end:]
        if self.measures:
            before = jnp.where(context.part == 0, 0, squared_errors)
            squared_errors = before + self._squared_errors(whole, state, context)
        return payload, jnp.concatenate(
            [error, inner, state[..., used:end], squared_errors], axis=-1
        )

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """As the level does it."""
        return self.levels[self.level].decode(payload, size)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """As the level does it."""
        return self.levels[self.level].decode_sum(payload, size)

    def wire_bytes(self, size: int) -> int:
        """Those of the level."""
        return self.levels[self.level].wire_bytes(size)

    def squared_errors(self, state: jax.Array) -> jax.Array:
        """[levels + 1]: error of each level in the last measuring step, then the sum of squares."""
        return jnp.sum(
            state[..., -len(self.levels) - 1 :].reshape(-1, len(self.levels) + 1), axis=0
        )

    def _inner(self, size: int) -> int:
        return max(level.state_size(size) for level in self.levels)

    def _squared_errors(
        self, whole: jax.Array, state: jax.Array, context: EncodeContext
    ) -> jax.Array:
        n, left = whole.shape[-1], []
        for level in self.levels:
            inner = state[..., n : n + level.state_size(n)]
            error = whole - level.decode(level.encode(whole, inner, context)[0], n)
            left.append(jnp.sum(jnp.square(error), axis=-1))
        return jnp.stack([*left, jnp.sum(jnp.square(whole), axis=-1)], axis=-1)


def choose_level(squared_errors: jax.Array, keep: float) -> jax.Array:
    """The strongest level, int32, that keeps the share `keep` of the squares; 0 if none does.

    Args:
      squared_errors: [levels + 1] as `AdaptiveCodec.squared_errors` returns them, over all devices.
    """
    left, whole = squared_errors[:-1], squared_errors[-1]
    enough = left <= (1 - keep) * whole
    return jnp.max(jnp.where(enough, jnp.arange(left.shape[0], dtype=jnp.int32), 0))
