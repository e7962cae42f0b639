"""The largest values with their places."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.comm.codecs.codec import Codec, EncodeContext, Payload


@dataclass(frozen=True)
class TopK(Codec):
    """The largest values by magnitude, with their places; all others are zero.

    A threshold t is fitted to an exponential distribution of magnitudes (SIDCo): of values with
    mean magnitude m a share d lies above -m ln(d). Magnitudes of gradients have heavier tails, so
    the fit is repeated on what lies above, for a smaller share each time. The state keeps t,
    refitted every `refresh` steps (DCT), and counts what found no room.

    A row has room for `room` times the share: values above t that come after are left out, and
    counted. Error: |x| where a value is left out, else that of bfloat16.
    """

    share: float
    refresh: int = 1
    stages: int = 2
    room: float = 1.5

    def state_size(self, size: int) -> int:
        """The threshold, and how many values found no room."""
        return 2

    def places(self, size: int) -> int:
        """Values that a payload has room for."""
        return min(size, math.ceil(self.room * self.share * size))

    def encode(
        self, x: jax.Array, state: jax.Array, context: EncodeContext
    ) -> tuple[Payload, jax.Array]:
        """Returns (values [..., k] bfloat16, places [..., k] uint32; n where nothing is)."""
        n, k = x.shape[-1], self.places(x.shape[-1])
        magnitude = jnp.abs(x.astype(jnp.float32))
        stale = context.step % self.refresh == 0
        threshold = jnp.where(stale, self.fit(magnitude), state[..., 0])
        # A value that is not finite is always sent: a broken gradient must stay visible.
        chosen = ~(magnitude <= threshold[..., None])
        rank = jnp.cumsum(chosen, axis=-1) - 1
        overflow = jnp.maximum(rank[..., -1] + 1 - k, 0).astype(jnp.float32)
        slot = jnp.where(chosen & (rank < k), rank, k)
        place = jnp.broadcast_to(jnp.arange(n, dtype=jnp.uint32), x.shape)
        fill = jnp.full((*x.shape[:-1], k), n, jnp.uint32)
        places = _put(fill, slot, place)
        values = jnp.take_along_axis(
            jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]), places.astype(jnp.int32), axis=-1
        )
        state = jnp.stack([threshold, state[..., 1] + overflow], axis=-1)
        return (values.astype(jnp.bfloat16), places), state

    def fit(self, magnitude: jax.Array) -> jax.Array:
        """The threshold that a share of the magnitudes [..., n] is above, by the fits."""
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
        """Values at their places among zeros."""
        values, places = payload
        zeros = jnp.zeros((*values.shape[:-1], size), jnp.float32)
        return _put(zeros, places.astype(jnp.int32), values.astype(jnp.float32))

    def wire_bytes(self, size: int) -> int:
        """Two bytes a value, four a place, also for room that is empty."""
        return 6 * self.places(size)


def _put(into: jax.Array, place: jax.Array, values: jax.Array) -> jax.Array:
    """`into` [..., n] with values [..., k] at places [..., k]; places past the end are left out."""
    rows = [a.reshape(-1, a.shape[-1]) for a in (into, place, values)]
    put = jax.vmap(lambda i, p, v: i.at[p].set(v, mode="drop"))(*rows)
    return put.reshape(into.shape)
