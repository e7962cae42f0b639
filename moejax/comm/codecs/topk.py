"""Top-k sparsification: the largest values with their indices."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.comm.codecs.codec import Codec, EncodeContext, Payload


@dataclass(frozen=True)
class TopK(Codec):
    """Sends about a `share` of the values, the largest by magnitude, with their indices.

    The threshold t is fitted to an exponential distribution of magnitudes (SIDCo): of values with
    mean magnitude m a share d lies above -m ln(d). Magnitudes of gradients have heavier tails, so
    the fit is repeated on the values above it, for a smaller share each time. The state keeps t,
    refitted every `refresh` steps (DCT), and a count of overflow.

    A payload holds `capacity_factor` times the share. If more values are above t, the first are
    sent; the rest overflow. Error: |x| for a value that is not sent, else the error of bfloat16.
    """

    share: float
    refresh: int = 1
    stages: int = 2
    capacity_factor: float = 1.5

    def state_size(self, size: int) -> int:
        """Two floats: the threshold, and the number of values that overflowed."""
        return 2

    def capacity(self, size: int) -> int:
        """The number of values in a payload."""
        return min(size, math.ceil(self.capacity_factor * self.share * size))

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Returns (values [..., k] bfloat16, indices [..., k] uint32; n for an empty slot)."""
        n, k = x.shape[-1], self.capacity(x.shape[-1])
        magnitude = jnp.abs(x.astype(jnp.float32))
        stale = context.step % self.refresh == 0
        threshold = jnp.where(stale, self.fit(magnitude), state[..., 0])
        # A value that is not finite is always sent: a broken gradient must stay visible.
        chosen = ~(magnitude <= threshold[..., None])
        rank = jnp.cumsum(chosen, axis=-1) - 1
        overflow = jnp.maximum(rank[..., -1] + 1 - k, 0).astype(jnp.float32)
        slot = jnp.where(chosen & (rank < k), rank, k)
        positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.uint32), x.shape)
        fill = jnp.full((*x.shape[:-1], k), n, jnp.uint32)
        indices = _put(fill, slot, positions)
        values = jnp.take_along_axis(
            jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]), indices.astype(jnp.int32), axis=-1
        )
        state = jnp.stack([threshold, state[..., 1] + overflow], axis=-1)
        return (values.astype(jnp.bfloat16), indices), state

    def fit(self, magnitude: jax.Array) -> jax.Array:
        """Fits the threshold that the share of the magnitudes [..., n] exceeds."""
        threshold = jnp.zeros(magnitude.shape[:-1], jnp.float32)
        rate = self.share ** (1 / self.stages)
        finite = jnp.where(jnp.isfinite(magnitude), magnitude, 0)
        for _ in range(self.stages):
            above = finite > threshold[..., None]
            count = jnp.maximum(jnp.sum(above, axis=-1), 1)
            excess = jnp.sum(jnp.where(above, finite - threshold[..., None], 0), axis=-1) / count
            threshold = threshold - excess * math.log(rate)
        return threshold

    def decode(self, payload: Payload, size: int) -> jax.Array:
        """Zeros, with the values at their indices."""
        values, indices = payload
        zeros = jnp.zeros((*values.shape[:-1], size), jnp.float32)
        return _put(zeros, indices.astype(jnp.int32), values.astype(jnp.float32))

    def wire_bytes(self, size: int) -> int:
        """Two bytes a value and four an index, for empty slots too."""
        return 6 * self.capacity(size)


def _put(into: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """Writes values [..., k] at index [..., k] of `into` [..., n]; drops indices past the end."""
    rows = [a.reshape(-1, a.shape[-1]) for a in (into, index, values)]
    put = jax.vmap(lambda i, p, v: i.at[p].set(v, mode="drop"))(*rows)
    return put.reshape(into.shape)
