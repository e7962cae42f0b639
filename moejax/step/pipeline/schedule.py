"""Schedules of pipeline stages, as data: the work of each tick, and slots of saved activations.

Terms are those of `step.pipeline`. All stages run one program, so the phases of a schedule are the
same on each of them, and only the micro-batch differs. 1F1B for P = 2 and M = 4, with F and B for
the two passes of a micro-batch and L for its loss step:

    tick      0    1    2    3    4    5    6
    stage 0   F0   F1   F2   F3B0 B1   B2   B3
    stage 1        F0   F1B0 F2B1 F3B2 B3
    loss                L0   L1   L2   L3

Ticks 0 and 1 are the warm-up (forward alone), 2 to 4 are steady (both), 5 and 6 the cool-down
(backward alone). Each stage is idle for P - 1 of the M + P - 1 ticks of each pass: the bubble.

With `model.stage_chunks` = V virtual stage 0 of every stage comes before virtual stage 1 of any:
interleaved 1F1B. With `mesh.stage_slices` = N each slice attends to the slices before it; then V is
1. The bubble is P - 1 of V N M + P - 1 ticks of each pass.

The tasks of a stage are numbered in the order in which they run. P micro-batches, a group, pass
through one virtual stage, then through the next, and after the last one the next group begins. With
slices a group is one micro-batch. Backward takes a micro-batch's sections in the opposite order.

    forward   of task n on stage s            at tick  s + n
    loss      of a task in the last virtual stage, one tick after the last stage ran it forward
    backward  of task n on stage s            at tick  first_backward + (P - 1 - s) + n

So the last stage's output arrives at the first stage in time for its next virtual stage. In every
V-th P ticks the first stage takes new micro-batches, loss steps run, and input gradients leave the
first stage.

Backward begins at tick `first_backward` = V P + N - 1, as soon as the first loss step that it needs
is done: 1F1B with an eager warm-up, so that each transfer has a tick of other work to hide behind.
A stage saves activations of at most 2 P micro-batches for one section.

Combined 1F1B has the ticks of 1F1B. In a steady tick it alternates a layer forward and a layer
backward, so that exchanges of one hide behind products of the other. Both end together, so all
transfers are at the tick's end, and the loss step runs beside them, one tick earlier.

Sources: 1F1B, Narayanan et al. 2019; interleaved stages, Narayanan et al. 2021; slices, TeraPipe
(Li et al. 2021); combined 1F1B, DualPipe (DeepSeek-AI 2024), which alternates two micro-batches
that enter at opposite ends.

Letters: P stages, V virtual stages on each, N slices, M micro-batches; s a stage, k a micro-batch,
n a task.
"""

from itertools import groupby
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """Ticks start <= t < stop, which all do the same.

    Attributes:
      forward, loss, backward: whether a tick has forward tasks, a loss step, backward tasks.
      boundary: whether micro-batches cross the ends of the pipeline: the first stage takes new
        ones, the last one takes output gradients of the loss, and input gradients leave the first.
        Always true with one virtual stage.
    """

    start: int
    stop: int
    forward: bool
    loss: bool
    backward: bool
    boundary: bool


class Cycle(NamedTuple):
    """Phases in order, `times` times, each time `length` ticks later."""

    times: int
    length: int
    phases: tuple[Phase, ...]


