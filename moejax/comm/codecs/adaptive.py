"""A codec whose strength follows the error it makes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.comm.codecs.codec import Codec, EncodeContext, Payload


@dataclass(frozen=True)
class AdaptiveCodec(Codec):
    """One of several codecs, from mild to strong, with error feedback (after GraVAC).

    A measuring step stores each level's squared error and the sum of squares in the state.
    `choose_level` then takes the strongest level whose error is small enough.
    """

    levels: tuple[Codec, ...]  # from mild to strong, without feedback
    level: int = 0
    measures: bool = False

    def state_size(self, size: int) -> int:
        """Floats of the kept error, the largest state of a level, and the squared errors."""
        return size + self._level_state_size(size) + len(self.levels) + 1

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Encodes x plus the kept error with the level; keeps the error of the payload."""
        n, codec = x.shape[-1], self.levels[self.level]
        end = n + self._level_state_size(n)
        level_end = n + codec.state_size(n)
        corrected = x.astype(jnp.float32) + state[..., :n]
        payload, level_state = codec.encode(corrected, state[..., n:level_end], context)
        error = corrected - self.decode(payload, n)
        squared_errors = state[..., end:]
        if self.measures:
            squared_errors = self._squared_errors(corrected, state, context)
        return payload, jnp.concatenate(
            [error, level_state, state[..., level_end:end], squared_errors], axis=-1
        )

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Decodes as the level does."""
        return self.levels[self.level].decode(payload, size)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """Decodes as the level does."""
        return self.levels[self.level].decode_sum(payload, size)

    def wire_bytes(self, size: int) -> int:
        """Bytes of the level's payload."""
        return self.levels[self.level].wire_bytes(size)

    def squared_errors(self, state: jax.Array) -> jax.Array:
        """[levels + 1]: squared error of each level when last measured, then the sum of squares."""
        return jnp.sum(
            state[..., -len(self.levels) - 1 :].reshape(-1, len(self.levels) + 1), axis=0
        )

    def _level_state_size(self, size: int) -> int:
        return max(level.state_size(size) for level in self.levels)

    def _squared_errors(
        self, corrected: jax.Array, state: jax.Array, context: EncodeContext
    ) -> jax.Array:
        """Encodes with every level, to measure its error: [..., levels + 1]."""
        n, errors = corrected.shape[-1], []
        for level in self.levels:
            level_state = state[..., n : n + level.state_size(n)]
            error = corrected - level.decode(level.encode(corrected, level_state, context)[0], n)
            errors.append(jnp.sum(jnp.square(error), axis=-1))
        return jnp.stack([*errors, jnp.sum(jnp.square(corrected), axis=-1)], axis=-1)


def choose_level(squared_errors: jax.Array, keep: float) -> jax.Array:
    """The strongest level, int32, that keeps the share `keep` of the squares; 0 if none does.

    Args:
      squared_errors: [levels + 1] as `AdaptiveCodec.squared_errors` returns them, over all devices.
    """
    errors, squares = squared_errors[:-1], squared_errors[-1]
    enough = errors <= (1 - keep) * squares
    return jnp.max(jnp.where(enough, jnp.arange(errors.shape[0], dtype=jnp.int32), 0))
