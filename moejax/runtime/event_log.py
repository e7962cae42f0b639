"""The run's log of events: one JSON object a line, written at once."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from moejax.errors import InputError, writing


class EventLog:
    """Appends events and metrics to `metrics.jsonl` of a run directory."""

    def __init__(self, path: Path):
        self._path = path
        with writing(path):
            _drop_half_a_line(path)
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, **values: Any) -> None:
        """Adds one line: the time in seconds since 1970, the event, and its values."""
        line = {"time": round(time.time(), 3), "event": event, **values}
        known = {name: _finite(value) for name, value in line.items()}
        with writing(self._path):
            self._file.write(json.dumps(known, allow_nan=False) + "\n")

    def close(self) -> None:
        """Closes the file."""
        with writing(self._path):  # writes the rest of a line that did not fit on the disk
            self._file.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as null, also in a list."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a log, none if there is no log; damaged lines are left out."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from filter(None, map(parse_line, file))


def parse_line(text: str | bytes) -> dict[str, Any]:
    """Returns the object of a line; empty if it holds none, such as half a line after a kill."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):  # brackets nested thousands deep
        return {}
    return line if isinstance(line, dict) else {}


def _drop_half_a_line(path: Path) -> None:
    """Removes an incomplete last line, which a full disk or a kill leaves."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 2**20))  # longer than any line
        file.truncate(start + file.read().rfind(b"\n") + 1)


class RunLock:
    """A lock that keeps a second run out of a run directory until this one ends."""

    def __init__(self, run_dir: Path):
        path = run_dir / "lock"
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                self._file.close()
                raise InputError(
                    f"run directory cannot be locked. {run_dir}: {error.strerror}. Its file system "
                    f"must know flock, which keeps two runs from writing there. Mount it with "
                    f"locks (Lustre: -o flock), or set another run_dir."
                ) from error
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise InputError(
                f"run directory is in use. {run_dir} belongs to {owner}. One live run a directory. "
                f"Wait for it, stop it, or set another run_dir."
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def close(self) -> None:
        """Releases the lock."""
        self._file.close()
