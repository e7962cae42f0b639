"""Pipeline stages: hidden states to the next stage, gradients to the one before.

Per device, inside shard_map. Sends are chains without a way around: XLA's decomposer of cyclic
permutes lets zeros arrive where a permute has more than one cycle (openxla/xla#45222).

Letters as in `layout.layout`; P stages.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.comm import wire
from moejax.comm.activations import enter_tensor
from moejax.comm.codecs.build import build_plain_codec
from moejax.comm.codecs.codec import Codec, Payload
from moejax.comm.codecs.pack import pack, unpack
from moejax.config.compression import Codecs, CodecSpec
from moejax.layout.layout import Layout


@dataclass(frozen=True)
class Link:
    """The links between stages, for one class of traffic.

    Arrays are encoded before they travel; without a codec an encoded array is the array. The
    methods that send take encoded arrays and return decoded ones.

    Attributes:
      traffic: class of traffic.
      codec: None: nothing is compressed.
      feedback: whether the error of an encoding is added to the next input. That input is of
        another micro-batch, so this makes gradients of weights worse: decision 0027.
      like: shapes and dtypes of the codec's payload of an array [B, t, D].
    """

    layout: Layout
    traffic: Literal["stage", "stage_gradient"]
    width: int
    dtype: DTypeLike
    codec: Codec | None
    feedback: bool
    like: Payload

    @property
    def size(self) -> int:
        """Number of stages."""
        return self.layout.size(self.layout.stage)

    def first_error(self, x_BtD: jax.Array) -> jax.Array | None:
        """Returns the initial error, zeros; None if errors are not kept."""
        return jnp.zeros(x_BtD.shape, jnp.float32) if self.feedback else None

    def encode(
        self, x_BtD: jax.Array, error: jax.Array | None, valid: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Encodes hidden states or gradients, with the error so far added to them.

        Args:
          valid: whether they count; otherwise the error stays as it is.
        Returns:
          The encoded array and the next error.
        """
        if error is None:
            return self.encode_once(x_BtD), None
        corrected = x_BtD.astype(jnp.float32) + error
        encoded = self.encode_once(corrected)
        left = corrected - self.decode(encoded, jnp.float32)
        return encoded, jnp.where(valid, left, error)

    def encode_once(self, x_BtD: jax.Array) -> jax.Array:
        """Encodes hidden states or gradients whose error is not kept."""
        if self.codec is None:
            return x_BtD
        return pack(self.codec.encode_once(x_BtD), x_BtD.ndim - 1)

    def decode(self, encoded: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Decodes the result of `encode`."""
        if self.codec is None:
            return encoded
        return self.codec.decode_as(unpack(encoded, self.like), self.width, dtype)

    def to_next(self, encoded: jax.Array, *, around: bool = False) -> jax.Array:
        """Sends to the next stage. Wire: all of the encoded array.

        Args:
          around: whether the last stage sends to the first; otherwise zeros arrive there.
        """
        chain = [(i, i + 1) for i in range(self.size - 1)]
        return self._permute(encoded, chain, (self.size - 1, 0) if around else None)

    def to_previous(self, encoded: jax.Array, *, around: bool = False) -> jax.Array:
        """Sends to the stage before: `to_next` the other way."""
        chain = [(i + 1, i) for i in range(self.size - 1)]
        return self._permute(encoded, chain, (0, self.size - 1) if around else None)

    def _permute(
        self, encoded: jax.Array, chain: list[tuple[int, int]], around: tuple[int, int] | None
    ) -> jax.Array:
        with jax.named_scope(self.traffic):
            moved = wire.ppermute(encoded, self.layout.stage, chain)
            if around is not None:
                other = wire.ppermute(encoded, self.layout.stage, [around])
                moved = jnp.where(wire.index(self.layout.stage) == around[1], other, moved)
            return self.decode(moved, self.dtype)

    def spread_positions(self, y_BtD: jax.Array) -> jax.Array:
        """Gives each stage its share of the positions of the last stage's hidden states.

        Wire: (P - 1) / P of the encoded array, from the last stage alone.
        """
        B, t, D = y_BtD.shape
        y_PBtD = jnp.moveaxis(y_BtD.reshape(B, self.size, t // self.size, D), 1, 0)
        with jax.named_scope(self.traffic):
            encoded = self.encode_once(y_PBtD)
            share, last = encoded[-1], self.size - 1
            for stage in range(last):
                moved = wire.ppermute(encoded[stage], self.layout.stage, [(last, stage)])
                share = jnp.where(wire.index(self.layout.stage) == stage, moved, share)
            return self.decode(share, self.dtype)

    def collect_positions(self, encoded_BtX: jax.Array) -> jax.Array:
        """The transpose of `spread_positions`: the last stage gets all positions.

        The result on other stages is undefined.

        Wire: (P - 1) / P of the encoded result, to the last stage alone.
        """
        B, t, _ = encoded_BtX.shape
        with jax.named_scope(self.traffic):
            every = [
                wire.ppermute(encoded_BtX, self.layout.stage, [(stage, self.size - 1)])
                for stage in range(self.size - 1)
            ]
            dy_BtD = self.decode(jnp.concatenate([*every, encoded_BtX]), self.dtype)
        dy_PBtD = dy_BtD.reshape(self.size, B, t, self.width)
        return jnp.moveaxis(dy_PBtD, 0, 1).reshape(B, -1, self.width)


def build_link(
    traffic: Literal["stage", "stage_gradient"], layout: Layout, codecs: Codecs, x_BtD: jax.Array
) -> Link:
    """Returns the links between stages for one class of traffic.

    Args:
      codecs: codecs of the step; between stages of one node nothing is compressed.
      x_BtD: an array as it travels; only its shape and dtype count.
    """
    spec: CodecSpec | None = getattr(codecs, traffic)
    if not layout.between_nodes(layout.stage):
        spec = None
    codec = build_plain_codec(spec)
    like = None if codec is None else jax.eval_shape(codec.encode_once, x_BtD)
    feedback = spec is not None and spec.feedback
    return Link(layout, traffic, x_BtD.shape[-1], x_BtD.dtype, codec, feedback, like)


def parts_of_share(layout: Layout) -> int:
    """Number of the parts of a sequence that `spread_positions` gives each stage.

    If tensor ranks hold different positions, each rank's positions are cut into as many parts as
    there are stages: the n-th part of stage s is the (n * P + s)-th of the sequence.
    """
    return layout.size(layout.tensor) if layout.sequence_sharded else 1


def own_positions(target_BT: jax.Array, layout: Layout) -> jax.Array:
    """Selects the positions that `spread_positions` gives this stage, from all positions.

    They are in the order in which `comm.activations.enter_tensor` joins the tensor ranks'
    positions.
    """
    stages, ranks = layout.size(layout.stage), parts_of_share(layout)
    B, T = target_BT.shape
    split = target_BT.reshape(B, ranks, stages, T // ranks // stages)
    own = jax.lax.dynamic_index_in_dim(split, wire.index(layout.stage), axis=2, keepdims=False)
    return own.reshape(B, -1)


def in_slices(x_BtD: jax.Array, slices: int, layout: Layout) -> jax.Array:
    """Orders positions by slices of the sequence, each in the layout between blocks.

    If tensor ranks hold different positions, each holds one part of the sequence before, and a
    part of every slice after. Wire: x, gathered over tensor; nothing for one slice.
    """
    if slices == 1 or parts_of_share(layout) == 1:
        return x_BtD
    x_BTD = enter_tensor(x_BtD, layout)
    B, T, D = x_BTD.shape
    ranks = layout.size(layout.tensor)
    split = x_BTD.reshape(B, slices, ranks, T // slices // ranks, D)
    own = jax.lax.dynamic_index_in_dim(split, wire.index(layout.tensor), axis=2, keepdims=False)
    return own.reshape(B, -1, D)


def join_positions(x_BT: jax.Array, layout: Layout) -> jax.Array:
    """Undoes `own_positions`, with all stages' shares. Wire: x of each stage, gathered.

    Args:
      x_BT: any dimensions may follow.
    """
    stages, ranks = layout.size(layout.stage), parts_of_share(layout)
    B, length, *rest = x_BT.shape
    with jax.named_scope("stage"):
        x_PBT = wire.all_gather(x_BT[None], layout.stage, dim=0, tag=None)
    split = x_PBT.reshape(stages, B, ranks, length // ranks, *rest)
    return jnp.moveaxis(split, 0, 2).reshape(B, stages * length, *rest)
