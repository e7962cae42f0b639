"""Starts the processes of one program, shows and keeps their output, and ends them together.

The code path that all launchers of this folder share. Standard library only. Each process finds its
place in the environment, where `moejax.runtime.start.join` reads it:

    MOEJAX_COORDINATOR   address:port of process 0
    MOEJAX_PROCESSES     how many there are
    MOEJAX_PROCESS       which one this is
"""

import collections
import contextlib
import ctypes
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

GRACE_SECONDS = 30  # to save and stop when another process has failed
HUNG_SECONDS = 10  # the same when another has said that this one hangs
# Before the others are interrupted: what is wrong with the input, each finds and says itself.
PATIENCE_SECONDS = 5
STOPPED, CRASH_LOOP, HANG = 3, 7, 124  # exit codes, see docs/formats/exit.md
CODES = {
    0: "done",
    1: "a fault",
    2: "bad input",
    STOPPED: "stopped as asked",
    4: "diverged",
    5: "no space left",
    6: "not all processes came",
    7: "failed again and again",
    HANG: "hung",
    130: "stopped at once",
}
KILLING_INTERRUPT = 3  # the third Ctrl-C kills
HEALTHY_SECONDS = 600  # a start that lasts so long was no failure of the start
LONGEST_PAUSE_SECONDS = 30
LAST_LINES = 20  # of the process that failed first, shown last
PR_SET_PDEATHSIG = 1
# Each group of ranks says this once from each; it stays in the logs.
GLOO = b"Expected number of connected peer ranks"


@dataclass(frozen=True)
class Place:
    """Where one process runs."""

    name: str  # in front of its lines, and its log file's name
    prefix: tuple[str, ...] = ()  # what the command is started through


def problem(command: Sequence[str], counts: dict[str, int | None]) -> str | None:
    """What is wrong with a launcher's command line, in one line.

    Args:
      counts: the numbers it was given, by flag.
    """
    if not command:
        return "no command. Got none. There must be something to run. Add it after --."
    if shutil.which(command[0]) is None:
        return f"no program `{command[0]}`. It must be a path or on the PATH. Correct it."
    for flag, value in counts.items():
        if value is not None and not 1 <= value <= 64:
            return f"{flag} is {value}. It must be between 1 and 64. Change it."
    return None


def after_dashes(words: list[str]) -> list[str]:
    """The command in what argparse took for the rest of the line."""
    return words[1:] if words[:1] == ["--"] else words


def local_coordinator() -> str:
    """An address for process 0 on this machine. Nobody listens at its port now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def environment(
    coordinator: str, process: int, processes: int, devices: int | None
) -> dict[str, str]:
    """Returns this process's environment for one process of the program.

    Args:
      devices: CPU devices to simulate in the process; None leaves the hardware as it is.
    """
    found = dict(os.environ, PYTHONUNBUFFERED="1")
    found |= {
        "MOEJAX_COORDINATOR": coordinator,
        "MOEJAX_PROCESSES": str(processes),
        "MOEJAX_PROCESS": str(process),
    }
    if devices is not None:
        found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return found


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


def run(
    places: Sequence[Place],
    command: Sequence[str],
    *,
    coordinator: Callable[[], str],
    devices: int | None,
    logs: Path,
    restarts: int = 0,
) -> int:
    """Runs the command once at every place; returns the code that says most, or 0.

    Output is shown with its place's name and kept in `logs`. When one process fails the others
    are interrupted, and killed if they do not stop; which one failed first is said last. An
    interrupt is passed on to all. If this process is killed, so are they.

    Args:
      coordinator: returns the address of process 0, for each start anew.
      restarts: how often all are started again after a failure that may pass (`may_pass`). After a
        start that lasted `HEALTHY_SECONDS` the count begins again.
    """
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"error: --logs is {logs}, where output cannot be kept: {error.strerror}. It must be a "
            "folder. Choose another.",
            file=sys.stderr,
        )
        return 2
    tries = 0
    with _Interrupts() as interrupts:
        while True:
            began = time.monotonic()
            variables = [
                environment(address, number, len(places), devices)
                for address in [coordinator()]
                for number in range(len(places))
            ]
            code = _run_once(places, command, variables, logs, interrupts, again=tries > 0)
            tries = 0 if time.monotonic() - began > HEALTHY_SECONDS else tries
            if not restarts or interrupts.count or not may_pass(code):
                break
            tries += 1
            if tries > restarts:
                code = CRASH_LOOP
                _say(f"gave up after {restarts} restarts; the code of the last is above")
                break
            seconds = min(2.0 ** (tries - 1), LONGEST_PAUSE_SECONDS)
            _say(f"restart {tries} of {restarts} in {seconds:.0f} s: {describe(code)}")
            interrupts.sleep(seconds)
            if interrupts.count:
                break
    return code if code >= 0 else 128 - code


def may_pass(code: int) -> bool:
    """Whether a failure may be gone at the next start; the run goes on from its checkpoint."""
    return code < 0 or code in (1, 6, HANG)


def _say(text: str) -> None:
    print(f"launcher: {text}", file=sys.stderr, flush=True)


def _run_once(
    places: Sequence[Place],
    command: Sequence[str],
    variables: Sequence[dict[str, str]],
    logs: Path,
    interrupts: "_Interrupts",
    again: bool,
) -> int:
    """Starts the processes and waits for their end. Returns the code, negative for a signal."""
    started: list[Started] = []
    interrupts.processes = started
    try:
        for place, own in zip(places, variables, strict=True):
            started.append(_start(place, command, own, logs, again))
        code, first = _wait(started, interrupts)
    finally:
        for one in started:
            one.signal(signal.SIGKILL)
        for one in started:
            one.process.wait()
            one.reader.join()
    if first is not None and len(started) > 1:
        _say(_report(first, started))
    return code


def _start(
    place: Place, command: Sequence[str], variables: dict[str, str], logs: Path, again: bool
) -> Started:
    process = subprocess.Popen(
        [*place.prefix, *command],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    log = logs / f"{place.name}.log"
    mode = "ab" if again else "wb"
    reader = threading.Thread(target=_show, args=(process, place.name, log.open(mode), lines))
    reader.start()
    return Started(place, process, lines, reader)


def _die_with_parent() -> None:
    """In a process about to run the command: has the kernel kill it when the launcher ends."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it ended before
            os._exit(1)


