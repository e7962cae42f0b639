"""Disk space for checkpoints: checked before it is needed, and one line when there is none."""

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moejax.errors import FULL, StorageFullError
from moejax.runtime.processes import Processes
from moejax.train.manifest import finished_steps

MESSAGES = tuple(os.strerror(number) for number in FULL)  # tensorstore gives only a message


def is_full(error: BaseException | None) -> bool:
    """Whether an error or its cause is a full disk or quota."""
    while error is not None:
        if getattr(error, "errno", None) in FULL or any(text in str(error) for text in MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full_error(directory: Path, step: int, seen: str) -> StorageFullError:
    """Returns the error for a checkpoint that could not be written."""
    steps = finished_steps(directory)
    safe = f"Step {max(steps)} is safe" if steps else "No step was saved before"
    return StorageFullError(
        f"no space left for the checkpoint of step {step}. {directory}: {seen}. {safe}. Free some "
        f"space, and run the same command again."
    )


@contextmanager
def naming_full_disk(directory: Path, step: int) -> Iterator[None]:
    """Turns errors of a full disk into one line.

    Raises:
      StorageFullError: names the last complete step.
    """
    try:
        yield
    except Exception as error:
        if is_full(error):
            raise disk_full_error(directory, step, "the disk is full") from error
        raise


def check_disk_space(directory: Path, needed: int, step: int, processes: Processes) -> int:
    """Returns the free bytes where checkpoints are written.

    Raises:
      StorageFullError: in all processes, if a checkpoint of `needed` bytes does not fit.
    """
    # All processes write to one directory, so process 0 answers for all.
    there = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = processes.from_first(lambda: shutil.disk_usage(there).free)
    if free < needed:
        raise disk_full_error(
            directory, step, f"{free:,} bytes are free, it takes about {needed:,}"
        )
    return free


class _NotFull(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not is_full(error) and not any(phrase in record.getMessage() for phrase in MESSAGES)


QUIET = _NotFull()


def quiet_about_full_disks() -> None:
    """Suppresses Orbax's hundreds of log lines about a full disk; moejax reports one."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(QUIET)
    before = sys.unraisablehook
    if before.__module__ == __name__:
        return

    def hook(event: Any) -> None:
        # A failed write closes the event loop that tensorstore's other writes report to.
        closed = isinstance(event.exc_value, RuntimeError) and "loop is closed" in str(
            event.exc_value
        )
        if not (closed and event.object is None) and not is_full(event.exc_value):
            before(event)

    sys.unraisablehook = hook
