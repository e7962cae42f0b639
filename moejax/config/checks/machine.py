"""Memory of this machine, or of the container around this process: all of it, and what is left.

A container is a control group of Linux, and the limits of all groups around it hold too.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Files(NamedTuple):
    """Names in the folder of a control group.

    Attributes:
      cached: entries of `memory.stat`: pages of files, which the system takes back when it must.
    """

    limit: str
    use: str
    cached: tuple[str, str]


V1 = Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
V2 = Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def machine_memory() -> int:
    """Returns the memory of this machine in bytes, or of the container if that has less."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([size, *(limit for _, _, limit in _limits())])


def memory_left() -> int:
    """Returns the bytes that this process may still take, of the machine and of its container.

    Where nothing says it (not Linux), that is all of the machine.
    """
    left = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        free = _entries(PROC / "meminfo").get("MemAvailable")
        left += [] if free is None else [free * 1024]
    for folder, files, limit in _limits():
        with suppress(OSError, ValueError):
            use, held = int((folder / files.use).read_text()), _entries(folder / "memory.stat")
            left.append(limit - use + sum(held.get(name, 0) for name in files.cached))
    return max(0, min(left))


def _limits() -> Iterator[tuple[Path, Files, int]]:
    """Yields the folder, names and limit of each control group around this process that has one."""
    for folder, files in _groups():
        with suppress(OSError, ValueError):  # no such file, or "max"
            yield folder, files, int((folder / files.limit).read_text())


def _groups() -> Iterator[tuple[Path, Files]]:
    """Yields the control groups around this process, of both versions."""
    paths = {"": "/", "memory": "/"}  # by controller; version 2 has one group for all
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    for controller, files in (("", V2), ("memory", V1)):
        top = CGROUPS / controller
        folder = top / paths[controller].lstrip("/")
        # Containers may see their own group as the top, and be told its path outside.
        if ".." in folder.parts or not folder.is_dir():
            folder = top
        yield folder, files
        while folder != top:
            folder = folder.parent
            yield folder, files


def _entries(path: Path) -> dict[str, int]:
    """Returns the numbers of a file whose lines are a name and a number."""
    return {name: int(n) for name, n in re.findall(r"^(\w+):?\s+(\d+)", path.read_text(), re.M)}