def _report(first: Started, started: Sequence[Started]) -> str:
    """Says which process failed first, and shows its last lines."""
    others = ", ".join(
        f"{one.place.name} {describe(one.code or 0)}" for one in started if one is not first
    )
    name = first.place.name
    head = f"{name} failed first: {describe(first.code or 0)}; then {others}. {name} said last:"
    return "\n".join([head, *(f"    {line}" for line in first.lines)])


def describe(code: int) -> str:
    """Returns an exit code in words; docs/formats/exit.md has all of them."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with {code} ({CODES.get(code, 'unknown')})"


class _Interrupts:
    """Passes SIGINT and SIGTERM on to the processes' groups.

    The first asks a run to save and stop, the second to stop at once, the third kills.
    """

    def __init__(self) -> None:
        self.processes: list[Started] = []
        self.count = 0

    def __enter__(self) -> "_Interrupts":
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


def _wait(processes: list[Started], interrupts: _Interrupts) -> tuple[int, Started | None]:
    """Waits for all; once one has failed, gives the others a while to stop.

    Returns the code that says most of how they ended by themselves, and the process that failed
    first; None if none did.
    """
    code, first, failed, interrupted, before = 0, None, math.inf, False, 0
    while True:
        # Each is asked, not only up to the first that runs.
        over = None not in [one.process.poll() for one in processes]
        if not interrupted:
            code = _failure([one.code for one in processes])
        if first is None and code not in (0, STOPPED):
            first = next(one for one in processes if one.code == code)
            failed, before = time.monotonic(), interrupts.count
        seconds = time.monotonic() - failed
        # Whoever interrupts once something has failed does not want to wait for the rest.
        grace = HUNG_SECONDS if code == HANG else GRACE_SECONDS
        if over or seconds > grace or (first is not None and interrupts.count > before):
            return code, first
        # Who has stopped as asked has not failed: the others are about to stop as well.
        if seconds > PATIENCE_SECONDS and not interrupted:
            interrupted = True
            for one in processes:
                one.signal(signal.SIGINT)
        time.sleep(0.05)


def _failure(codes: Sequence[int | None]) -> int:
    """The exit code of a failed process, or 0; where there are several, the one that says most.

    The others fail within moments, because they wait for it: with 1, or as hung. A signal says
    most, then what the program itself says, and that a process stopped as asked least.
    """
    failed = [code for code in codes if code]
    return min(failed, key=lambda code: (_RANK.get(code, 0), code), default=0)


_RANK = {HANG: 1, 1: 2, STOPPED: 3}  # of codes that say less than others


def _show(
    process: subprocess.Popen, name: str, log: BinaryIO, lines: collections.deque[str]
) -> None:
    """Copies a process's lines to its log and, with its name, to our output."""
    assert process.stdout is not None
    with log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if GLOO not in line:
                text = line.decode(errors="replace")
                lines.append(text.rstrip("\n"))
                sys.stdout.write(f"[{name}] {text}")
                sys.stdout.flush()


# Before the first process starts, as nothing may be loaded in what `preexec_fn` runs.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
