"""Gradients as matrices of low rank."""

import math
from dataclasses import dataclass


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
