"""Tasks, and their timeline: start and end of each, exposed communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work on one stream.

    Attributes:
      name: label in a drawn timeline.
      stream: name of the stream: `compute`, a link, a copy engine.
      seconds: time alone at full speed. A task of zero seconds is a join.
      after: indices of the tasks that it waits for, smaller than its own.
      priority: higher goes first, if the stream's policy is `priority`.
      compute_share: share of compute's speed that communication takes while it runs.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    priority: int = 0
    compute_share: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Start and end of each task, in seconds from the beginning.

    Attributes:
      tasks: the simulated tasks.
      start_s, end_s: start and end of each task.
    """

    tasks: Sequence[Task]
    start_s: Sequence[float]
    end_s: Sequence[float]

    @cached_property
    def seconds(self) -> float:
        """End of the last task."""
        return max(self.end_s, default=0.0)

    def lanes(self) -> dict[str, list[int]]:
        """Returns the tasks of each stream in order of start: the rows of a Gantt chart."""
        lanes: dict[str, list[int]] = {}
        for task_id in sorted(range(len(self.tasks)), key=lambda p: (self.start_s[p], p)):
            lanes.setdefault(self.tasks[task_id].stream, []).append(task_id)
        return lanes

    def busy(self, stream: str) -> float:
        """Returns the seconds in which a stream runs a task, slowed or not."""
        total, reached = 0.0, 0.0
        for task_id in self.lanes().get(stream, []):
            total += max(0.0, self.end_s[task_id] - max(reached, self.start_s[task_id]))
            reached = max(reached, self.end_s[task_id])
        return total

    def exposed(self, by: Literal["stream", "name"] = "stream") -> dict[str, float]:
        """Returns the exposed seconds of each stream: time without compute, split equally.

        Where communication slows compute, the time lost is split by the shares it takes. So the
        seconds of all compute tasks plus the exposed ones are the seconds of the schedule.
        """
        blame: dict[str, float] = {}
        running: dict[int, None] = {}
        before = 0.0
        for now, ends, starts in self._changes():
            if now > before:
                self._blame(running, now - before, blame, by)
            before = now
            for task_id in ends:
                running.pop(task_id, None)
            running.update(dict.fromkeys(starts))
        return blame

    def _changes(self) -> list[tuple[float, list[int], list[int]]]:
        """Returns the instants at which tasks of more than zero seconds end or start."""
        moments = []
        for task_id, (start, end) in enumerate(zip(self.start_s, self.end_s, strict=True)):
            if end > start:
                moments += [(start, True, task_id), (end, False, task_id)]
        changes = []
        for now, group in groupby(sorted(moments), key=lambda moment: moment[0]):
            here = list(group)
            ends = [task_id for _, starts, task_id in here if not starts]
            changes.append((now, ends, [task_id for _, starts, task_id in here if starts]))
        return changes

    def _blame(
        self, running: dict[int, None], seconds: float, blame: dict[str, float], by: str
    ) -> None:
        tasks = self.tasks
        others = [tasks[task_id] for task_id in running if tasks[task_id].stream != COMPUTE]
        if len(others) == len(running):  # no compute runs
            shares = [1 / len(others)] * len(others)
        else:
            occupied = sum(task.compute_share for task in others)
            shares = [task.compute_share / max(1.0, occupied) for task in others]
        for task, share in zip(others, shares, strict=True):
            if share:
                key = task.stream if by == "stream" else task.name
                blame[key] = blame.get(key, 0.0) + share * seconds
