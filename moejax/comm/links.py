"""Links between pipeline stages: activations to the next stage, gradients to the previous one.

Per device, inside shard_map. A send is a chain, and the send from the last stage to the first one a
permute of its own: XLA's decomposer of cyclic permutes lets zeros arrive where a permute has more
than one cycle (openxla/xla#45222).

A stage's share of the positions is the P-th of each sequence that its loss step covers.

Letters: those of `layout.layout`; P stages, X the width of an encoded array.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moejax.comm import wire
from moejax.comm.activations import enter_tensor
from moejax.comm.codecs.codec import Codec, Payload, build_plain_codec, pack, unpack
from moejax.config.compression import Codecs, CodecSpec
from moejax.layout.layout import Layout


@dataclass(frozen=True)
class StageLink:
    """The link between stages, for one class of traffic.

    Arrays are encoded before they travel; without a codec an encoded array is the array itself.
    `to_next`, `to_previous` and `gather_to_last` take encoded arrays and return decoded ones.

    Attributes:
      traffic: class of traffic.
      width, dtype: D, and the dtype of decoded arrays.
      codec: None: nothing is compressed.
      feedback: whether the error of an encoding is added to the next array. That is another
        micro-batch's, so it makes gradients of weights worse: decision 0027.
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
        """Returns the error before the first encoding, like x in float32; None without feedback."""
        return jnp.zeros(x_BtD.shape, jnp.float32) if self.feedback else None

    def encode(
        self, x_BtD: jax.Array, error: jax.Array | None, valid: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Encodes activations or gradients [..., D], with the error so far added to them.

        Args:
          error: like x, in float32; None without feedback.
          valid: False in the bubble, which leaves the error as it is.
        Returns:
          The encoded array [..., X] and the next error.
        """
        if error is None:
            return self.encode_once(x_BtD), None
        corrected = x_BtD.astype(jnp.float32) + error
        encoded = self.encode_once(corrected)
        new_error = corrected - self.decode(encoded, jnp.float32)
        return encoded, jnp.where(valid, new_error, error)

    def encode_once(self, x_BtD: jax.Array) -> jax.Array:
        """Returns activations or gradients [..., D] encoded, [..., X]; their error is not kept."""
        if self.codec is None:
            return x_BtD
        return pack(self.codec.encode_once(x_BtD), x_BtD.ndim - 1)

    def decode(self, encoded: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns an encoded array [..., X] decoded, [..., D]."""
        if self.codec is None:
            return encoded
        return self.codec.decode_as(unpack(encoded, self.like), self.width, dtype)

    def to_next(self, encoded: jax.Array, *, around: bool = False) -> jax.Array:
        """Returns the previous stage's array. Wire: all of the encoded array.

        Args:
          around: whether the last stage sends to the first, which else receives zeros.
        """
        chain = [(i, i + 1) for i in range(self.size - 1)]
        return self._permute(encoded, chain, (self.size - 1, 0) if around else None)

    def to_previous(self, encoded: jax.Array, *, around: bool = False) -> jax.Array:
        """Returns the next stage's array: `to_next` in the opposite direction."""
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

    def scatter_positions(self, y_BtD: jax.Array) -> jax.Array:
        """Returns this stage's share of the positions of the last stage's array, [B, t / P, D].

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

    def gather_to_last(self, encoded_BtX: jax.Array) -> jax.Array:
        """The transpose of `scatter_positions`: the last stage gets all positions, [B, P t, D].

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
) -> StageLink:
    """Returns the link between stages for one class of traffic.

    Args:
      codecs: the step's; between stages of one node nothing is compressed.
      x_BtD: an array that travels; only its shape and dtype count.
    """
    across = layout.between_nodes(layout.stage)
    spec: CodecSpec | None = getattr(codecs, traffic) if across else None
    codec = build_plain_codec(spec)
    like = None if codec is None else jax.eval_shape(codec.encode_once, x_BtD)
    feedback = spec is not None and spec.feedback
    return StageLink(layout, traffic, x_BtD.shape[-1], x_BtD.dtype, codec, feedback, like)


def parts_per_share(layout: Layout) -> int:
    """Number of parts of a sequence that are a stage's share.

    With sequence-sharded activations each of the R tensor ranks has its positions scattered over
    the stages, so a share has R parts: part r of stage s is part r * P + s of the sequence.
    """
    return layout.size(layout.tensor) if layout.sequence_sharded else 1


def share_of_positions(x_BT: jax.Array, layout: Layout) -> jax.Array:
    """Returns this stage's share of the positions of all, [B, T / P].

    Its positions are in the order in which `comm.activations.enter_tensor` joins those of tensor
    ranks after `StageLink.scatter_positions`.
    """
    stages, ranks = layout.size(layout.stage), parts_per_share(layout)
    B, T = x_BT.shape
    split = x_BT.reshape(B, ranks, stages, T // ranks // stages)
    share = jax.lax.dynamic_index_in_dim(split, wire.index(layout.stage), axis=2, keepdims=False)
    return share.reshape(B, -1)


def gather_positions(x_BT: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `share_of_positions`: returns all stages' shares joined, [B, P T].

    Wire: x of each stage, gathered.

    Args:
      x_BT: a share; further dimensions may follow.
    """
    stages, ranks = layout.size(layout.stage), parts_per_share(layout)
    B, length, *rest = x_BT.shape
    with jax.named_scope("stage"):
        # 1 B T -> P B T
        x_PBT = wire.all_gather(x_BT[None], layout.stage, dim=0, tag=None)
    split = x_PBT.reshape(stages, B, ranks, length // ranks, *rest)
    return jnp.moveaxis(split, 0, 2).reshape(B, stages * length, *rest)


def order_by_slices(x_BtD: jax.Array, slices: int, layout: Layout) -> jax.Array:
    """Returns hidden states [B, t, D] ordered by slices of the sequence.

    With sequence-sharded activations x has one tensor rank's part of the sequence, and the result
    its part of every slice. Wire: x, gathered over tensor; nothing for one slice.
    """
    if slices == 1 or parts_per_share(layout) == 1:
        return x_BtD
    x_BTD = enter_tensor(x_BtD, layout)  # B t D -> B T D
    B, T, D = x_BTD.shape
    ranks = layout.size(layout.tensor)
    split = x_BTD.reshape(B, slices, ranks, T // slices // ranks, D)
    part = jax.lax.dynamic_index_in_dim(split, wire.index(layout.tensor), axis=2, keepdims=False)
    return part.reshape(B, -1, D)
