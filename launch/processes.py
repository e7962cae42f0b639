"""Starts the processes of one program, shows and keeps their output, and ends them together.

The code path that all launchers of this folder share. Standard library only. Each process finds its
place in the environment, where `moejax.runtime.start.join` reads it:

    MOEJAX_COORDINATOR   address:port of process 0
    MOEJAX_PROCESSES     how many there are
    MOEJAX_PROCESS       which one this is
"""

import argparse
import errno
import fcntl
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from group import CODES, HANG, Group, Guard, Interrupts, Place, describe, say
from statuses import free_port

CRASH_LOOP = 7  # exit code, see docs/formats/exit.md
HEALTHY_SECONDS = 600  # a start that lasts so long was no failure of the start
LONGEST_PAUSE_SECONDS = 30
# Each step of simulated devices takes new memory from the kernel: gigabytes, in seconds where pages
# are small.
LARGE_PAGES = "glibc.malloc.hugetlb=1"
# Errors of a file system that locks no folders, as NFS: there nobody can tell.
NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a launcher's parser, whose help shows its docstring as it is written."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter)


def add_logs(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the flags --logs and --restarts, which `run` takes."""
    default = Path("runs") / name
    parser.add_argument("--logs", type=Path, default=default, help="kept output")
    restarts = "starts after failures that may pass; 0 if not given"
    parser.add_argument("--restarts", type=int, default=0, help=restarts)


def parse_command(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the command line: the parser's flags, and the command behind them."""
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    args = parser.parse_args()
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return args


def problem(command: Sequence[str], counts: dict[str, int | None]) -> str | None:
    """Error in a launcher's command line, in one line; None without one.

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


def local_coordinator() -> str:
    """An address for process 0 on this machine. Nobody listens at its port now."""
    return f"127.0.0.1:{free_port('127.0.0.1')}"


def environment(
    coordinator: str, process: int, processes: int, devices: int | None
) -> dict[str, str]:
    """Returns the variables that a launcher sets for one process of the program, and no others.

    Args:
      devices: CPU devices to simulate in the process; None leaves the hardware as it is.
    """
    found = {
        "PYTHONUNBUFFERED": "1",
        "MOEJAX_COORDINATOR": coordinator,
        "MOEJAX_PROCESSES": str(processes),
        "MOEJAX_PROCESS": str(process),
    }
    if devices is not None:
        found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        found["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", LARGE_PAGES)
    return found


def shell_line(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """A line for a POSIX shell that runs the command with these variables, for --dry_run."""
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*words, shlex.join(command)])


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
    if wrong := take(logs):
        print(f"error: --logs is {logs}, {wrong}", file=sys.stderr)
        return 2

    def start(group: Group, again: bool) -> None:
        address = coordinator()
        for number, place in enumerate(places):
            variables = environment(address, number, len(places), devices)
            log = (logs / f"{place.name}.log").open("ab" if again else "wb")
            group.start(place, command, variables, log)

    code = _run_and_restart(start, restarts)
    return code if code >= 0 else 128 - code


def take(logs: Path) -> str | None:
    """Takes the folder of logs until this process ends. Returns what is wrong, if it cannot."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        folder = os.open(logs, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return (
            "where another launcher keeps output now. A live launcher has a folder of its own. "
            "Wait for it, stop it, or choose another."
        )
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        return (
            f"where output cannot be kept: {error.strerror}. It must be a folder. Choose another."
        )
    return None


def _run_and_restart(start: Callable[[Group, bool], None], restarts: int) -> int:
    """Runs a group of processes, again after failures that may pass. Returns the last code.

    Args:
      start: starts the processes in a group, for the first time or again.
    """
    tries = 0
    with Interrupts() as interrupts, Guard() as guard:
        while True:
            began, group = time.monotonic(), Group(interrupts, guard)
            try:
                start(group, tries > 0)
            except BaseException:
                group.kill()
                raise
            code = group.wait()
            tries = 0 if time.monotonic() - began > HEALTHY_SECONDS else tries
            if not restarts or interrupts.count or not may_pass(code):
                return code
            tries += 1
            if tries > restarts:
                say(f"gave up after {restarts} restarts; why the last one failed stands above")
                return CRASH_LOOP
            seconds = min(2.0 ** (tries - 1), LONGEST_PAUSE_SECONDS)
            say(f"restart {tries} of {restarts} in {seconds:.0f} s: {describe(code)}")
            interrupts.sleep(seconds)
            if interrupts.count:
                return code


def may_pass(code: int) -> bool:
    """Whether a failure may be gone at the next start; the run goes on from its checkpoint.

    A code that docs/formats/exit.md does not have is of something else that ended the process.
    """
    return code < 0 or code in (1, 6, HANG) or code not in CODES
