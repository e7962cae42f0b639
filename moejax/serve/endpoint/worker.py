"""The thread that owns the batch, and what the event loop hands it and gets back.

Only this thread calls JAX. The event loop hands it requests and cancellations, and gets events.
In a program of several processes, process 0 tells the others before each step what was handed in,
so that all make the same calls (`follow`). Where nothing runs, all wait without a call.
Before the first request every program runs once (`warm_up`).
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from moejax.errors import InputError
from moejax.runtime.processes import Processes
from moejax.serve.batch import Batch, Event, Request
from moejax.serve.endpoint.fields import RefusedError
from moejax.serve.endpoint.metrics import Metrics
from moejax.serve.experts.places import Places
from moejax.serve.programs import LONG, SHORT, Programs
from moejax.serve.sampling import GREEDY, Sampling

Command = tuple[str, int, Request | None]  # what is asked, of which text
SUBMIT, CANCEL, STOP = "submit", "cancel", "stop"
RULES = (GREEDY, Sampling(1.0), Sampling(1.0, top_p=0.5))  # one for each kind of draw


class NumberedBatch:
    """The batch of a process, in which texts have numbers of the server's own."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self._keys: dict[int, int] = {}  # of texts under way, by number
        self._numbers: dict[int, int] = {}

    @property
    def idle(self) -> bool:
        """Whether no text is under way."""
        return not self.batch.running and not self.batch.waiting

    def apply(self, commands: Sequence[Command]) -> list[tuple[int, str]]:
        """Submits and cancels. Returns texts that were not taken up, and why."""
        refused = []
        for what, number, request in commands:
            if what == SUBMIT and request is not None:
                try:
                    key = self.batch.submit(request)
                except InputError as error:
                    refused.append((number, str(error)))
                else:
                    self._keys[number], self._numbers[key] = key, number
            elif what == CANCEL and number in self._keys:
                key = self._keys.pop(number)
                del self._numbers[key]
                self.batch.cancel(key)
        return refused

    def step(self) -> list[tuple[int, Event]]:
        """Runs a step, if a text is under way. Returns news by number."""
        news = [] if self.idle else self.batch.step()
        found = [(self._numbers[event.key], event) for event in news]
        for number, event in found:
            if event.ended is not None:
                del self._numbers[self._keys.pop(number)]
        return found


class RunningJob:
    """Texts of a job under way.

    Attributes:
      events: news with the text's index in the job, or why there are no more. They are at most as
        many as tokens were asked for, however slowly a client reads.
      open: numbers of the texts that have not ended.
    """

    def __init__(self, first: int, count: int):
        self.events: asyncio.Queue[tuple[int, Event] | RefusedError] = asyncio.Queue()
        self.first, self.open = first, set(range(first, first + count))
        self.last_token = dict.fromkeys(self.open, time.monotonic())
        self.begun: set[int] = set()


