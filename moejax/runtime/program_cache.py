"""Keeps compiled programs in the user's cache directory: a second start need not compile."""

import hashlib
import os
import platform
import sys
from pathlib import Path

import jax

MAX_BYTES = 8 << 30  # then JAX removes what was used least recently


def keep_programs() -> None:
    """Turns JAX's cache on, unless JAX was told where to keep programs, or not to.

    `JAX_COMPILATION_CACHE_DIR` and `JAX_ENABLE_COMPILATION_CACHE` tell it. Where the directory
    cannot be made, programs are compiled at each start, and stderr says so.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    path = cache_directory()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"moejax: compiled programs are not kept: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)


def cache_directory() -> Path:
    """Returns the directory of this kind of processor: others may lack its instructions."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moejax" / f"programs-{_kind_of_processor()}"


def _kind_of_processor() -> str:
    """Returns a short hash of the processor's name and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.machine(), platform.processor()]
    kept = {line for line in lines if line.startswith(("model name", "flags", "CPU", "Features"))}
    return hashlib.sha256("\n".join(sorted(kept or lines)).encode()).hexdigest()[:16]
