"""How the arrays of a checkpoint are cut in files."""

from collections.abc import Mapping
from typing import NamedTuple


class Chunks(NamedTuple):
    """Pieces of arrays, so that a restore onto smaller shards reads and holds little.

    Attributes:
      bytes: size of a piece at most.
      axes: dimensions that are cut at every position, by key of an item.
    """

    bytes: int
    axes: Mapping[str, tuple[int, ...]]
