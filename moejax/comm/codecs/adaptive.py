"""A codec that is as strong as what it leaves out allows."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.comm.codecs.codec import Codec, EncodeContext, Payload


@dataclass(frozen=True)
class Ladder(Codec):
    """The rung of some codecs that was chosen last, with error feedback of its own (GraVAC).

    A step that measures notes in the state, for each rung, the energy that it would leave out, and
    the whole energy, summed over its micro-batches; `choose` takes the strongest rung from them
    that keeps enough.
    """

    rungs: tuple[Codec, ...]  # from mild to strong, without feedback
    rung: int = 0
    measures: bool = False

    def state_size(self, size: int) -> int:
        """What is kept, the largest of the rungs' own states, the energies."""
        return size + self._inner(size) + len(self.rungs) + 1

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Encodes x and what is kept on the rung; keeps what the payload leaves out."""
        n, codec = x.shape[-1], self.rungs[self.rung]
        end = n + self._inner(n)
        used = n + codec.state_size(n)
        whole = x.astype(jnp.float32) + state[..., :n]
        payload, inner = codec.encode(whole, state[..., n:used], context)
        error = whole - self.decode(payload, n)
        energies = state[..., end:]
        if self.measures:
            before = jnp.where(context.part == 0, 0, energies)
            energies = before + self._energies(whole, state, context)
        return payload, jnp.concatenate([error, inner, state[..., used:end], energies], axis=-1)

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """As the rung does."""
        return self.rungs[self.rung].decode(payload, size)

    def decode_sum(self, payload: Payload, size: int) -> jax.Array:
        """As the rung does."""
        return self.rungs[self.rung].decode_sum(payload, size)

    def wire_bytes(self, size: int) -> int:
        """As of the rung."""
        return self.rungs[self.rung].wire_bytes(size)

    def energies(self, state: jax.Array) -> jax.Array:
        """[rungs + 1]: what the last measuring step noted in a state, summed."""
        return jnp.sum(state[..., -len(self.rungs) - 1 :].reshape(-1, len(self.rungs) + 1), axis=0)

    def _inner(self, size: int) -> int:
        return max(rung.state_size(size) for rung in self.rungs)

    def _energies(self, whole: jax.Array, state: jax.Array, context: EncodeContext) -> jax.Array:
        n, left = whole.shape[-1], []
        for rung in self.rungs:
            inner = state[..., n : n + rung.state_size(n)]
            error = whole - rung.decode(rung.encode(whole, inner, context)[0], n)
            left.append(jnp.sum(jnp.square(error), axis=-1))
        return jnp.stack([*left, jnp.sum(jnp.square(whole), axis=-1)], axis=-1)


def choose(energies: jax.Array, keep: float) -> jax.Array:
    """The strongest rung, int32, that keeps the share `keep` of the energy; 0 if none does.

    Args:
      energies: [rungs + 1] as `Ladder` notes them, over all devices.
    """
    left, whole = energies[:-1], energies[-1]
    enough = left <= (1 - keep) * whole
    return jnp.max(jnp.where(enough, jnp.arange(left.shape[0], dtype=jnp.int32), 0))
