"""Tasks, and what became of them: who ran when, what decided the end, what was not hidden."""

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
      name: what a reader sees in a timeline.
      stream: `compute`, a link, a copy engine; any name.
      seconds: alone, at full speed. A task of none is a join.
      after: tasks that must be done first, by their place; smaller than its own.
      priority: where the stream's policy is `priority`, higher goes first.
      occupies: of communication, the share of compute's speed that it takes while it runs.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    priority: int = 0
    compute_share: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """When each task ran, in seconds from the start.

    Attributes:
      tasks: as they were given.
      start_s, end_s: of each task.
      cause: of each task, the one whose end let it start; -1 if it started at once.
    """

    tasks: Sequence[Task]
    start_s: Sequence[float]
    end_s: Sequence[float]
    cause: Sequence[int]

    @cached_property
    def seconds(self) -> float:
        """When the last task ends."""
        return max(self.end_s, default=0.0)

    def lanes(self) -> dict[str, list[int]]:
        """The tasks of each stream in the order of their starts: the rows of a Gantt chart."""
        lanes: dict[str, list[int]] = {}
        for place in sorted(range(len(self.tasks)), key=lambda p: (self.start_s[p], p)):
            lanes.setdefault(self.tasks[place].stream, []).append(place)
        return lanes

    def busy(self, stream: str) -> float:
        """Seconds in which the stream runs something; of compute, slowed or not."""
        total, reached = 0.0, 0.0
        for place in self.lanes().get(stream, []):
            total += max(0.0, self.end_s[place] - max(reached, self.start_s[place]))
            reached = max(reached, self.end_s[place])
        return total

    def critical(self) -> list[int]:
        """The chain of tasks that decides the end, without a gap from 0 to `seconds`."""
        if not self.tasks:
            return []
        chain = [max(range(len(self.tasks)), key=lambda place: self.end_s[place])]
        while (earlier := self.cause[chain[-1]]) >= 0:
            chain.append(earlier)
        return chain[::-1]

    def exposed(self, by: Literal["stream", "name"] = "stream") -> dict[str, float]:
        """How long nothing computed, blamed in equal parts on what ran at the time.

        Where communication slows compute, what compute loses is blamed on it by its share. So the
        seconds of all compute tasks and the exposed ones are together the seconds of the schedule.
        """
        blame: dict[str, float] = {}
        running: dict[int, None] = {}
        before = 0.0
        for now, ends, starts in self._changes():
            if now > before:
                self._blame(running, now - before, blame, by)
            before = now
            for place in ends:
                running.pop(place, None)
            running.update(dict.fromkeys(starts))
        return blame

    def _changes(self) -> list[tuple[float, list[int], list[int]]]:
        """The instants at which tasks that take time end or start."""
        moments = []
        for place, (start, end) in enumerate(zip(self.start_s, self.end_s, strict=True)):
            if end > start:
                moments += [(start, True, place), (end, False, place)]
        changes = []
        for now, group in groupby(sorted(moments), key=lambda moment: moment[0]):
            here = list(group)
            ends = [place for _, starts, place in here if not starts]
            changes.append((now, ends, [place for _, starts, place in here if starts]))
        return changes

    def _blame(
        self, running: dict[int, None], seconds: float, blame: dict[str, float], by: str
    ) -> None:
        tasks = self.tasks
        others = [tasks[place] for place in running if tasks[place].stream != COMPUTE]
        if len(others) == len(running):  # nothing computes
            shares = [1 / len(others)] * len(others)
        else:
            occupied = sum(task.compute_share for task in others)
            shares = [task.compute_share / max(1.0, occupied) for task in others]
        for task, share in zip(others, shares, strict=True):
            if share:
                key = task.stream if by == "stream" else task.name
                blame[key] = blame.get(key, 0.0) + share * seconds
