"""Errors with exit codes of their own, and their report by commands.

docs/formats/exit.md lists the codes.
"""

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk or quota
# Errors of a place that cannot be written, such as one that was remounted read-only.
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
STOPPED = 3  # exit code of a run that was asked to stop before its last step
LOGIN = re.compile(r"\b(\w[\w+.-]*://)[^\s/@'\"]+@")  # of a URL, with or without a password
QUERY = re.compile(
    r"([?&][\w.-]*(?:sig|token|key|secret|password|credential)[\w.-]*=)[^\s&'\"]+", re.IGNORECASE
)
# Environment variables that hold secrets, such as WANDB_API_KEY; short values are flags.
SECRET = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
SHORTEST_SECRET = 8
PAGE = re.compile(r"(?<![\w/.-])docs/[\w/]+\.md")  # as texts name pages


class InputError(ValueError):
    """A wrong setting, file or checkpoint. Shown as one line; the process exits with code 2.

    The message says, in this order: what is wrong, the value seen, the rule, what to do.
    """

    code = 2


class RunError(Exception):
    """Ends a run in a way that a script should be able to tell apart. Shown as one line.

    The message says what happened, which checkpoint is safe, and what to do.
    """

    code = 1


class DivergedError(RunError):
    """Too many updates in a row were not finite, so the run would only waste time."""

    code = 4


class MeetingError(RunError):
    """Not all processes of a program came to its start."""

    code = 6


class ReplicasError(RunError):
    """Devices that hold copies of one state hold different numbers."""

    code = 8


class NoMeshError(RunError):
    """No mesh fits the devices that a run has, though others may: hosts of the run may change."""

    code = 9


class HostMemoryError(RunError):
    """A host has too little memory left for the run to go on. All processes find it together."""

    code = 2


class HostAllocationError(RunError):
    """Memory of the host could not be taken, in this process."""

    code = 2


class StorageFullError(RunError):
    """No space is left for the files of the run."""

    code = 5


class NotWritableError(StorageFullError):
    """The files of the run can no longer be written, though there may be space."""


def without_logins(text: str) -> str:
    """Returns a text whose URLs have no user, no password and no token in the query."""
    return QUERY.sub(r"\1***", LOGIN.sub(r"\1***@", text))


def without_secrets(text: str) -> str:
    """Returns a text of another library without logins in URLs and secrets of the environment."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, f"[{name}]")
    return without_logins(text)


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
        f"no space left. {seen}. Files finished before are complete. Free some space, and run the "
        f"same command again."
    )


def _no_file(error: OSError) -> str:
    if error.filename is None:
        return str(error)
    return (
        f"no access to a file. {os.fsdecode(error.filename)}: {error.strerror}. It must be there "
        f"to be read, or in a folder that can be written. Correct the path, or its rights."
    )


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically, because a run may be stopped at any moment.

    Raises:
      StorageFullError: the old file is unchanged.
      OSError: the same for any other reason; it names `path`.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):  # nothing can be there if its folder is not
                partial.unlink(missing_ok=True)
            # The user knows this path, not the one beside it.
            raise OSError(error.errno, error.strerror, str(path)) from error


def located(text: str) -> str:
    """Returns a text in which pages such as `docs/rates.md` are paths that can be opened from here.

    A wheel brings the pages that texts name, beside its modules.
    """
    package = Path(__file__).parent

    def where(match: re.Match[str]) -> str:
        name = match[0]
        folders = (Path(), package, package.parent)
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        return name if found is None else str(found)

    return PAGE.sub(where, text)


def let_print(stream: Any) -> None:
    """Lets a stream take every text: letters outside its encoding become backslash codes.

    Names of files and texts of a model may hold any, and a run must not end because of them.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


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
    let_print(sys.stdout)
    let_print(sys.stderr)
    try:
        return run() or 0
    except OSError as error:
        if debug or not (files or error.errno in FULL):
            raise
        full = error.errno in FULL
        text = _no_space(str(error)) if full else _no_file(error)
        print(f"moejax: error: {located(without_secrets(text))}", file=sys.stderr)
        return StorageFullError.code if full else InputError.code
    except (InputError, RunError) as error:
        if debug:
            raise
        print(f"moejax: error: {located(without_secrets(str(error)))}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"moejax: stopped; {stopped}", file=sys.stderr)
        return 130
