"""Starts the processes of one program, shows and keeps their output, and ends them together.

The code path that all launchers of this folder share. Standard library only. Each process finds its
place in the environment, where `moejax.runtime.start.join` reads it:

    MOEJAX_COORDINATOR   address:port of process 0
    MOEJAX_PROCESSES     how many there are
    MOEJAX_PROCESS       which one this is
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_SECONDS = 60  # to save and stop, after an interrupt or when another process has failed
# Before the others are interrupted: what is wrong with the input, each finds and says itself.
PATIENCE_SECONDS = 5
STOPPED = 3  # exit code of a run that stopped as asked, see docs/formats/exit.md
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


def run(
    places: Sequence[Place],
    command: Sequence[str],
    *,
    coordinator: str,
    devices: int | None,
    logs: Path,
) -> int:
    """Runs the command once at every place; returns the code of the first that failed, or 0.

    Output is shown with its place's name and kept in `logs`. When one process fails the others
    are interrupted, and killed if they do not stop. An interrupt is passed on to all.
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
    started: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    interrupts = _Interrupts(started)
    with interrupts:
        try:
            for number, place in enumerate(places):
                process = subprocess.Popen(
                    [*place.prefix, *command],
                    env=environment(coordinator, number, len(places), devices),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                started.append(process)
                log = logs / f"{place.name}.log"
                readers.append(threading.Thread(target=_show, args=(process, place.name, log)))
                readers[-1].start()
            return _wait(started)
        finally:
            for process in started:
                _signal(process, signal.SIGKILL)
            for reader in readers:
                reader.join()


class _Interrupts:
    """Passes SIGINT and SIGTERM on to the processes' groups."""

    def __init__(self, processes: list[subprocess.Popen]):
        self.processes = processes

    def __enter__(self) -> None:
        self.kept = {s: signal.signal(s, self._pass) for s in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.kept.items():
            signal.signal(number, handler)

    def _pass(self, number: int, _: object) -> None:
        for process in self.processes:
            _signal(process, number)


def _wait(processes: list[subprocess.Popen]) -> int:
    """Waits for all; once one has failed, gives the others a while to stop."""
    code, failed, interrupted = 0, float("inf"), False
    # Each is asked, not only up to the first that runs.
    while None in [process.poll() for process in processes]:
        if code in (0, STOPPED) and (now := _failure(processes)) != code:
            code, failed = now, time.monotonic()
        seconds = time.monotonic() - failed
        if seconds > GRACE_SECONDS:
            break
        # Who has stopped as asked has not failed: the others are about to stop as well.
        if seconds > PATIENCE_SECONDS and not interrupted and code != STOPPED:
            interrupted = True
            for process in processes:
                _signal(process, signal.SIGINT)
        time.sleep(0.05)
    if code in (0, STOPPED):
        code = _failure(processes)
    return code if code >= 0 else 128 - code


def _failure(processes: list[subprocess.Popen]) -> int:
    """The exit code of a failed process, or 0; where there are several, the one that says most.

    The others fail within moments, because they wait for it: with 1. A signal says most, and that
    a process stopped as asked least.
    """
    codes = [process.returncode for process in processes if process.returncode]
    return min(codes, key=lambda code: (code == STOPPED, code == 1, code), default=0)


def _signal(process: subprocess.Popen, number: int) -> None:
    # Its whole group: a prefix such as `ip netns exec` stands between us and the program.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _show(process: subprocess.Popen, name: str, log: Path) -> None:
    """Copies a process's lines to its log and, with its name, to our output."""
    assert process.stdout is not None
    with log.open("wb") as kept:
        for line in process.stdout:
            kept.write(line)
            kept.flush()
            if GLOO not in line:
                sys.stdout.write(f"[{name}] {line.decode(errors='replace')}")
                sys.stdout.flush()
