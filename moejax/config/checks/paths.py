"""Checks that outputs can be written, before work begins, and that settings hold no secrets."""

import tempfile
from pathlib import Path

from moejax.config.fields import fields, get_value
from moejax.config.schema import Config
from moejax.errors import InputError, without_logins

PATTERN = "*?["  # characters of a glob


def check_output(path: Path, shown: str) -> None:
    """Raises InputError for a folder, or a file that cannot be written; leaves nothing behind.

    Args:
      shown: its flag or setting, such as `--out`.
    """
    if path.is_dir():
        raise InputError(f"{shown} is {path}, a folder. It must name a file. Add the file's name.")
    check_folder(path.parent, f"{shown} = {path}")


def check_folder(folder: Path, shown: str) -> None:
    """Raises InputError for a folder that cannot be made or written to; leaves nothing behind.

    Args:
      shown: its setting, and its meaning.
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


def check_plain(path: Path | str, shown: str) -> None:
    """Raises InputError for a place of checkpoints whose name libraries would read as a glob.

    Orbax 0.12 and fsspec look for their own files with globs, and do not escape the folder in
    front: in `runs/exp[lr=1e-3]` they find nothing, or another folder's files.

    Args:
      path: path of a folder, checked with its parents; or the text of a remote place.
      shown: its setting or flag.
    """
    where = str(path.absolute() if isinstance(path, Path) else path)
    if found := [character for character in PATTERN if character in where]:
        raise InputError(
            f"{shown} cannot hold checkpoints. {where} has {' and '.join(found)}. The library that "
            f"writes them reads {' '.join(PATTERN)} as a pattern, also in folders above. Choose or "
            f"rename to a place without them."
        )


def check_places(cfg: Config) -> None:
    """Raises InputError for places of checkpoints, or of copies, that `check_plain` refuses."""
    check_plain(Path(cfg.run_dir), f"`run_dir` = {cfg.run_dir}")
    if cfg.checkpoint.copy_to is not None:
        check_plain(cfg.checkpoint.copy_to, "`checkpoint.copy_to`")


def check_no_secrets(cfg: Config) -> None:
    """Raises InputError for URLs with a login: a run writes its config down, and shows it."""
    for name in fields():
        value = get_value(cfg, name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (shown := without_logins(text)) != text:
                raise InputError(
                    f"`{name}` holds a login. It is {shown}. Settings are written to config.json "
                    f"and shown, so none is secret. Put the login into the environment, as the "
                    f"library that opens the place reads it."
                )