class Worker:
    """The thread of process 0. Its methods are called by the event loop's thread.

    Attributes:
      ready: whether programs are compiled.
      error: what ended the thread.
    """

    def __init__(
        self,
        batch: Batch,
        processes: Processes,
        metrics: Metrics,
        *,
        most: int,
        places: Places | None = None,
    ):
        """Takes the most texts that may be under way, running or waiting; and places to count."""
        self.ready, self.error = False, None
        self._numbered, self._processes, self._metrics = NumberedBatch(batch), processes, metrics
        self._most, self._jobs, self._next = most, dict[int, RunningJob](), 0
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._places = places

    def start(self, warm_up: Callable[[Batch], None], on_change: Callable[[], None]) -> None:
        """Starts the thread.

        Args:
          warm_up: runs before the first request is taken.
          on_change: called in the event loop when the worker is ready and when it has ended.
        """
        self._loop, self._on_change = asyncio.get_running_loop(), on_change
        # A daemon: a compiler cannot be interrupted, and must not keep a process that was stopped.
        self._thread = Thread(target=self._run, args=(warm_up,), name="batch", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> int:
        """Texts that have not ended."""
        return len(self._jobs)

    def submit(self, requests: Sequence[Request]) -> RunningJob:
        """Hands texts in.

        Raises:
          RefusedError: if too many are under way.
        """
        if len(self._jobs) + len(requests) > self._most:
            raise RefusedError(
                f"server is busy. {len(self._jobs)} texts are under way, this request has "
                f"{len(requests)}. At most {self._most} may run or wait. Send it again later.",
                status=429,
                code="busy",
                headers={"Retry-After": "1"},
            )
        job = RunningJob(self._next, len(requests))
        self._next += len(requests)
        for number, request in zip(sorted(job.open), requests, strict=True):
            self._jobs[number] = job
            self._commands.put((SUBMIT, number, request))
        return job

    def cancel(self, job: RunningJob, number: int | None = None) -> None:
        """Frees the slots of texts that nobody waits for.

        Args:
          number: of one text; None: all of the job.
        """
        for one in sorted(job.open) if number is None else [number]:
            if one in job.open:
                job.open.remove(one)
                del self._jobs[one]
                self._commands.put((CANCEL, one, None))

    def end_all(self, error: RefusedError) -> None:
        """Ends all texts under way."""
        for job in set(self._jobs.values()):
            self.cancel(job)
            job.events.put_nowait(error)

    def stop(self, code: int) -> None:
        """Ends the thread, and the other processes with an exit code."""
        self._commands.put((STOP, code, None))

    def join(self, seconds: float) -> bool:
        """Waits for the end of the thread. Returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, warm_up: Callable[[Batch], None]) -> None:
        try:
            warm_up(self._numbered.batch)
            self._tell(self._set_ready)
            while True:
                commands = self._next_commands()
                _share(commands, self._processes)
                if any(what == STOP for what, _, _ in commands):
                    return
                refused = self._numbered.apply(commands)
                news, batch = self._numbered.step(), self._numbered.batch
                if self._places is not None:
                    self._tell(self._metrics.count_places, self._places.counts)
                self._tell(self._deliver, news, refused, batch.running, batch.waiting)
        except BaseException as error:  # the main thread raises it
            self.error = error
        finally:
            self._tell(self._on_change)

    def _next_commands(self) -> list[Command]:
        """Returns what was handed in; waits for it where no text is under way."""
        commands = [self._commands.get()] if self._numbered.idle else []
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except Empty:
                return commands

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the event loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _set_ready(self) -> None:
        self.ready = True
        self._on_change()

    def _deliver(
        self,
        news: list[tuple[int, Event]],
        refused: list[tuple[int, str]],
        running: int,
        waiting: int,
    ) -> None:
        """Hands events to the jobs that wait for them, and counts."""
        now = time.monotonic()
        self._metrics.running.set(running)
        self._metrics.waiting.set(waiting)
        for number, message in refused:
            if (job := self._jobs.get(number)) is not None:
                self.cancel(job)
                job.events.put_nowait(RefusedError(message))
        for number, event in news:
            if (job := self._jobs.get(number)) is None:  # cancelled meanwhile
                continue
            if event.tokens:
                self._time(job, number, now)
            if event.ended is not None:
                job.open.remove(number)
                del self._jobs[number]
            job.events.put_nowait((number - job.first, event))

    def _time(self, job: RunningJob, number: int, now: float) -> None:
        """Counts a token, and the time since the one before it."""
        self._metrics.tokens.inc()
        seconds = now - job.last_token[number]
        timed = self._metrics.next_token if number in job.begun else self._metrics.first_token
        timed.observe(seconds)
        job.begun.add(number)
        job.last_token[number] = now


def _share(commands: Sequence[Command], processes: Processes) -> None:
    """Sends commands to the other processes."""
    if processes.count == 1:
        return
    round = processes.fresh()
    written = [(what, number, request and asdict(request)) for what, number, request in commands]
    text = json.dumps(written, default=sorted)  # of a set of ids
    for index in range(1, processes.count):
        processes.send(f"serve/{round}/{index}", text)


def follow(batch: Batch, processes: Processes, warm_up: Callable[[Batch], None]) -> int:
    """Makes the calls of process 0's worker in another process. Returns the exit code."""
    numbered = NumberedBatch(batch)
    warm_up(batch)
    while True:
        received = json.loads(processes.receive(f"serve/{processes.fresh()}/{processes.index}"))
        commands = [(what, number, _request(value)) for what, number, value in received]
        for what, code, _ in commands:
            if what == STOP:
                return code
        numbered.apply(commands)
        numbered.step()


def _request(value: dict[str, Any] | None) -> Request | None:
    if value is None:
        return None
    sampling, stops = Sampling(**value["sampling"]), frozenset(value["stops"])
    return Request(**{**value, "sampling": sampling, "stops": stops})


class Case(NamedTuple):
    """Prompts that enter together, and how their tokens are drawn."""

    prompts: int
    length: int
    sampling: Sampling
    likeliest: int


def cases(programs: Programs) -> list[Case]:
    """Returns what makes a batch run all its programs."""
    return [
        Case(prompts, length, sampling, likeliest)
        for prompts, length in _shapes(programs)
        for likeliest in (0, 1)
        for sampling in RULES
    ]


def _shapes(programs: Programs) -> Iterator[tuple[int, int]]:
    """Yields numbers of prompts on a device and their lengths."""
    for length, kind in ((1, 1), (1, SHORT), (2 * SHORT + 1, LONG)):
        if length <= programs.positions:
            counts = sorted({programs.rows(n + 1, kind) for n in range(programs.slots)})
            yield from ((count, length) for count in counts)


def warm_up(batch: Batch, programs: Programs, tell: Callable[[int, int], None]) -> None:
    """Runs every program of a batch once, so that no request waits for a compiler.

    Args:
      tell: called before each with its number and how many there are.
    """
    every = list(dict.fromkeys(cases(programs)))
    for number, case in enumerate(every):
        tell(number + 1, len(every))
        # Enough that texts of the last call of prompts meet those of the first.
        calls = -(-case.prompts // programs.rows(programs.slots, SHORT))
        tokens = min(1 + calls, programs.positions - case.length + 1)
        request = Request(
            [0] * case.length,
            tokens,
            case.sampling,
            likeliest=case.likeliest,
            scored=case.likeliest > 0,
        )
        for _ in range(case.prompts * programs.devices):
            batch.submit(request)
        while batch.running or batch.waiting:
            batch.step()
