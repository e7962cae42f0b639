"""Checks of a run's directory and of the address of process 0. Touches no device."""

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

PATIENCE_S = 5.0  # for an address to answer


class Finding(NamedTuple):
    """The result of a check: whether it holds, and a text."""

    check: str
    holds: bool
    text: str


def check_directory(directory: Path) -> list[Finding]:
    """Tries a run's file operations in a directory; leaves nothing behind.

    If a check fails, the checks that need it are left out.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    # Hosts that share the directory may try it at the same time.
    trial = directory / f".moejax-doctor-{socket.gethostname()}-{os.getpid()}"
    findings = [_try("directory is made", lambda: directory.mkdir(parents=True, exist_ok=True))]
    if findings[-1].holds:
        findings.append(_try("file is written, synced and read back", lambda: _write(trial)))
    if findings[-1].holds:
        findings.append(_try("file is renamed onto another", lambda: _rename(trial)))
        findings.append(_try("lock keeps a second run out", lambda: _lock(trial)))
        free = shutil.disk_usage(directory).free
        findings.append(Finding("free space", free > 0, f"{free / 2**30:,.1f} GiB"))
    for path in directory.glob(f"{trial.name}*"):
        path.unlink()
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()
    return findings


def _try(check: str, run: Callable[[], object]) -> Finding:
    began = time.perf_counter()
    try:
        said = run()
    except OSError as error:
        return Finding(check, False, f"{error.strerror or error}")
    return Finding(check, True, str(said or f"{(time.perf_counter() - began) * 1e3:.0f} ms"))


def _write(trial: Path) -> str:
    content, began = os.urandom(1 << 20), time.perf_counter()
    with trial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if trial.read_bytes() != content:
        raise OSError("what was read is not what was written")
    return f"1 MiB in {(time.perf_counter() - began) * 1e3:.0f} ms"


def _rename(trial: Path) -> None:
    other = trial.with_name(f"{trial.name}-other")
    other.write_text("other")
    other.replace(trial)
    if trial.read_text() != "other" or other.exists():
        raise OSError("the renamed file is not the one that was there")


def _lock(trial: Path) -> None:
    with trial.open("a") as first, trial.open("a") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise OSError("a second lock was given: the file system does not know locks")


def check_coordinator(address: str) -> list[Finding]:
    """Checks that ADDRESS:PORT can be reached, or is free if it is on this machine."""
    check = f"process 0 at {address}"
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        return [Finding(check, False, "no ADDRESS:PORT")]
    try:
        family, *_, found = socket.getaddrinfo(host.strip("[]"), int(port))[0]
    except OSError as error:
        return [Finding(check, False, f"its name is not known here: {error.strerror}")]
    with (
        contextlib.suppress(OSError),
        socket.create_server((str(found[0]), int(port)), family=family),
    ):
        return [Finding(check, True, "is of this machine, and the port is free")]
    try:
        with socket.create_connection((str(found[0]), int(port)), timeout=PATIENCE_S):
            return [Finding(check, True, "answers")]
    except ConnectionRefusedError:
        return [Finding(check, True, "its machine answers; nobody listens there yet")]
    except OSError as error:
        why = error.strerror or f"no answer within {PATIENCE_S:.0f} s"
        return [Finding(check, False, f"{why}: a firewall, or the wrong address")]


def show_findings(findings: Sequence[Finding], console: Console) -> int:
    """Prints a table of findings, and a verdict. Returns the exit code: 1 if one does not hold."""
    table = Table("check", "holds", "")
    for one in findings:
        table.add_row(one.check, "yes" if one.holds else "NO", one.text)
    console.print(table)
    failed = [one.check for one in findings if not one.holds]
    verdict = f"not ready: {', '.join(failed)}" if failed else "ready"
    console.print(verdict, highlight=False, soft_wrap=True)
    return 1 if failed else 0
