"""What a launcher would run, for its `--dry_run`: variables and command, ready for a shell."""

import shlex
from collections.abc import Mapping, Sequence

import processes

# What `processes.environment` adds to the environment of the launcher itself.
ADDED = (
    "PYTHONUNBUFFERED",
    "MOEJAX_COORDINATOR",
    "MOEJAX_PROCESSES",
    "MOEJAX_PROCESS",
)
SIMULATED = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "GLIBC_TUNABLES")


def added(coordinator: str, process: int, count: int, devices: int | None) -> dict[str, str]:
    """Returns the variables that a launcher sets for one process, and no others."""
    names = ADDED if devices is None else (*ADDED, *SIMULATED)
    found = processes.environment(coordinator, process, count, devices)
    return {name: found[name] for name in names}


def line(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """A line for a POSIX shell that runs the command with these variables."""
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*words, shlex.join(command)])
