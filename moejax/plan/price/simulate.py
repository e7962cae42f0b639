"""How long a schedule takes: discrete events over streams of compute, links and copy engines.

A task runs on one stream and becomes ready when the tasks that it waits for are done. What happens
to several ready tasks of one stream is the stream's policy. Two collectives on one link never count
as parallel: they queue, or they share its rate.

    compute    one at a time, in program order: of the ready ones, the one that stands first
    fifo       one at a time, in the order in which they became ready (XLA:CPU, NCCL on one stream)
    priority   one at a time, higher priority first; what runs is never interrupted (Lina)
    shared     all at once, each at 1/n of the speed (two NCCL communicators on one link)

No stream idles while it has a ready task. This is list scheduling, so Graham's anomalies hold:
making one task shorter, or removing a dependency, may make the whole schedule longer. What does
hold: the end is no sooner than the longest chain of tasks and than each stream's load; and where
dependencies fix every stream's order and communication occupies nothing of compute, a longer task
never ends it sooner.

Source: Graham, Bounds on multiprocessing timing anomalies (1969), for what is not guaranteed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from moejax.plan.price.timeline import COMPUTE, Task, Timeline

__all__ = ["COMPUTE", "Policy", "Task", "Timeline", "simulate"]

Policy = Literal["fifo", "priority", "shared"]

# Below this share of its speed, compute stands still: what sums of shares leave by rounding.
STALLED = 1e-12


def simulate(tasks: Sequence[Task], policies: Mapping[str, Policy] | None = None) -> Timeline:
    """Runs the tasks on their streams and says when each started and ended.

    While communication runs that occupies a share of the compute units, compute runs at what is
    left of its speed. Deterministic: ties go to the task that stands first. A task of no seconds
    waits until its stream runs nothing, and then goes before all others. Takes time in the order
    of n log n.

    Args:
      tasks: every one after those that it waits for.
      policies: of streams other than compute; first in, first out where none is given. May name
        streams without tasks.

    Raises:
      ValueError: if a task waits for a later one, or its seconds or share are out of range.
    """
    policies = dict(policies or {})
    if COMPUTE in policies:
        raise ValueError(f"{COMPUTE} runs in program order; give its policy no entry")
    _check(tasks)
    return _Run(tasks, policies).until_done()


def _check(tasks: Sequence[Task]) -> None:
    for place, task in enumerate(tasks):
        if not 0 <= task.seconds < math.inf:
            raise ValueError(f"task {place} ({task.name}): seconds are {task.seconds}, not finite")
        if task.after and not (min(task.after) >= 0 and max(task.after) < place):
            raise ValueError(f"task {place} ({task.name}) waits for {task.after}, not all earlier")
        if task.compute_share and not (0 < task.compute_share <= 1 and task.stream != COMPUTE):
            raise ValueError(
                f"task {place} ({task.name}) on {task.stream} occupies "
                f"{task.compute_share} of compute; communication may occupy from 0 to 1, compute "
                "itself nothing"
            )


@dataclass(slots=True, eq=False)
class _Stream:
    """What waits and runs on a stream.

    Attributes:
      ready: a heap of (key, task); the key says who is next.
      joins: ready tasks that take no time.
      running: the task, where one runs at a time; none is -1.
      last: the task that ended last.
      version: counts changes of the time at which the next task ends; older events are void.
      left, since, speed: compute's seconds of work left at that time, and its speed from there on.
      sharing: a heap of (service at which it ends, task), for a shared stream.
      service: seconds that each task of a shared stream would have been served, had it been there
        from the start.
    """

    number: int
    policy: str
    ready: list[tuple[tuple[float, ...], int]]
    sharing: list[tuple[float, int]]
    joins: list[int]
    running: int = -1
    last: int = -1
    version: int = 0
    left: float = 0.0
    since: float = 0.0
    speed: float = 1.0
    service: float = 0.0


class _Run:
    """One simulation: the state of all streams, moved from event to event."""

    def __init__(self, tasks: Sequence[Task], policies: Mapping[str, str]):
        self.tasks = tasks
        self.start_s = [0.0] * len(tasks)
        self.end_s = [0.0] * len(tasks)
        self.ready_s = [0.0] * len(tasks)
        self.cause = [-1] * len(tasks)
        self.waits_for = [len(task.after) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        streams: dict[str, _Stream] = {}
        self.stream_of: list[_Stream] = []
        for place, task in enumerate(tasks):
            if (stream := streams.get(task.stream)) is None:
                policy = COMPUTE if task.stream == COMPUTE else policies.get(task.stream, "fifo")
                stream = streams[task.stream] = _Stream(len(streams), policy, [], [], [])
            self.stream_of.append(stream)
            for earlier in task.after:
                self.followers[earlier].append(place)
        self.streams = list(streams.values())
        self.compute = streams.get(COMPUTE)
        self.events: list[tuple[float, int, int]] = []  # time, stream, the stream's version
        self.touched: list[_Stream] = []
        self.occupied, self.occupiers, self.occupied_changed = 0.0, 0, False

    def until_done(self) -> Timeline:
        """Goes from event to event until no task is left."""
        for place, count in enumerate(self.waits_for):
            if count == 0:
                self._release(place, 0.0)
        self._settle(0.0)
        events, streams = self.events, self.streams
        while events:
            now = events[0][0]
            while events and events[0][0] == now:
                _, number, version = heappop(events)
                if version == streams[number].version:
                    self._end_next(streams[number], now)
            self._settle(now)
        return Timeline(
            tuple(self.tasks), tuple(self.start_s), tuple(self.end_s), tuple(self.cause)
        )

    def _release(self, place: int, now: float) -> None:
        """All that a task waited for is done."""
        stream, task = self.stream_of[place], self.tasks[place]
        self.ready_s[place] = now
        self.touched.append(stream)
        if task.seconds == 0:
            stream.joins.append(place)
            return
        if stream.policy == COMPUTE:
            key = ()
        elif stream.policy == "priority":
            key = (-task.priority, now)
        else:
            key = (now,)
        heappush(stream.ready, (key, place))

    def _end_next(self, stream: _Stream, now: float) -> None:
        """The task that the stream's event was about ends."""
        if stream.policy != "shared":
            place, stream.running = stream.running, -1
            self._end(stream, place, now)
            return
        stream.service, place = heappop(stream.sharing)
        stream.since = now
        self._end(stream, place, now)
        while stream.sharing and stream.sharing[0][0] <= stream.service:
            self._end(stream, heappop(stream.sharing)[1], now)

    def _end(self, stream: _Stream, place: int, now: float) -> None:
        """Notes the end of a task and releases what waited for nothing else."""
        self.end_s[place] = now
        stream.last = place
        self.touched.append(stream)
        self._occupy(self.tasks[place].compute_share, -1)
        for follower in self.followers[place]:
            self.waits_for[follower] -= 1
            if self.waits_for[follower] == 0:
                self.cause[follower] = place
                self._release(follower, now)

    def _occupy(self, share: float, sign: int) -> None:
        """Communication that takes a share of the compute units starts (1) or ends (-1)."""
        if share:
            self.occupiers += sign
            self.occupied = self.occupied + sign * share if self.occupiers else 0.0
            self.occupied_changed = True

    def _settle(self, now: float) -> None:
        """Starts all that can start now: what takes no time first, for it may release others.

        No other task starts before that is done, so that it does not matter which goes first.
        """
        idle: dict[int, _Stream] = {}
        while self.touched:
            stream = self.touched.pop()
            idle[stream.number] = stream
            while stream.running < 0 and stream.joins:
                place = stream.joins.pop()
                self._note_start(stream, place, now)
                self._end(stream, place, now)
        for stream in idle.values():
            if stream.policy == "shared":
                self._share(stream, now)
            elif stream.running < 0 and stream.ready:
                self._start(stream, now)
        if self.occupied_changed:
            self.occupied_changed = False
            if self.compute is not None:
                self._change_speed(self.compute, now)

    def _note_start(self, stream: _Stream, place: int, now: float) -> None:
        self.start_s[place] = now
        if self.ready_s[place] < now:
            self.cause[place] = stream.last
        self._occupy(self.tasks[place].compute_share, 1)

    def _start(self, stream: _Stream, now: float) -> None:
        """Starts the next task of a stream that runs one at a time."""
        place = stream.running = heappop(stream.ready)[1]
        self._note_start(stream, place, now)
        seconds = self.tasks[place].seconds
        stream.version += 1
        if stream.policy == COMPUTE:
            stream.left, stream.since = seconds, now
            if stream.speed <= STALLED:
                return
            seconds /= stream.speed
        heappush(self.events, (now + seconds, stream.number, stream.version))

    def _change_speed(self, compute: _Stream, now: float) -> None:
        """Gives compute the speed that the running communication leaves, from now on."""
        compute.left = max(0.0, compute.left - (now - compute.since) * compute.speed)
        compute.since = now
        compute.speed = max(0.0, 1.0 - self.occupied)
        if compute.running >= 0:
            compute.version += 1
            if compute.speed > STALLED:
                end = now + compute.left / compute.speed
                heappush(self.events, (end, compute.number, compute.version))

    def _share(self, stream: _Stream, now: float) -> None:
        """Lets all ready tasks of a shared stream run, and says when the first will end."""
        sharing = stream.sharing
        if sharing:
            stream.service += (now - stream.since) / len(sharing)
        else:
            stream.service = 0.0
        stream.since = now
        while stream.ready:
            place = heappop(stream.ready)[1]
            self._note_start(stream, place, now)
            heappush(sharing, (stream.service + self.tasks[place].seconds, place))
        stream.version += 1
        if sharing:
            left = max(0.0, sharing[0][0] - stream.service) * len(sharing)
            heappush(self.events, (now + left, stream.number, stream.version))
