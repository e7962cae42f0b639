"""A group of processes that end together: started, shown, interrupted, and killed with us.

Standard library only; see `processes.py` for who they are.
"""

import collections
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

# To end when another process has failed. What all save together cannot be finished then, and who
# waits for the other while a program is compiled has no deadline of its own.
GRACE_SECONDS = 10
# Before the others are interrupted: what is wrong with the input, each finds and says itself.
PATIENCE_SECONDS = 5
STOPPED, HANG = 3, 124  # exit codes, see docs/formats/exit.md
CODES = {
    0: "done",
    1: "a fault",
    2: "bad input",
    STOPPED: "stopped as asked",
    4: "diverged",
    5: "no space left",
    6: "not all processes came",
    7: "failed again and again",
    8: "devices differ",
    9: "no mesh fits",
    HANG: "hung",
    130: "stopped at once",
}
SAID_BY_ALL = (2, 4, 8)  # each process says the same of these itself
KILLING_INTERRUPT = 3  # the third Ctrl-C kills
LAST_LINES = 20  # of the process that failed first, shown last
# Each group of ranks says this once from each; it stays in the logs.
GLOO = b"Expected number of connected peer ranks"


@dataclass(frozen=True)
class Place:
    """Name of one process, and the command it is started through."""

    name: str  # in front of its lines, and its log file's name
    prefix: tuple[str, ...] = ()  # what the command is started through


@dataclass
class Started:
    """A process that was started, and what it said."""

    place: Place
    process: subprocess.Popen
    lines: collections.deque[str]  # the newest
    reader: threading.Thread

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.returncode

    def signal(self, number: int) -> None:
        """Sends a signal to its whole group: a prefix such as `ip netns exec` stands between."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Group:
    """The processes of one start, and those that end them: interrupts, and a guard."""

    def __init__(self, interrupts: "Interrupts", guard: "Guard"):
        self._interrupts, self._guard = interrupts, guard
        self._started: list[Started] = []
        interrupts.processes = self._started

    def start(
        self, place: Place, command: Sequence[str], variables: dict[str, str], log: BinaryIO
    ) -> None:
        """Starts a process; its output is shown, and kept in `log`.

        Args:
          variables: are added to this process's own.
        """
        process = subprocess.Popen(
            [*place.prefix, *command],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._guard.watch(process)
        lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        reader = threading.Thread(target=_show, args=(process, place.name, log, lines))
        reader.start()
        self._started.append(Started(place, process, lines, reader))

    def wait(self) -> int:
        """Waits for the end of all. Returns the code that says most, negative for a signal.

        When one fails the others are interrupted, and killed if they do not stop; which one
        failed first is said last.
        """
        try:
            code, first = _wait(self._started, self._interrupts)
        finally:
            self.kill()
        if first is not None and code not in SAID_BY_ALL and len(self._started) > 1:
            say(_report(first, self._started))
        return code

    def wait_for_each(self) -> int:
        """Waits for all, whose ends do not concern the others. Returns 0 if one reached its end."""
        try:
            while None in (codes := [one.process.poll() for one in self._started]):
                time.sleep(0.05)
        finally:
            self.kill()
        return 0 if 0 in codes else failure_of(codes)

    @property
    def code(self) -> int | None:
        """The code that says most, once one has failed or all have ended; None before."""
        codes = [one.process.poll() for one in self._started]
        code = failure_of(codes)
        return code if None not in codes or code not in (0, STOPPED) else None

    @property
    def said(self) -> tuple[str, ...]:
        """The last lines of the process whose code says most."""
        return next((tuple(one.lines) for one in self._started if one.code == self.code), ())

    def signal(self, number: int) -> None:
        """Sends a signal to all."""
        for one in self._started:
            one.signal(number)

    def kill(self) -> None:
        """Kills what still runs."""
        for one in self._started:
            one.signal(signal.SIGKILL)
        for one in self._started:
            one.process.wait()
            one.reader.join()
            self._guard.forget(one.process)


def say(text: str) -> None:
    """Says something that is of no single process."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)


