"""The length of a search: a number of traces, and a time cap for busy machines.

Traces are counted, so that the same question gets the same plan however fast the machine is. Where
the cap ends a search before its traces are spent, the result says so.
"""

import time
from dataclasses import dataclass

# Default traces of a search, of up to MANY devices and of more: on two quiet cores of an Intel Xeon
# 11 take 9.5 s and 28 take 28 s (docs/log.md, 2026-11-25). Steps of CPUs have no kernels to
# trace, so one takes about half the time.
MANY = 64
TRACES = {"cpu": (17, 91), "gpu": (11, 46), "tpu": (11, 46)}
CAP_SECONDS = (120.0, 600.0)


@dataclass
class Budget:
    """The budget of one search, and the part already spent.

    Attributes:
      traces: number of traces after which nothing more is traced.
      seconds: time cap.
      slowest: seconds of the slowest trace.
      cut: whether the time cap ended the search.
      before: the budget of the part of the search before this one; None: this is the first.
    """

    traces: int
    seconds: float
    traced: int = 0
    slowest: float = 0.0
    cut: bool = False
    before: "Budget | None" = None

    def __post_init__(self) -> None:
        self.began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the budget was made."""
        return time.perf_counter() - self.began

    @property
    def spent(self) -> bool:
        """True if another trace is over the budget, or could end after the time cap."""
        if self.traced >= self.traces:
            return True
        self.cut = self.cut or self.elapsed + 2 * self.slowest > self.seconds
        return self.cut

    def count(self, seconds: float) -> None:
        """Notes a trace and its seconds."""
        self.traced += 1
        self.slowest = max(self.slowest, seconds)

    def another(self) -> "Budget":
        """Returns a budget of half as many traces, in the time that is left."""
        left = max(0.0, self.seconds - self.elapsed)
        return Budget(-(-self.traces // 2), left, slowest=self.slowest, before=self)

    def cut_text(self) -> str | None:
        """Returns one line about the time cap; None if it did not end the search."""
        if not self.cut:
            return None
        first, traced, traces = self.before or self, self.traced, self.traces
        if first is not self:
            traced, traces = traced + first.traced, traces + first.traced
        cap = f"{first.seconds:.0f}" if first.seconds >= 1 else f"{first.seconds:g}"
        return (
            f"the time cap of {cap} s ended the search after {traced} of {traces} traces, so "
            "another search may find another plan; raise `plan.seconds` (--seconds)"
        )


def default_budget(
    devices: int, platform: str, traces: int | None = None, seconds: float | None = None
) -> Budget:
    """Returns the budget for a number of devices; `traces` and `seconds` replace its defaults."""
    many = devices > MANY
    return Budget(
        TRACES[platform][many] if traces is None else traces,
        CAP_SECONDS[many] if seconds is None else seconds,
    )
