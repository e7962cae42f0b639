"""Updates that were not applied because they were not finite: how many in a row, and why."""

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
        """What was not finite. The gradient can overflow where the loss does not."""
        if math.isfinite(self.loss):
            return f"the gradient's norm is {self.gradient_norm} (loss {self.loss:.4f})"
        return f"the loss is {self.loss}"


class Skips:
    """Counts skipped updates in a row."""

    def __init__(self, total: int):
        """Takes how many the run has skipped so far."""
        self._total, self.in_a_row = total, 0

    def after(self, step: int, metrics: Metrics) -> Skipped | None:
        """What the step skipped, if it did. Waits for the step; steps are given in their order."""
        before, self._total = self._total, int(metrics.skipped)
        if self._total == before:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        return Skipped(step, float(metrics.loss), float(metrics.gradient_norm), self.in_a_row)
