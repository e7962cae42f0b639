"""Simulates a schedule: discrete events over streams of compute, links and copy engines.

A task runs on one stream and becomes ready when the tasks that it waits for are done. The stream's
policy decides among several ready tasks. Two collectives on one link never run in parallel at full
speed: they queue, or they share its rate.

    compute    one at a time: the first ready task in program order
    fifo       one at a time, in the order in which they became ready (XLA:CPU, NCCL on one stream)
    priority   one at a time, higher priority first; a running task is never interrupted (Lina)
    shared     all at once, each at 1/n of the speed (two NCCL communicators on one link)

No stream idles while it has a ready task. This is list scheduling, so Graham's anomalies apply:
a shorter task, or one dependency less, may make the whole schedule longer. Two bounds hold always:
the schedule takes at least its longest chain of tasks, and at least each stream's load. Where
dependencies fix the order on every stream and communication slows no compute, a longer task never
makes the schedule shorter.

Source: Graham, Bounds on multiprocessing timing anomalies (1969), for the anomalies.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal

COMPUTE = "compute"
Policy = Literal["fifo", "priority", "shared"]

# Compute below this share of its speed counts as stopped: sums of shares leave rounding errors.
STALLED = 1e-12


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


def simulate(tasks: Sequence[Task], policies: Mapping[str, Policy] | None = None) -> Timeline:
    """Returns when each task starts and ends.

    Communication that occupies a share of the compute units slows compute by that share.
    Deterministic: ties go to the first task. A task of zero seconds waits until its stream is
    idle, and then goes before all others. Takes O(n log n) time.

    Args:
      tasks: tasks in an order in which each follows the tasks that it waits for.
      policies: policy of each stream but compute; `fifo` if missing. May name streams without
        tasks.

    Raises:
      ValueError: if a task waits for a later one, or its seconds or share are out of range.
    """
    policies = dict(policies or {})
    if COMPUTE in policies:
        raise ValueError(f"{COMPUTE} runs in program order; give its policy no entry")
    _check(tasks)
    return _Run(tasks, policies).until_done()


def _check(tasks: Sequence[Task]) -> None:
    for index, task in enumerate(tasks):
        if not 0 <= task.seconds < math.inf:
            raise ValueError(f"task {index} ({task.name}): seconds are {task.seconds}, not finite")
        if task.after and not (min(task.after) >= 0 and max(task.after) < index):
            raise ValueError(f"task {index} ({task.name}) waits for {task.after}, not all earlier")
        if task.compute_share and not (0 < task.compute_share <= 1 and task.stream != COMPUTE):
            raise ValueError(
                f"task {index} ({task.name}) on {task.stream} occupies "
                f"{task.compute_share} of compute; communication may occupy from 0 to 1, compute "
                "itself nothing"
            )


@dataclass(slots=True, eq=False)
class _Stream:
    """The waiting and running tasks of a stream.

    Attributes:
      ready: a heap of (key, task); the smallest key is next.
      joins: ready tasks that take no time.
      running: the running task of a stream that runs one at a time; -1: none.
      version: number of changes to the next end; events of older versions are ignored.
      left, since, speed: for compute: seconds of work left at time `since`, and the speed from
        then on.
      sharing: a heap of (service at which it ends, task), for a shared stream.
      service: seconds of full-speed service that a task of a shared stream would have received
        since time 0.
    """

    number: int
    policy: str
    ready: list[tuple[tuple[float, ...], int]]
    sharing: list[tuple[float, int]]
    joins: list[int]
    running: int = -1
    version: int = 0
    left: float = 0.0
    since: float = 0.0
    speed: float = 1.0
    service: float = 0.0


class _Run:
    """One simulation: the state of all streams, advanced from event to event."""

    def __init__(self, tasks: Sequence[Task], policies: Mapping[str, str]):
        self.tasks = tasks
        self.start_s = [0.0] * len(tasks)
        self.end_s = [0.0] * len(tasks)
        self.waits_for = [len(task.after) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        streams: dict[str, _Stream] = {}
        self.stream_of: list[_Stream] = []
        for task_id, task in enumerate(tasks):
            if (stream := streams.get(task.stream)) is None:
                policy = COMPUTE if task.stream == COMPUTE else policies.get(task.stream, "fifo")
                stream = streams[task.stream] = _Stream(len(streams), policy, [], [], [])
            self.stream_of.append(stream)
            for earlier in task.after:
                self.followers[earlier].append(task_id)
        self.streams = list(streams.values())
        self.compute = streams.get(COMPUTE)
        self.events: list[tuple[float, int, int]] = []  # time, stream, the stream's version
        self.touched: list[_Stream] = []
        self.occupied, self.occupiers, self.occupied_changed = 0.0, 0, False

    def until_done(self) -> Timeline:
        """Advances from event to event until no task is left."""
        for task_id, count in enumerate(self.waits_for):
            if count == 0:
                self._release(task_id, 0.0)
        self._settle(0.0)
        events, streams = self.events, self.streams
        while events:
            now = events[0][0]
            while events and events[0][0] == now:
                _, number, version = heappop(events)
                if version == streams[number].version:
                    self._end_next(streams[number], now)
            self._settle(now)
        return Timeline(tuple(self.tasks), tuple(self.start_s), tuple(self.end_s))

    def _release(self, task_id: int, now: float) -> None:
        """Makes a task ready, because all that it waited for is done."""
        stream, task = self.stream_of[task_id], self.tasks[task_id]
        self.touched.append(stream)
        if task.seconds == 0:
            stream.joins.append(task_id)
            return
        first = -task.priority if stream.policy == "priority" else 0
        key = () if stream.policy == COMPUTE else (first, now)
        heappush(stream.ready, (key, task_id))

    def _end_next(self, stream: _Stream, now: float) -> None:
        """Ends the task whose event is due on a stream."""
        if stream.policy != "shared":
            task_id, stream.running = stream.running, -1
            self._end(stream, task_id, now)
            return
        stream.service, task_id = heappop(stream.sharing)
        stream.since = now
        self._end(stream, task_id, now)
        while stream.sharing and stream.sharing[0][0] <= stream.service:
            self._end(stream, heappop(stream.sharing)[1], now)

    def _end(self, stream: _Stream, task_id: int, now: float) -> None:
        """Records the end of a task and releases the tasks that waited for it alone."""
        self.end_s[task_id] = now
        self.touched.append(stream)
        self._occupy(self.tasks[task_id].compute_share, -1)
        for follower in self.followers[task_id]:
            self.waits_for[follower] -= 1
            if self.waits_for[follower] == 0:
                self._release(follower, now)

    def _occupy(self, share: float, sign: int) -> None:
        """Starts (1) or ends (-1) communication that takes a share of the compute units."""
        if share:
            self.occupiers += sign
            self.occupied = self.occupied + sign * share if self.occupiers else 0.0
            self.occupied_changed = True

    def _settle(self, now: float) -> None:
        """Starts all tasks that can start now, first those of zero seconds: they may release more.

        No other task starts before they are done, so the result does not depend on their order.
        """
        idle: dict[int, _Stream] = {}
        while self.touched:
            stream = self.touched.pop()
            idle[stream.number] = stream
            while stream.running < 0 and stream.joins:
                task_id = stream.joins.pop()
                self._note_start(task_id, now)
                self._end(stream, task_id, now)
        for stream in idle.values():
            if stream.policy == "shared":
                self._share(stream, now)
            elif stream.running < 0 and stream.ready:
                self._start(stream, now)
        if self.occupied_changed:
            self.occupied_changed = False
            if self.compute is not None:
                self._change_speed(self.compute, now)

    def _note_start(self, task_id: int, now: float) -> None:
        self.start_s[task_id] = now
        self._occupy(self.tasks[task_id].compute_share, 1)

    def _start(self, stream: _Stream, now: float) -> None:
        task_id = stream.running = heappop(stream.ready)[1]
        self._note_start(task_id, now)
        seconds = self.tasks[task_id].seconds
        stream.version += 1
        if stream.policy == COMPUTE:
            stream.left, stream.since = seconds, now
            if stream.speed <= STALLED:
                return
            seconds /= stream.speed
        heappush(self.events, (now + seconds, stream.number, stream.version))

    def _change_speed(self, compute: _Stream, now: float) -> None:
        """Sets the speed that running communication leaves to compute from `now` on."""
        compute.left = max(0.0, compute.left - (now - compute.since) * compute.speed)
        compute.since = now
        compute.speed = max(0.0, 1.0 - self.occupied)
        if compute.running >= 0:
            compute.version += 1
            if compute.speed > STALLED:
                end = now + compute.left / compute.speed
                heappush(self.events, (end, compute.number, compute.version))

    def _share(self, stream: _Stream, now: float) -> None:
        """Starts all ready tasks of a shared stream and schedules the end of the first."""
        sharing = stream.sharing
        if sharing:
            stream.service += (now - stream.since) / len(sharing)
        else:
            stream.service = 0.0
        stream.since = now
        while stream.ready:
            task_id = heappop(stream.ready)[1]
            self._note_start(task_id, now)
            heappush(sharing, (stream.service + self.tasks[task_id].seconds, task_id))
        stream.version += 1
        if sharing:
            left = max(0.0, sharing[0][0] - stream.service) * len(sharing)
            heappush(self.events, (now + left, stream.number, stream.version))