class Guard:
    """A process of its own that outlives a kill -9 of this one, and then ends what it started."""

    def __enter__(self) -> "Guard":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # somebody has killed it
            self._tell("done")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def watch(self, process: subprocess.Popen) -> None:
        """Tells it of a process group."""
        with contextlib.suppress(OSError):
            self._tell(str(process.pid))

    def forget(self, process: subprocess.Popen) -> None:
        """Tells it that a group has ended: its number may soon be another's."""
        with contextlib.suppress(OSError):
            self._tell(str(-process.pid))

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n".encode())
        self._process.stdin.flush()


GUARD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
lines = sys.stdin.read().split()
if lines[-1:] != ["done"]:
    numbers = [int(line) for line in lines]
    for group in [n for n in numbers if n > 0 and -n not in numbers]:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
"""


class Interrupts:
    """Passes SIGINT and SIGTERM on to the processes' groups.

    The first asks a run to save and stop, the second to stop at once, the third kills.
    """

    def __init__(self) -> None:
        self.processes: list[Started] = []
        self.count = 0

    def __enter__(self) -> "Interrupts":
        self.kept = {s: signal.signal(s, self._pass) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def sleep(self, seconds: float) -> None:
        """Sleeps until an interrupt comes."""
        until = time.monotonic() + seconds
        while not self.count and time.monotonic() < until:
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.kept.items():
            signal.signal(number, handler)

    def _pass(self, number: int, _: object) -> None:
        self.count += 1
        for one in self.processes:
            one.signal(number if self.count < KILLING_INTERRUPT else signal.SIGKILL)


def _wait(processes: list[Started], interrupts: Interrupts) -> tuple[int, Started | None]:
    """Waits for all; once one has failed, gives the others a while to stop.

    Returns the code that says most of how they ended by themselves, and the process that failed
    first; None if none did.
    """
    code, first, failed, interrupted, before = 0, None, math.inf, False, 0
    while True:
        # Each is asked, not only up to the first that runs.
        over = None not in [one.process.poll() for one in processes]
        if not interrupted:
            code = failure_of([one.code for one in processes])
        if first is None and code not in (0, STOPPED):
            first = next(one for one in processes if one.code == code)
            failed, before = time.monotonic(), interrupts.count
        seconds = time.monotonic() - failed
        # Whoever interrupts once something has failed does not want to wait for the rest.
        if over or seconds > GRACE_SECONDS or (first is not None and interrupts.count > before):
            return code, first
        # Who has stopped as asked has not failed: the others are about to stop as well.
        if seconds > PATIENCE_SECONDS and not interrupted:
            interrupted = True
            for one in processes:
                one.signal(signal.SIGINT)
        time.sleep(0.05)


def failure_of(codes: Sequence[int | None]) -> int:
    """The exit code of a failed process, or 0; where there are several, the one that says most.

    The others fail within moments, because they wait for it: with 1, as hung, or by SIGABRT, by
    which JAX ends who loses process 0. Another signal says most, then what the program itself says,
    and that a process stopped as asked least.
    """
    failed = [code for code in codes if code]
    return min(failed, key=lambda code: (_RANK.get(code, 0), code), default=0)


_RANK = {HANG: 1, -signal.SIGABRT: 2, 1: 3, STOPPED: 4}  # of codes that say less than others


def _report(first: Started, started: Sequence[Started]) -> str:
    """Says which process failed first, and shows its last lines."""
    others = ", ".join(
        f"{one.place.name} {describe(one.code or 0)}" for one in started if one is not first
    )
    name = first.place.name
    head = f"{name} failed first: {describe(first.code or 0)}; then {others}. {name} said "
    return "\n    ".join([head + ("last:" if first.lines else "nothing."), *first.lines])


def describe(code: int) -> str:
    """Returns an exit code in words; docs/formats/exit.md has all of them."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with {code} ({CODES.get(code, 'unknown')})"


def _show(
    process: subprocess.Popen, name: str, log: BinaryIO, lines: collections.deque[str]
) -> None:
    """Copies a process's lines to its log and, with its name, to our output."""
    assert process.stdout is not None
    with log, process.stdout:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if GLOO not in line:
                text = line.decode(errors="replace")
                lines.append(text.rstrip("\n"))
                sys.stdout.write(f"[{name}] {text}")
                sys.stdout.flush()