class PipelineSchedule(NamedTuple):
    """A schedule for some stages and micro-batches.

    Attributes:
      saved_groups: for each section, the number of groups that a stage has slots for.
      combined: whether layers forward and backward alternate in a tick, which the loss step ends.
      virtual_stages: on each stage.
      slices: of a micro-batch's positions.
    """

    stages: int
    micro_batches: int
    saved_groups: tuple[int, ...]
    combined: bool = False
    virtual_stages: int = 1
    slices: int = 1

    @property
    def sections(self) -> int:
        """Tasks of one micro-batch on each stage, in each pass: V N."""
        return self.virtual_stages * self.slices

    @property
    def group_size(self) -> int:
        """Micro-batches of a group. All run a section before any of them runs the next."""
        return self.stages if self.slices == 1 else 1

    @property
    def tasks(self) -> int:
        """Tasks of each stage in each pass: V N M."""
        return self.sections * self.micro_batches

    @property
    def slots(self) -> int:
        """Slots of a stage, each for the saved activations of one task."""
        return sum(self.saved_groups) * self.group_size

    @property
    def loss_slots(self) -> int:
        """Slots for output gradients that loss steps made."""
        return 2 * self.slices - 1

    @property
    def first_backward(self) -> int:
        """The first tick of backward, on the last stage."""
        return self.virtual_stages * self.stages + self.slices - 1

    @property
    def first_loss(self) -> int:
        """The tick of the first loss step."""
        return self.virtual_stages * self.stages - self.combined

    @property
    def end(self) -> int:
        """The tick after the last."""
        return self.first_backward + self.tasks + self.stages - 1

    def micro_batch(self, n: Any) -> Any:
        """Returns the micro-batch of task n; below 0 or from M on the stage is in the bubble.

        Args:
          n: a number, or an array of them, as everywhere here.
        """
        return n // (self.group_size * self.sections) * self.group_size + n % self.group_size

    def section(self, n: Any, *, backward: bool = False) -> Any:
        """Returns the section of task n: the number of its virtual stage, or of its slice."""
        section = n // self.group_size % self.sections
        return self.sections - 1 - section if backward else section

    def slot(self, k: Any, first_group: Any, groups: Any) -> Any:
        """Returns the slot for saved activations of one section of micro-batch k.

        Args:
          first_group, groups: of the section, from `first_groups` and `saved_groups`.
        """
        group = first_group + k // self.group_size % groups
        return group * self.group_size + k % self.group_size

    def loss_slot(self, k: Any, slice_index: Any) -> Any:
        """Returns the slot for the output gradient of a slice of micro-batch k."""
        return (k * self.slices + slice_index) % self.loss_slots

    @property
    def first_groups(self) -> tuple[int, ...]:
        """For each section, the number of groups whose slots come before its own."""
        return tuple(sum(self.saved_groups[:section]) for section in range(self.sections))

    @property
    def cycles(self) -> list[Cycle]:
        """The ticks in order. With several virtual stages the same phases recur every V P ticks."""
        length = self.virtual_stages * self.stages if self.virtual_stages > 1 else self.end
        starts = range(0, self.end, length)
        every = [self._phases(range(t, min(t + length, self.end))) for t in starts]
        return [Cycle(len(list(same)), length, phases) for phases, same in groupby(every)]

    def _phases(self, ticks: range) -> tuple[Phase, ...]:
        """Returns the phases of some ticks, counted from the first of them."""
        phases: list[Phase] = []
        for work, same in groupby(ticks, self._work):
            start = phases[-1].stop if phases else 0
            phases.append(Phase(start, start + len(list(same)), *work))
        return tuple(phases)

    def _work(self, t: int) -> tuple[bool, bool, bool, bool]:
        """Returns (forward, loss, backward, boundary) of a tick, as `Phase` has them."""
        boundary = t // self.stages % self.virtual_stages == 0
        return (
            t < self.tasks + self.stages - 1,
            boundary and 0 <= t - self.first_loss < self.tasks,
            self.first_backward <= t,
            boundary,
        )


def build_schedule(
    name: str, stages: int, micro_batches: int, virtual_stages: int = 1, slices: int = 1
) -> PipelineSchedule:
    """Returns a schedule by the name that `mesh.schedule` has for it.

    Args:
      micro_batches: a multiple of the stages.
      virtual_stages: `model.stage_chunks`; above one for 1F1B alone.
      slices: `mesh.stage_slices`; above one for 1F1B alone, with one virtual stage.
    """
    if slices > 1:
        # On the first stage backward of slice n follows its forward after so many ticks less one,
        # and the next micro-batch begins N ticks after each.
        ticks = (2 * (stages + slices - 1 - slice_index) for slice_index in range(slices))
        groups = tuple(min(-(-t // slices), micro_batches) for t in ticks)
        return PipelineSchedule(stages, micro_batches, groups, slices=slices)
    # On the first stage backward of virtual stage v follows its forward after 2 (V - v) P ticks,
    # and the next group begins V P ticks after each.
    most = micro_batches // stages
    groups = tuple(min(2 if 2 * v < virtual_stages else 1, most) for v in range(virtual_stages))
    combined = name == "combined_1f1b"
    return PipelineSchedule(stages, micro_batches, groups, combined, virtual_stages)
