"""Checks that outputs can be written, before work whose result would be lost."""

import tempfile
from pathlib import Path

from moejax.errors import InputError


def check_output(path: Path, shown: str) -> None:
    """Refuses a file that could not be written; leaves nothing behind.

    Args:
      shown: its flag or setting, such as `--out`.
    Raises:
      InputError: if it is a folder, or cannot be written.
    """
    if path.is_dir():
        raise InputError(f"{shown} is {path}, a folder. It must name a file. Add the file's name.")
    check_folder(path.parent, f"{shown} = {path}")


def check_folder(folder: Path, shown: str) -> None:
    """Refuses a folder that could not be made or written to; leaves nothing behind.

    Args:
      shown: its setting, and its meaning.
    Raises:
      InputError: with the system's message.
    """
    existing = folder.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        # Permissions are not enough: a file system may be read-only, or the kernel's.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise InputError(
            f"{shown} cannot be written. {existing}: {error.strerror}. It must be a folder that "
            f"this user may write to. Choose another place."
        ) from error
