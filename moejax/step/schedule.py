"""Schedules of pipeline stages, as data: which tick does what, and where its inputs are kept.

All stages do the same at a tick, each with a micro-batch of its own or with none: one program for
all devices. Stage s is s ticks behind the first on the way forward and ahead of it on the way back.

    forward(s, k)  at tick  s + k
    answer(k)      at tick  P + k                       the loss of what the last stage left
    backward(s, k) at tick  begins + (P - 1 - s) + k

With `begins` = P, backward starts as soon as the first answer is there: 1F1B with an eager warm-up,
whose transfers have a tick of other work to hide behind; a stage keeps at most 2 P micro-batches.
With `begins` = M + P all forward passes come first: GPipe, which keeps M.

Combined 1F1B has the ticks of 1F1B, and in one that has both a layer forward and a layer backward
take turns, so that exchanges of one hide behind products of the other. Both end together, and so a
tick ends with the transfers, and beside them the answer: one tick earlier, P - 1 + k.
Source of the idea: DualPipe (DeepSeek-AI 2024), which has two micro-batches of its own for it.

In all a stage is idle for P - 1 of M + P - 1 ticks of each kind.

Letters: P stages, M micro-batches, s a stage, k a micro-batch.
"""

from itertools import pairwise
from typing import NamedTuple


class Phase(NamedTuple):
    """Ticks start <= t < stop, which all do the same."""

    start: int
    stop: int
    forward: bool
    answer: bool
    backward: bool


class Schedule(NamedTuple):
    """A schedule for some stages and micro-batches.

    Attributes:
      begins: the first tick of backward, on the last stage.
      kept: slots for what a stage keeps of micro-batches; that of forward(s, k) is (s + k) % kept.
      answers: slots for gradients of what the last stage left; that of answer(k) is k % answers.
      combined: whether layers forward and backward take turns in a tick, which the answer ends.
    """

    stages: int
    micro_batches: int
    begins: int
    kept: int
    answers: int
    combined: bool = False

    @property
    def answered(self) -> int:
        """The tick of the first answer."""
        return self.stages - self.combined

    @property
    def phases(self) -> list[Phase]:
        """The ticks in order, cut where something begins or ends."""
        P, M = self.stages, self.micro_batches
        spans = {
            "forward": range(M + P - 1),
            "answer": range(self.answered, self.answered + M),
            "backward": range(self.begins, self.begins + M + P - 1),
        }
        cuts = sorted({edge for span in spans.values() for edge in (span.start, span.stop)})
        return [
            Phase(start, stop, *(start in span for span in spans.values()))
            for start, stop in pairwise(cuts)
        ]


def schedule_of(name: str, stages: int, micro_batches: int) -> Schedule:
    """Returns a schedule by the name that `mesh.schedule` has for it."""
    if name == "gpipe":
        begins = micro_batches + stages
        return Schedule(stages, micro_batches, begins, micro_batches, micro_batches)
    assert name in ("1f1b", "combined_1f1b"), name
    kept, combined = min(2 * stages, micro_batches), name == "combined_1f1b"
    return Schedule(stages, micro_batches, stages, kept, 1, combined)
