"""Room for checkpoints: checked before it is needed, and one line when nothing can be written."""

import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moejax.checkpoint.manifest import finished_steps
from moejax.errors import FULL, READ_ONLY, InputError, NotWritableError, StorageFullError
from moejax.runtime.processes import Processes

TOLD = (*FULL, *READ_ONLY)  # errors of which moejax says one line


def is_of(error: BaseException | None, numbers: tuple[int, ...]) -> bool:
    """Returns whether an error or its cause has one of the system's numbers, such as `FULL`."""
    while error is not None:
        if getattr(error, "errno", None) in numbers or _says(str(error), numbers):
            return True
        error = error.__cause__ or error.__context__
    return False


def _says(text: str, numbers: tuple[int, ...]) -> bool:
    """Returns whether a message is of such an error: tensorstore gives only messages."""
    return any(os.strerror(number) in text for number in numbers)


def disk_full_error(directory: Path, step: int, seen: str) -> StorageFullError:
    """Returns the error for a checkpoint that could not be written."""
    return StorageFullError(
        f"no space left for the checkpoint of step {step}. {directory}: {seen}. "
        f"{safe_text(directory)}. Free some space, and run the same command again."
    )


def safe_text(directory: Path) -> str:
    """Returns which step a run can go on from."""
    steps = finished_steps(directory)
    return f"Step {max(steps)} is safe" if steps else "No step was saved before"


@contextmanager
def naming_full_disk(directory: Path, step: int) -> Iterator[None]:
    """Turns errors of a full disk, or one that became read-only, into one line.

    Raises:
      StorageFullError: names the last complete step.
    """
    try:
        yield
    except Exception as error:
        if is_of(error, FULL):
            raise disk_full_error(directory, step, "the disk is full") from error
        if is_of(error, READ_ONLY):
            raise _not_writable(directory, step, "it may be read and not written") from error
        raise


def _not_writable(directory: Path, step: int, seen: str) -> NotWritableError:
    return NotWritableError(
        f"the checkpoint of step {step} cannot be written. {directory}: {seen}. "
        f"{safe_text(directory)}. Make it writable, and run the same command again."
    )


def check_writable(directory: Path, processes: Processes) -> None:
    """Raises InputError, in all processes, if one cannot write and sync a file in `directory`."""

    def write() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _try_to_write(directory / f".writable.{processes.index}")
        except OSError as error:
            if error.errno != errno.ENOSPC:  # `check_disk_space` says how much is missing
                raise InputError(
                    f"checkpoints cannot be written. {directory}: {error.strerror}. A run must be "
                    f"able to write there. Make it writable, or set another run_dir."
                ) from error

    processes.together(write)


def _try_to_write(trial: Path) -> None:
    with trial.open("wb") as file:
        file.write(b"moejax")
        file.flush()
        os.fsync(file.fileno())
    trial.unlink()


def check_disk_space(directory: Path, needed: int, step: int, processes: Processes) -> int:
    """Returns the free bytes where checkpoints are written.

    Raises:
      StorageFullError: in all processes, if a checkpoint of `needed` bytes does not fit.
      NotWritableError: in all processes, if nothing can be written there. Orbax would wait five
        minutes for a directory that it cannot make (0.12.8).
    """
    there = next(path for path in (directory, *directory.parents) if path.is_dir())

    def look() -> tuple[int, str | None]:
        try:
            _try_to_write(there / ".writable")
        except OSError as error:
            if error.errno not in FULL:
                return 0, error.strerror
        return shutil.disk_usage(there).free, None

    # All processes write to one directory, so process 0 answers for all.
    free, refused = processes.from_first(look)
    if refused is not None:
        raise _not_writable(directory, step, refused)
    if free < needed:
        raise disk_full_error(
            directory, step, f"{free:,} bytes are free, it takes about {needed:,}"
        )
    return free


class _NotFull(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # The last writes of a failed save find its directory gone.
        swept = isinstance(error, FileNotFoundError) and ".orbax-checkpoint-tmp" in str(error)
        return not (swept or is_of(error, TOLD) or _says(record.getMessage(), TOLD))


QUIET = _NotFull()


def quiet_about_full_disks() -> None:
    """Suppresses Orbax's hundreds of log lines about failed writes; moejax reports one."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(QUIET)
    before = sys.unraisablehook
    if before.__module__ == __name__:
        return

    def hook(event: Any) -> None:
        # A failed write closes the event loop that tensorstore's other writes report to.
        error = event.exc_value
        closed = isinstance(error, RuntimeError) and "loop is closed" in str(error)
        if not (closed and event.object is None) and not is_of(error, TOLD):
            before(event)

    sys.unraisablehook = hook
