"""What a result must say about the machine: hardware, and whether anything else ran on it."""

import datetime
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]  # of the repository
RESULTS = ROOT / "benchmarks" / "results"
STAT = Path("/proc/stat")


def stamp() -> dict[str, Any]:
    """What a record says of where and when it was made."""
    return {
        "machine": describe(sorted(os.sched_getaffinity(0))),
        "jax": version("jax"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def describe(cpus: list[int]) -> dict:
    """Hardware and system. Values that the system does not tell are None."""
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or None,
        "cpus_present": os.cpu_count(),
        "cpus_used": len(cpus),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        # Virtual machines hide what the vendor's name does not tell; the vector units decide.
        "vector_units": _vector_units(),
    }


def _first_value(path: str, name: str) -> str | None:
    if not Path(path).exists():
        return None
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _vector_units() -> list[str]:
    flags = (_first_value("/proc/cpuinfo", "flags") or "").split()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    return [flag for flag in wanted if flag in flags]


class Clock:
    """Wall seconds and busy CPU seconds of some CPUs, all processes together."""

    def __init__(self, cpus: list[int]):
        self.cpus = cpus
        self.wall, self.busy = time.perf_counter(), self._busy()

    def _busy(self) -> float | None:
        if not STAT.exists():
            return None
        names = {f"cpu{number}" for number in self.cpus}
        lines = [line.split() for line in STAT.read_text(encoding="utf-8").splitlines()]
        total = 0
        for name, *fields in lines:
            if name in names:
                user, nice, system, _, _, irq, soft_irq, steal = map(int, fields[:8])
                total += user + nice + system + irq + soft_irq + steal
        return total / os.sysconf("SC_CLK_TCK")

    def others_share(self, own_cpu_seconds: float) -> float | None:
        """Share of these CPUs, since the clock was made, that went to others than ourselves.

        None where the system does not tell.
        """
        busy = self._busy()
        if busy is None or self.busy is None:
            return None
        seconds = (time.perf_counter() - self.wall) * len(self.cpus)
        return max(0.0, busy - self.busy - own_cpu_seconds) / seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and range."""
    lowest, quarter, median, three_quarters, highest = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    return {
        "median": float(median),
        "quartile_1": float(quarter),
        "quartile_3": float(three_quarters),
        "minimum": float(lowest),
        "maximum": float(highest),
    }
