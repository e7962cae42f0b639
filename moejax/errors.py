"""Errors with exit codes of their own, and how commands report them.

The codes and what they mean: docs/formats/exit.md.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk or quota
# Errors of a place that may not be written, as one that was mounted again read-only.
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
STOPPED = 3  # exit code of a run that was asked to stop before its last step


class InputError(ValueError):
    """A wrong setting, file or checkpoint. Shown as one line; the process exits with code 2.

    The message says, in this order: what is wrong, the value seen, the rule, what to do.
    """


class RunError(Exception):
    """Ends a run in a way that a script should be able to tell apart. Shown as one line.

    The message says what happened, which checkpoint is safe, and what to do.
    """

    code = 1


class DivergedError(RunError):
    """Too many updates in a row were not finite, so the run would only waste time."""

    code = 4


class StorageFullError(RunError):
    """No space is left for what the run must write."""

    code = 5


class NotWritableError(StorageFullError):
    """What the run must write can no longer be written, though there may be space."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the error of a full disk into one line.

    Raises:
      StorageFullError: in place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StorageFullError(_no_space(f"{path}: {error.strerror}")) from error
        raise


def _no_space(seen: str) -> str:
    return (
        f"no space left. {seen}. What was finished before is whole. Free some space, and run the "
        f"same command again."
    )


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically, because a run may be stopped at any moment.

    Raises:
      StorageFullError: the old file is unchanged.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def exit_code(
    run: Callable[[], int | None], *, stopped: str, debug: bool = False, files: bool = False
) -> int:
    """Runs a command and returns its exit code.

    Args:
      run: returns the exit code, or None for 0.
      stopped: text after Ctrl-C about what was written.
      debug: raise InputErrors, to show their tracebacks.
      files: treat errors of the file system as bad input.
    """
    try:
        return run() or 0
    except OSError as error:
        if debug or not (files or error.errno in FULL):
            raise
        full = error.errno in FULL
        print(f"moejax: error: {_no_space(str(error)) if full else error}", file=sys.stderr)
        return StorageFullError.code if full else 2
    except InputError as error:
        if debug:
            raise
        print(f"moejax: error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        if debug:
            raise
        print(f"moejax: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"moejax: stopped; {stopped}", file=sys.stderr)
        return 130
