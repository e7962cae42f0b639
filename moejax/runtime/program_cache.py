"""Keeps compiled programs in the user's cache directory: a second start need not compile.

They are JAX's programs, and libraries of foreign functions in C++, which they call.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from moejax.runtime.patches import keep_program, keep_programs_by

MAX_BYTES = 8 << 30  # then JAX removes the least recently used programs
FLAGS = ("-w", "-shared", "-fPIC", "-std=c++17", "-pthread")
MIN_COMPILE_S = 0.1  # JAX's own is a second, but a start has many small programs


def keep_programs() -> None:
    """Turns JAX's cache on, unless JAX was told where to keep programs, or not to.

    `JAX_COMPILATION_CACHE_DIR` and `JAX_ENABLE_COMPILATION_CACHE` tell it. Where the directory
    cannot be made, programs are compiled at each start, and stderr says so.
    """
    if not jax.config.jax_enable_compilation_cache:
        return
    keep_programs_by(_write)
    if jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    folder = user_cache()
    if folder is None:
        print(
            "moejax: compiled programs are not kept: this user has no home directory. Name a "
            "directory in XDG_CACHE_HOME to keep them.",
            file=sys.stderr,
        )
        return
    path = folder / f"programs-{_kind_of_processor()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"moejax: compiled programs are not kept: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)


def _write(key: str, compile_s: float, name: str, backend: Any, executable: Any, *_: Any) -> None:
    """Keeps a program that took long to compile, in JAX's place.

    JAX's own function (0.10 to 0.12) does so in process 0 alone. But hosts have caches of their
    own, and on CPU each process compiles another program: the others would always compile anew.
    """
    directory = jax.config.jax_compilation_cache_dir or ""
    if "://" in directory and jax.process_index() > 0:
        return  # a store that all processes would write to at once
    if compile_s >= jax.config.jax_persistent_cache_min_compile_time_secs:
        try:
            keep_program(key, name, executable, backend, compile_s)
        except Exception as error:
            warnings.warn(
                f"Error writing persistent compilation cache entry: {error}", stacklevel=2
            )


def user_cache() -> Path | None:
    """Returns moejax's folder in the user's cache; None if the user has no home directory.

    A container may run as a user without an entry in its passwd file, and without HOME.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "moejax"
    try:
        return Path.home() / ".cache" / "moejax"
    except RuntimeError:
        return None


def _kind_of_processor() -> str:
    """Returns a short hash of the processor's name and instruction sets: others may lack some."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.machine(), platform.processor()]
    kept = {line for line in lines if line.startswith(("model name", "flags", "CPU", "Features"))}
    return hashlib.sha256("\n".join(sorted(kept or lines)).encode()).hexdigest()[:16]


class LibraryError(Exception):
    """A library of foreign functions that cannot be compiled or loaded."""


def load_library(source: Path, names: Iterable[str], *flags: str) -> ctypes.CDLL:
    """Loads a library from the user's cache; compiles it if it is not there or does not load.

    Without a home directory it is compiled at each start.

    Args:
      source: its C++.
      names: functions that it must have.
      flags: of the compiler; -O2 if there are none.
    Raises:
      LibraryError: if it cannot be compiled or loaded.
    """
    made_of = f"{jax.__version__} {platform.machine()} {_kind_of_processor()} {flags}"
    digest = hashlib.sha256(source.read_bytes() + made_of.encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = (user_cache() or Path(folder)) / f"{source.stem}-{digest}.so"
        with contextlib.suppress(OSError, AttributeError):  # another system's, or damaged
            return _open(path, names)
        if (reason := compile_library(source, path, *flags)) is not None:
            raise LibraryError(reason)
        try:
            return _open(path, names)
        except (OSError, AttributeError) as error:
            raise LibraryError(f"the library cannot be loaded: {error}") from error


def _open(path: Path, names: Iterable[str]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in names:
        getattr(library, name)
    return library


def compile_library(source: Path, library: Path, *flags: str) -> str | None:
    """Compiles a library of foreign functions. Returns the error, or None."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler (g++)"
    command = [compiler, *(flags or ("-O2",)), *FLAGS]
    command += [f"-I{jax.ffi.include_dir()}", str(source), "-o"]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            subprocess.run(
                [*command, str(built)],
                check=True,
                capture_output=True,
                text=True,
                errors="replace",  # compilers may write in another encoding
            )
            built.replace(library)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"]
        return f"g++ failed: {said[0]}"
    except OSError as error:
        return f"{error.filename or library.parent}: {error.strerror}"
    return None
