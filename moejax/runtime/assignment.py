"""The place of this process in a program whose hosts may change while it runs.

A supervisor (`launch/host`) writes it to a file, which MOEJAX_ASSIGNMENT names: first a change that
is proposed, which the run answers by saving and waiting, then the change itself, with the address
of the new process 0. A process that is no longer wanted ends.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from moejax.errors import write_whole

VARIABLE = "MOEJAX_ASSIGNMENT"
LOOK_S = 0.1


class Assignment:
    """This process's file, and its last content."""

    def __init__(self, path: Path):
        """Reads the file of a process that its supervisor has just started."""
        self._path = path
        self._seen = 0
        self._now = self._newest = self._read() or {"generation": 0}

    @property
    def proposed(self) -> str | None:
        """The reason for a proposed change of hosts, in words; None if none is proposed."""
        found = self._read()
        if found is not None:
            self._newest = found
        if self._newest["generation"] <= self._now["generation"]:
            return None
        return str(self._newest["why"])

    def take(self) -> bool:
        """Says that this process has saved, and waits for its place. Returns whether it has one."""
        while True:
            generation = self._newest["generation"]
            write_whole(self._path.with_suffix(".waits"), str(generation))
            while not self._decided(generation):
                time.sleep(LOOK_S)
                self._newest = self._read() or self._newest
            found = self._newest
            if found["process"] is None:
                return False
            if found["coordinator"]:
                self._now = found
                os.environ["MOEJAX_COORDINATOR"] = found["coordinator"]
                os.environ["MOEJAX_PROCESSES"] = str(found["processes"])
                os.environ["MOEJAX_PROCESS"] = str(found["process"])
                return True

    def _decided(self, generation: int) -> bool:
        """Whether a change is made, or another is proposed in its place."""
        now = self._newest
        made = now["process"] is None or bool(now["coordinator"])
        return made or now["generation"] != generation

    def _read(self) -> dict[str, Any] | None:
        """Returns the file's content if it was written since the last look."""
        with suppress(OSError, ValueError):
            changed = self._path.stat().st_mtime_ns
            if changed != self._seen:
                found = json.loads(self._path.read_text())
                self._seen = changed
                return found
        return None


def find_assignment() -> Assignment | None:
    """Returns the place that a supervisor keeps for this process; None without one."""
    path = os.environ.get(VARIABLE)
    return None if path is None else Assignment(Path(path))


def changes_hosts() -> bool:
    """Returns whether hosts of this program may be lost, leave and come."""
    return VARIABLE in os.environ
