"""A disk that becomes full in the middle of a run: a real one, a small tmpfs.

One that becomes read-only is tried on saves alone (tests/checkpoint/test_disk_space.py): Linux does
not mount a file system again read-only while a run writes to its logs there.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MEBIBYTES = 64
FILLER = "of-others"


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Makes a folder a file system of its own. Needs root."""
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={MEBIBYTES}m", "none", str(folder))
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def may_mount() -> bool:
    """Whether this user may mount file systems here."""
    apart = ("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt")
    return os.geteuid() == 0 and subprocess.run(apart, capture_output=True).returncode == 0


def fill(folder: Path) -> Callable[[int], None]:
    """Returns a fault: others take all that is free."""

    def fault(_: int) -> None:
        with (folder / FILLER).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free)

    return fault


def empty(folder: Path) -> None:
    """Gives it back."""
    (folder / FILLER).unlink()
