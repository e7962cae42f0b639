"""Where pieces of a gradient's reduction go: in the gaps between exchanges, so that none waits.

The link carries exchanges of tokens, and between them is free while a device computes. Pieces are
taken in the order in which their gradients become ready, as many into each gap as it has time for;
what is left rolls on into the next gap, and what no gap has time for comes last (FSMoE's greedy
assignment, with Lina's rule that no reduction starts in front of an exchange that is about to).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """A stretch of the step in which the link is free.

    Attributes:
      seconds: how long it is, by what is computed meanwhile.
      ready: pieces that become ready at its start, and may go from here on.
    """

    seconds: float
    ready: int = 0


def assign(gaps: Sequence[Gap], piece_seconds: float) -> list[int]:
    """Returns how many pieces go into each gap, and last how many are left for the end.

    Args:
      gaps: in the order of the step.
      piece_seconds: of one piece on the link.
    """
    taken, waiting = [], 0
    for gap in gaps:
        waiting += gap.ready
        room = int(gap.seconds / piece_seconds) if piece_seconds > 0 else waiting
        taken.append(min(waiting, room))
        waiting -= taken[-1]
    return [*taken, waiting]
