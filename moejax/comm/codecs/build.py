"""Codecs: what an array is turned into before it crosses a slow link, and back.

Per device; nothing here communicates. A codec works along the last axis of x [..., n] and keeps the
leading ones, so that the parts of an encoded [peers, n] can be sent to their peers. What it must
remember between steps is one float32 array, its state, so that a state can travel through the
backward pass as if it were a gradient.

Errors are stated beside each codec; ratios against bfloat16 count scales, indices and padding.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.config.compression import CodecSpec
from moejax.kernels.quantize import Quantized, bytes_of, dequantize, dequantize_sum, quantize

Payload = Any  # a pytree of arrays; leading dimensions as those of what was encoded


LOCO_AVERAGE, LOCO_RESET = 0.5, 512


class Moment(NamedTuple):
    """When something is encoded, and where: what a codec may depend on beside its input."""

    step: jax.Array  # counted from zero
    key: jax.Array  # for random rounding: of this device, step, micro-batch and parameter alone
    part: jax.Array | int = 0  # the micro-batch, counted from zero in each step


class Codec:
    """Something that encodes arrays."""

    def state_size(self, size: int) -> int:
        """Floats of state for each last axis of `size` values; 0 for a codec without one."""
        return 0

    def encode(self, x: jax.Array, state: jax.Array, moment: Moment) -> tuple[Payload, jax.Array]:
        """Encodes x [..., n]. Returns the payload and the next state [..., state_size(n)]."""
        raise NotImplementedError

    def encode_once(self, x: jax.Array) -> Payload:
        """Encodes x with a codec that remembers nothing and draws nothing."""
        nothing = jnp.zeros((*x.shape[:-1], 0))
        return self.encode(x, nothing, Moment(jnp.int32(0), jax.random.key(0)))[0]

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

    def encode(self, x: jax.Array, state: jax.Array, moment: Moment) -> tuple[Payload, jax.Array]:
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
    """Block quantisation; the bound is that of `kernels.quantize.Format`.

    `kernel` and `rows_kernel`: as of `compression.CodecSpec`.
    """

    format: str
    block: int = 128
    stochastic: bool = False
    kernel: str = "reference"
    rows_kernel: str = "separate"

    def encode(self, x: jax.Array, state: jax.Array, moment: Moment) -> tuple[Payload, jax.Array]:
        """Rounds to the nearest, or to either neighbour with the key."""
        key = moment.key if self.stochastic else None
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

    def encode(self, x: jax.Array, state: jax.Array, moment: Moment) -> tuple[Payload, jax.Array]:
        """Returns (values [..., k] bfloat16, places [..., k] uint32; n where nothing is)."""
        n, k = x.shape[-1], self.places(x.shape[-1])
        magnitude = jnp.abs(x.astype(jnp.float32))
        stale = moment.step % self.refresh == 0
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

    def encode(self, x: jax.Array, state: jax.Array, moment: Moment) -> tuple[Payload, jax.Array]:
        """Encodes x and what is kept; keeps what the payload leaves out."""
        n, kept = x.shape[-1], self._kept(x.shape[-1])
        before = self._load(state[..., :kept], n)
        whole = x.astype(jnp.float32) + before
        payload, inner = self.codec.encode(whole, state[..., kept:], moment)
        error = whole - self.decode(payload, n)
        after = (1 - self.average) * before + self.average * error if self.average != 1 else error
        if self.reset is not None:
            after = jnp.where((moment.step + 1) % self.reset == 0, 0, after)
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

    def encode(self, x: jax.Array, state: jax.Array, moment: Moment) -> tuple[Payload, jax.Array]:
        """Encodes x and what is kept on the rung; keeps what the payload leaves out."""
        n, codec = x.shape[-1], self.rungs[self.rung]
        end = n + self._inner(n)
        used = n + codec.state_size(n)
        whole = x.astype(jnp.float32) + state[..., :n]
        payload, inner = codec.encode(whole, state[..., n:used], moment)
        error = whole - self.decode(payload, n)
        energies = state[..., end:]
        if self.measures:
            before = jnp.where(moment.part == 0, 0, energies)
            energies = before + self._energies(whole, state, moment)
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

    def _energies(self, whole: jax.Array, state: jax.Array, moment: Moment) -> jax.Array:
        n, left = whole.shape[-1], []
        for rung in self.rungs:
            inner = state[..., n : n + rung.state_size(n)]
            error = whole - rung.decode(rung.encode(whole, inner, moment)[0], n)
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


@dataclass(frozen=True)
class LowRank:
    """A matrix of low rank in place of a gradient (PowerSGD); `comm.weights.compressed` sums them.

    Both factors are summed over all devices, so nothing is encoded on its own: this is no `Codec`.
    One power iteration a step, from the right factor of the step before. Error: what the rank
    leaves out, which is kept and sent later; no bound for one step.
    """

    rank: int

    def shape(self, size: int) -> tuple[int, int, int]:
        """(rows, columns, rank) of the matrix that `size` values are laid out as, about square."""
        columns = max(1, math.isqrt(size))
        return -(-size // columns), columns, min(self.rank, columns)

    def state_size(self, size: int) -> int:
        """What is kept."""
        return size

    def factor_size(self, size: int) -> int:
        """Floats of the right factor."""
        _, columns, rank = self.shape(size)
        return columns * rank


def build_codec(spec: CodecSpec) -> Codec | LowRank:
    """Makes the codec that a config names."""
    if spec.name == "powersgd":
        assert spec.argument is not None
        return LowRank(int(spec.argument))
    if spec.name == "loco":
        blocks = Blocks("int4", spec.block, kernel=spec.kernel)
        return ErrorFeedback(blocks, LOCO_AVERAGE, "e4m3", spec.block, LOCO_RESET)
    if spec.name == "adaptive":
        rungs = tuple(_plain_codec(rung) for rung in spec.rungs)
        return Ladder(rungs, spec.rung, spec.measures)
    codec = _plain_codec(spec)
    return ErrorFeedback(codec) if spec.feedback else codec


def build_plain_codec(spec: CodecSpec | None) -> Codec | None:
    """Makes a codec that remembers nothing: of tokens and of weights."""
    return None if spec is None else _plain_codec(spec)


def _plain_codec(spec: CodecSpec) -> Codec:
    if spec.name == "bfloat16":
        return Cast()
    if spec.name == "topk":
        assert spec.argument is not None
        return TopK(spec.argument)
    return Blocks(spec.name, spec.block, spec.stochastic, spec.kernel, spec.rows_kernel)
