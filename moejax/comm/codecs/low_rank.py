"""Low-rank compression of gradients (PowerSGD)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LowRank:
    """Replaces a gradient by a matrix of low rank (PowerSGD); `comm.weights.compressed` sums it.

    Both factors are sums over all devices. No device encodes its gradient by itself, so this is no
    `Codec`. Each step does one power iteration from the previous step's right factor. The error is
    kept and added to the next gradient; it has no bound for one step.
    """

    rank: int

    def shape(self, size: int) -> tuple[int, int, int]:
        """(rows, columns, rank) of the nearly square matrix that holds `size` values."""
        columns = max(1, math.isqrt(size))
        return -(-size // columns), columns, min(self.rank, columns)

    def state_size(self, size: int) -> int:
        """Floats of the kept error."""
        return size

    def factor_size(self, size: int) -> int:
        """Number of floats in the right factor."""
        _, columns, rank = self.shape(size)
        return columns * rank
