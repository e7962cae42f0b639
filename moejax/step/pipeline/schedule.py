"""Schedules of pipeline stages, as data: which tick does what, and where its inputs are kept.

All stages do the same at a tick, each with a micro-batch of its own or with none: one program for
all devices. With `model.stage_chunks` = V each stage has V chunks of the layers, the first of every
stage before the second of any, and a micro-batch visits each stage V times: interleaved stages.
The visits of a stage are numbered: P micro-batches pass through one chunk, the same P through the
next, and after the last chunk the next P begin. Stage s is s ticks behind the first on the way
forward and ahead of it on the way back, where chunks are visited in the opposite order.

    forward(s, n)   at tick  s + n
    answer          of visit n of the last chunk, one tick after the last stage made it
    backward(s, n)  at tick  begins + (P - 1 - s) + n

So what the last stage leaves arrives at the first in time for its next chunk. In every V-th P ticks
micro-batches enter the first stage, answers the last, and gradients leave the first.

With `mesh.stage_slices` = N a visit is one of N slices of a micro-batch's positions, which follow
one another, on the way back from the last to the first: each slice attends to those before it.
Then V is 1. Chunks and slices are the kinds of visits that a micro-batch makes.

Backward begins as soon as the first answer that it needs is there, at tick V P + N - 1: 1F1B with
an eager warm-up, whose transfers have a tick of other work to hide behind; a stage keeps at most
2 P micro-batches of one kind.

Combined 1F1B has the ticks of 1F1B, and in one that has both a layer forward and a layer backward
take turns, so that exchanges of one hide behind products of the other. Both end together, and so a
tick ends with the transfers, and beside them the answer: one tick earlier.
Source of the idea: DualPipe (DeepSeek-AI 2024), which has two micro-batches of its own for it. That
of interleaved stages: Narayanan et al. 2021; of slices: TeraPipe (Li et al. 2021).

In all a stage is idle for P - 1 of V N M + P - 1 ticks of each pass.

Letters: P stages, V chunks, N slices, M micro-batches, s a stage, k a micro-batch, n a visit.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """Ticks start <= t < stop, which all do the same.

    Attributes:
      ends: whether micro-batches enter and leave the stages: the first stage begins with new ones
        and has done with others, and the last begins with answers.
    """

    start: int
    stop: int
    forward: bool
    answer: bool
    backward: bool
    ends: bool


class Turn(NamedTuple):
    """Phases in order, `times` times, each time `length` ticks later."""

    times: int
    length: int
    phases: tuple[Phase, ...]


class Schedule(NamedTuple):
    """A schedule for some stages and micro-batches.

    Attributes:
      groups: of each kind of visits, how many times `together` micro-batches a stage keeps.
      combined: whether layers forward and backward take turns in a tick, which the answer ends.
      chunks: of layers on each stage.
      slices: of positions.
    """

    stages: int
    micro_batches: int
    groups: tuple[int, ...]
    combined: bool = False
    chunks: int = 1
    slices: int = 1

    @property
    def together(self) -> int:
        """Micro-batches that make visits of one kind in turn, before those of the next."""
        return self.stages if self.slices == 1 else 1

    @property
    def visits(self) -> int:
        """Visits of each stage on the way forward, and on the way back."""
        return len(self.groups) * self.micro_batches

    @property
    def kept(self) -> int:
        """Slots for what a stage keeps of micro-batches, each of one kind of visits."""
        return sum(self.groups) * self.together

    @property
    def answers(self) -> int:
        """Slots for gradients of what the last stage left."""
        return 2 * self.slices - 1

    @property
    def begins(self) -> int:
        """The first tick of backward, on the last stage."""
        return self.chunks * self.stages + self.slices - 1

    @property
    def answered(self) -> int:
        """The tick of the first answer."""
        return self.chunks * self.stages - self.combined

    @property
    def end(self) -> int:
        """The tick after the last."""
        return self.begins + self.visits + self.stages - 1

    def micro_batch(self, n: Any) -> Any:
        """Returns the micro-batch of a visit, in their order; below 0 or from M on there is none.

        Args:
          n: a number, or an array of them, as everywhere here.
        """
        return n // (self.together * len(self.groups)) * self.together + n % self.together

    def kind(self, n: Any, *, backward: bool = False) -> Any:
        """Returns the chunk or slice of a visit."""
        kind = n // self.together % len(self.groups)
        return len(self.groups) - 1 - kind if backward else kind

    def slot(self, k: Any, base: Any, groups: Any) -> Any:
        """Returns where a micro-batch is kept.

        Args:
          base, groups: of its kind of visit, from `bases` and `groups`.
        """
        return (base + k // self.together % groups) * self.together + k % self.together

    def answer_slot(self, k: Any, piece: Any) -> Any:
        """Returns where the answer of a micro-batch's slice is."""
        return (k * self.slices + piece) % self.answers

    @property
    def bases(self) -> tuple[int, ...]:
        """How many times `together` slots are before those of each kind."""
        return tuple(sum(self.groups[:kind]) for kind in range(len(self.groups)))

    @property
    def turns(self) -> list[Turn]:
        """The ticks in order. Of interleaved stages the same phases come again and again."""
        turn = self.chunks * self.stages if self.chunks > 1 else self.end
        every = [self._phases(range(t, min(t + turn, self.end))) for t in range(0, self.end, turn)]
        return [Turn(len(list(same)), turn, phases) for phases, same in groupby(every)]

    def _phases(self, ticks: range) -> tuple[Phase, ...]:
        """Returns the phases of some ticks, counted from the first of them."""

        def runs() -> Iterator[Phase]:
            start = 0
            for what, same in groupby(ticks, self._what):
                stop = start + len(list(same))
                yield Phase(start, stop, *what)
                start = stop

        return tuple(runs())

    def _what(self, t: int) -> tuple[bool, bool, bool, bool]:
        """Returns what a tick does, as `Phase` has it."""
        ends = t // self.stages % self.chunks == 0
        return (
            t < self.visits + self.stages - 1,
            ends and 0 <= t - self.answered < self.visits,
            self.begins <= t,
            ends,
        )


def schedule_of(
    name: str, stages: int, micro_batches: int, chunks: int = 1, slices: int = 1
) -> Schedule:
    """Returns a schedule by the name that `mesh.schedule` has for it.

    Args:
      micro_batches: a multiple of the stages.
      chunks: `model.stage_chunks`; only of 1F1B more than one.
      slices: `mesh.stage_slices`; only of 1F1B with one chunk more than one.
    """
    if name not in ("1f1b", "combined_1f1b"):
        raise ValueError(f"no schedule {name}")
    if slices > 1:
        # Slice n of the first stage comes back after so many ticks less one, and N ticks after each
        # micro-batch comes the next.
        ticks = (2 * (stages + slices - 1 - piece) for piece in range(slices))
        groups = tuple(min(-(-t // slices), micro_batches) for t in ticks)
        return Schedule(stages, micro_batches, groups, slices=slices)
    # Chunk c of the first stage comes back 2 (V - c) P ticks later, and after V P ticks again.
    most = micro_batches // stages
    groups = tuple(min(2 if 2 * chunk < chunks else 1, most) for chunk in range(chunks))
    combined = name == "combined_1f1b"
    return Schedule(stages, micro_batches, groups, combined, chunks)
