"""Counts updates in a row that were not applied because they were not finite."""

import math
from typing import NamedTuple

from moejax.step.state import Metrics


class Skipped(NamedTuple):
    """An update that was not applied."""

    step: int
    loss: float
    gradient_norm: float
    in_a_row: int  # this one included

    @property
    def reason(self) -> str:
        """Says whether loss or gradient was not finite."""
        if math.isfinite(self.loss):
            return f"the gradient's norm is {self.gradient_norm} (loss {self.loss:.4f})"
        return f"the loss is {self.loss}"


class Skips:
    """Counts skipped updates in a row."""

    def __init__(self, total: int, in_a_row: int = 0):
        """Takes how many updates the run has skipped so far, and how many of its last ones."""
        self._total, self.in_a_row = total, in_a_row

    def after(self, step: int, metrics: Metrics) -> Skipped | None:
        """Returns the step's skipped update, if any. Waits for the step; call in order."""
        before, self._total = self._total, int(metrics.skipped)
        if self._total == before:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        return Skipped(step, float(metrics.loss), float(metrics.gradient_norm), self.in_a_row)
