"""What the rest of the model asks of a mixer of tokens.

A mixer is an `nnx.Module` that is built from `(cfg, window, spec, rngs)`. Its parameters have the
letters of their dimensions, by which they are sharded, and enter by `gather_weight`.
"""

from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec

from moejax.config.schema import ModelConfig
from moejax.layout.layout import Axes, Layout
from moejax.model.context import Rows
from moejax.model.rope import Angles


class CacheSize(NamedTuple):
    """The size of a cache: its slots, of all devices, and the positions that a block keeps."""

    slots: int
    positions: int


class CacheArray(NamedTuple):
    """An array of a cache, of all devices; slots come first.

    Attributes:
      axes: mesh axes that shard the first dimensions.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[Axes, ...]

    @property
    def spec(self) -> PartitionSpec:
        """Its sharding."""
        return PartitionSpec(*(axes or None for axes in self.axes))


class NoMixer:
    """Stands for a mixer where a block has none: it keeps and computes nothing."""

    @staticmethod
    def cache(cfg: ModelConfig, size: CacheSize, layout: Layout) -> tuple[CacheArray, ...]:
        """Returns nothing."""
        return ()

    @staticmethod
    def flops(cfg: ModelConfig, length: int, window: int | None) -> int:
        """Returns 0."""
        return 0

    @staticmethod
    def channels(cfg: ModelConfig) -> int:
        """Returns 0."""
        return 0


class Mixer(Protocol):
    """A mixer of tokens.

    One that works on a part of the positions, for slices of stages and for the block of
    `model.predict_ahead`, has `in_slice` and `keys` besides: see `Attention`.
    """

    @staticmethod
    def cache(cfg: ModelConfig, size: CacheSize, layout: Layout) -> tuple[CacheArray, ...]:
        """Returns what a cache holds of a block."""
        ...

    @staticmethod
    def flops(cfg: ModelConfig, length: int, window: int | None) -> int:
        """Returns the FLOPs of a sequence forward, besides those of matrices."""
        ...

    @staticmethod
    def channels(cfg: ModelConfig) -> int:
        """Returns how many numbers a position has while a block is computed; roughly."""
        ...

    def __call__(self, x_BtD: jax.Array, segment_BS: jax.Array, angles: Angles) -> jax.Array:
        """Takes and returns activations of whole sequences, in the layout between blocks."""
        ...

    def extend(
        self, x_1tD: jax.Array, cache: tuple[jax.Array, ...], rows: Rows, angles: Angles
    ) -> tuple[jax.Array, Any]:
        """Runs the new tokens of rows behind the texts of a cache; returns it with them."""
        ...
