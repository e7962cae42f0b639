"""The processes of one host under its supervisor: started, moved to another place, ended.

Each process has a file, which MOEJAX_ASSIGNMENT names: its place in the program, which
`moejax.runtime.assignment` reads. A proposed change stands there before it is made; the process
saves, and says beside it that it waits. Standard library only.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import processes
from assign import Assignment
from group import Group, Guard, Interrupts, Place


@dataclass(frozen=True)
class Host:
    """The facts that all starts of one host share.

    Attributes:
      number: of this host.
      each: processes a host.
      devices: CPU devices that each simulates; None leaves the hardware as it is.
    """

    number: int
    command: Sequence[str]
    each: int
    devices: int | None
    logs: Path

    @property
    def name(self) -> str:
        """The name under which it keeps copies of the state in memory; another host's differs."""
        return f"h{self.number}"


class Trainers:
    """Starts and ends this host's processes; a context manager that leaves none behind."""

    def __init__(self, host: Host, interrupts: Interrupts):
        self._host, self._interrupts = host, interrupts
        self._group: Group | None = None
        self._started = 0

    def __enter__(self) -> "Trainers":
        self._folder = Path(tempfile.mkdtemp(prefix="moejax-host-"))
        self._guard = Guard()
        self._guard.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._guard.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def running(self) -> bool:
        """Whether there are processes."""
        return self._group is not None

    @property
    def code(self) -> int | None:
        """How they ended; None while they run, or if there are none."""
        return None if self._group is None else self._group.code

    @property
    def said(self) -> tuple[str, ...]:
        """The last lines of the process that failed."""
        return () if self._group is None else self._group.said

    def start(self, given: Assignment) -> None:
        """Starts the processes in their places."""
        self.tell(given)
        self._group = Group(self._interrupts, self._guard)
        for local in range(self._host.each):
            count = len(given.members) * self._host.each
            index = given.members.index(self._host.number) * self._host.each + local
            variables = processes.environment(given.coordinator, index, count, self._host.devices)
            variables |= {"MOEJAX_HOST": self._host.name, "MOEJAX_ASSIGNMENT": str(self._of(local))}
            name = f"{self._host.name}-{local}" if self._host.each > 1 else self._host.name
            log = self._host.logs / f"{name}.log"
            opened = log.open("ab" if self._started else "wb")
            self._group.start(Place(name), self._host.command, variables, opened)
        self._started += 1

    def waits(self, given: Assignment) -> bool:
        """Whether all processes have saved, and wait for this change to be made."""
        for local in range(self._host.each):
            beside = self._of(local).with_suffix(".waits")
            if not beside.is_file() or beside.read_text() != str(given.generation):
                return False
        return True

    def signal(self, number: int) -> None:
        """Sends a signal to all processes."""
        if self._group is not None:
            self._group.signal(number)

    def kill(self) -> None:
        """Kills the processes, if there are any."""
        if self._group is not None:
            self._group.kill()
        self._group = None

    def _of(self, local: int) -> Path:
        return self._folder / f"{local}.json"

    def tell(self, given: Assignment) -> None:
        """Tells the processes their places: proposed, or to be taken if there is a coordinator."""
        member = self._host.number in given.members
        first = given.members.index(self._host.number) * self._host.each if member else 0
        for local in range(self._host.each):
            place = {
                "generation": given.generation,
                "coordinator": given.coordinator,
                "processes": len(given.members) * self._host.each,
                "process": first + local if member else None,
                "why": given.why,
            }
            path = self._of(local)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(place))
            os.replace(partial, path)
