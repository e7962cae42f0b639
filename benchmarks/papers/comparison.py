"""A number that a paper printed, beside what the simulator makes of the paper's other numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """One number of a paper.

    Attributes:
      what: which number.
      unit: ms, or x for a ratio.
      paper: as printed, or a ratio of two printed numbers.
      found: by the simulator.
      bar: relative error up to which the prediction holds; None if the model was fitted to it.
      misses: why the error is above the bar; empty if it is not.
    """

    what: str
    unit: str
    paper: float
    found: float
    bar: float | None
    misses: str = ""

    @property
    def error(self) -> float:
        """Relative to the paper's number."""
        return self.found / self.paper - 1

    @property
    def holds(self) -> bool:
        """Whether the prediction is inside its bar."""
        return self.bar is None or abs(self.error) <= self.bar
