"""The folder of a run in a host's memory, closed to other users."""

import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from moejax.errors import InputError
from moejax.runtime.processes import boot_id

HOST = "MOEJAX_HOST"
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def host_name() -> str:
    """Returns the name of the host that this process is on: MOEJAX_HOST, else the system's.

    Raises:
      InputError: if it is no plain name.
    """
    name = os.environ.get(HOST) or socket.gethostname()
    if not PLAIN.fullmatch(name):
        raise InputError(
            f"host has no plain name. It is {name!r}. A name has letters, digits, dots, hyphens "
            f"and underscores, 128 at most. Set {HOST} to another name, different on each host."
        )
    return name


def machine_of(folder: Path) -> str:
    """Returns an identity of this host's memory.

    It joins the boot of this machine with the folder's device and inode, because containers of one
    machine have folders of their own.
    """
    info = folder.stat()
    return f"{boot_id()} {info.st_dev} {info.st_ino}"


def folder_of(memory_dir: str, run_dir: str) -> Path:
    """Returns the folder of this host for a run, given the absolute path of its directory."""
    digest = hashlib.sha256(run_dir.encode()).hexdigest()[:16]
    return Path(memory_dir) / f"moejax-{digest}" / host_name()


def open_folder(folder: Path) -> None:
    """Makes the folder of a host, and checks that nobody else can read or change it.

    Raises:
      InputError: if it cannot be written, or others have access.
    """
    run, top = folder.parent, folder.parent.parent
    try:
        top.mkdir(parents=True, exist_ok=True)
        if (mode := top.stat().st_mode) & 0o022 and not mode & stat.S_ISVTX:
            _refuse(top, f"others may rename what is in it (mode {stat.S_IMODE(mode):o})")
        for path in (run, folder):
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            info = path.lstat()  # of a link itself: its owner chooses where it leads
            mode, is_folder = stat.S_IMODE(info.st_mode), stat.S_ISDIR(info.st_mode)
            if not is_folder or info.st_uid != os.geteuid() or mode & 0o077:
                kind = "a folder" if is_folder else "no folder"
                _refuse(path, f"it is {kind} of user {info.st_uid} with mode {mode:o}")
        with tempfile.TemporaryFile(dir=folder):  # it can be written
            pass
    except OSError as error:
        _refuse(folder, error.strerror or str(error))


def _refuse(path: Path, seen: str) -> None:
    raise InputError(
        f"state cannot be kept in memory. {path}: {seen}. It must be a folder that this user "
        "alone may read and write. Name another folder in checkpoint.memory_dir, or set "
        "checkpoint.memory_every=none."
    )


def check_room(folder: Path, needed: int, reusable: int) -> None:
    """Raises InputError if the slots of a host do not fit into its memory.

    Args:
      needed: bytes of all slots of the host.
      reusable: bytes of the slots that an earlier start left there.
    """
    free = shutil.disk_usage(folder).free + reusable
    if free < needed:
        raise InputError(
            f"memory is too small for the state. {folder} has {free:,} bytes, two copies of this "
            f"host's part and of its neighbour's take {needed:,}. All must fit. Enlarge the file "
            f"system, or set checkpoint.memory_every=none."
        )


def remove(folder: Path) -> None:
    """Removes the folder of a host, and the run's folder if no other host has one in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
