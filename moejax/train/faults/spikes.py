"""Finds losses that jump and stay: a spike.

A loss is high if it exceeds the median of the losses before it by more than `threshold` standard
deviations. The standard deviation is estimated as 1.4826 times the median absolute deviation.
`STEPS` high losses in a row are a spike; a single one is a bad batch. High losses do not enter the
median, else a slow rise would hide itself. Once they have lasted as long as the window they are the
new level.

False alarms and delays are measured by `python -m benchmarks.learning.spikes`.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

STEPS = 3  # high losses in a row
WINDOW = 128  # losses of which the median is taken, as in MaxText's skip_step_on_spikes
LEAST = 32  # with fewer losses none is called high
TO_DEVIATION = 1.4826  # of a normal distribution: standard over median absolute deviation
# Smallest standard deviation, as a share of the median. Without it any change in the last bit would
# be high after losses that are all equal, as with a learning rate of 0. bfloat16 has eight bits:
# 0.004.
FLOOR = 0.001


class Spike(NamedTuple):
    """Losses that were high in a row."""

    first: int  # the step of the first of them
    step: int  # of the last
    loss: float  # of that step
    median: float  # of the losses before


class Spikes:
    """Finds spikes in the losses of a run, step after step."""

    def __init__(self, threshold: float | None, losses: Iterable[float] = (), in_a_row: int = 0):
        """Starts anew, or goes on from `losses` and `in_a_row` of an earlier start.

        Args:
          threshold: standard deviations above the median from which a loss is high; None: never.
        """
        self._threshold = threshold
        self._losses = deque(losses, maxlen=WINDOW)
        self.in_a_row = in_a_row  # how many of the last losses were high

    @property
    def losses(self) -> list[float]:
        """The losses over which the median is taken."""
        return list(self._losses)

    @property
    def suspected(self) -> bool:
        """Whether the last losses were high, and too few for a spike so far."""
        return 0 < self.in_a_row < STEPS

    def after(self, step: int, loss: float) -> Spike | None:
        """Takes the finite loss of a step. Returns a spike once, at its `STEPS`-th high loss."""
        if self._threshold is None:
            return None
        median = self._high_above(loss)
        if median is None:
            self.in_a_row = 0
            self._losses.append(loss)
            return None
        self.in_a_row += 1
        if self.in_a_row == WINDOW:
            self._losses.clear()
            self.in_a_row = 0
        if self.in_a_row != STEPS:
            return None
        return Spike(step - STEPS + 1, step, loss, median)

    def _high_above(self, loss: float) -> float | None:
        """Returns the median above which a loss is high; None if it is not high."""
        if len(self._losses) < LEAST or self._threshold is None:
            return None
        median = statistics.median(self._losses)
        spread = statistics.median(abs(one - median) for one in self._losses)
        deviation = max(TO_DEVIATION * spread, FLOOR * abs(median))
        return median if loss > median + self._threshold * deviation else None
