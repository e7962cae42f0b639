"""Whether a place can be written to, asked before work whose result would be lost."""

import tempfile
from pathlib import Path

from moejax.errors import InputError


def check_output(path: Path, shown: str) -> None:
    """Refuses a file that could not be written; makes nothing that stays.

    Args:
      shown: what names it, such as `--out`.
    Raises:
      InputError: it is a folder, or nothing can be written where it would be.
    """
    if path.is_dir():
        raise InputError(f"{shown} is {path}, a folder. It must name a file. Add the file's name.")
    check_folder(path.parent, f"{shown} = {path}")


def check_folder(folder: Path, shown: str) -> None:
    """Refuses a folder that could not be made or written to; makes nothing that stays.

    Args:
      shown: what names it, and what it is.
    Raises:
      InputError: saying what the system says.
    """
    existing = folder.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        # Permissions do not tell all: a file system may be read-only, or made by the kernel.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise InputError(
            f"{shown} cannot be written. {existing}: {error.strerror}. It must be a folder that "
            f"this user may write to. Choose another place."
        ) from error
