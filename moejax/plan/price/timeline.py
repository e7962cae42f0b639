"""Tasks, and their timeline: start and end of each, exposed communication."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """Start and end of each task, in seconds from the beginning."""

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

    def exposed(self) -> dict[str, float]:
        """Returns the exposed seconds by name of the task: time without compute, split equally.

        Where communication slows compute, the time lost is split by the shares it takes. So the
        seconds of all compute tasks plus the exposed ones are the seconds of the schedule.
        """
        moments = []  # (when, whether the task starts, task); ends come first
        for task_id, (start, end) in enumerate(zip(self.start_s, self.end_s, strict=True)):
            if end > start:
                moments += [(start, True, task_id), (end, False, task_id)]
        blame: dict[str, float] = {}
        running: dict[int, None] = {}
        before = 0.0
        for now, starts, task_id in sorted(moments):
            if now > before:
                for name, share in self._waited_for(running):
                    blame[name] = blame.get(name, 0.0) + share * (now - before)
            before = now
            if starts:
                running[task_id] = None
            else:
                del running[task_id]
        return blame

    def _waited_for(self, running: Iterable[int]) -> list[tuple[str, float]]:
        """Returns (name, share of the time) of running communication that compute waits for."""
        tasks = [self.tasks[task_id] for task_id in running]
        others = [task for task in tasks if task.stream != COMPUTE]
        if len(others) == len(tasks):  # no compute runs
            return [(task.name, 1 / len(others)) for task in others]
        occupied = max(1.0, sum(task.compute_share for task in others))
        return [(t.name, t.compute_share / occupied) for t in others if t.compute_share]
