"""Starts a supervisor of `launch/host` at every place, for launchers that reach all hosts."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import processes
from group import Group, Guard, Interrupts, Place

HOST = Path(__file__).with_name("host")


def run(
    places: Sequence[Place],
    names: Sequence[str],
    command: Sequence[str],
    *,
    devices: int | None,
    logs: Path,
    restarts: int,
    python: str = sys.executable,
    one_word: bool = False,
) -> int:
    """Runs the command under supervisors. Returns 0 if one of them saw its end, else a failure.

    A supervisor that is killed, as with its host, does not end the others.

    Args:
      names: of the hosts, by which they reach each other: an address, or ADDRESS:PORT.
      restarts: starts after failures in a row; 0: the supervisor's default.
      python: that runs the supervisors there.
      one_word: whether a place's prefix takes the command as one word, as ssh does.
    """
    if wrong := processes.take(logs):
        print(f"error: --logs is {logs}, {wrong}", file=sys.stderr)
        return 2
    flags = ["--logs", str(logs)]
    flags += [] if devices is None else ["--devices", str(devices)]
    flags += ["--restarts", str(restarts)] if restarts else []
    with Interrupts() as interrupts, Guard() as guard:
        group = Group(interrupts, guard)
        try:
            for place, name in zip(places, names, strict=True):
                words = [python, str(HOST), "--hosts", ",".join(names), "--me", name]
                words += [*flags, "--", *command]
                log = (logs / f"{place.name}.supervisor.log").open("wb")
                started = [shlex.join(words)] if one_word else words
                group.start(place, started, {"PYTHONUNBUFFERED": "1"}, log)
        except BaseException:
            group.kill()
            raise
        code = group.wait_for_each()
    return code if code >= 0 else 128 - code
