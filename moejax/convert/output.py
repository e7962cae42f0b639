"""Writes a folder beside its place and renames it at the end; shows progress."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moejax.config.checks.paths import check_folder
from moejax.errors import InputError, StorageFullError
from moejax.runtime.processes import Processes
from moejax.screen import text_column


def check_new_folder(out: Path) -> None:
    """Refuses an output folder that has something in it, or cannot be made.

    Raises:
      InputError: names the folder.
    """
    if out.name in ("", ".."):
        raise InputError(
            f"output has no name. --out is {out}. It must end in the name of a new folder. Write "
            "one."
        )
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise InputError(
            f"output exists. --out {out} is there already. Nothing is replaced unasked. Remove "
            "it, or name another folder."
        )
    check_folder(out.parent, f"--out {out}")


@contextmanager
def written_beside(out: Path, processes: Processes) -> Iterator[Path]:
    """Makes a folder beside `out` and renames it at the end; removes it on any error.

    All processes enter and leave together; process 0 makes, renames and removes.
    """
    beside = out.with_name(f"{out.name}.partial")

    def make() -> None:
        # Leftovers of a killed conversion.
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)

    processes.from_first(make)
    try:
        yield beside
        processes.gather("complete")
        processes.from_first(lambda: _rename(beside, out))
    except BaseException:
        if processes.first:
            shutil.rmtree(beside, ignore_errors=True)
        raise


def _rename(beside: Path, out: Path) -> None:
    if out.is_dir():  # empty: `check_new_folder`
        out.rmdir()
    beside.rename(out)


def check_space(folder: Path, needed: int, processes: Processes) -> None:
    """Refuses output that will not fit on the disk.

    Raises:
      StorageFullError: in all processes; says how much is free.
    """
    place = folder.absolute()
    there = next(path for path in (place, *place.parents) if path.is_dir())
    free = processes.from_first(lambda: shutil.disk_usage(there).free)
    if free < needed:
        raise StorageFullError(
            f"no space left. {there} has {free:,} bytes free, {folder} takes about {needed:,}. "
            "Free some space, or name another folder."
        )


@contextmanager
def bar(console: Console, text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, and one line elsewhere. Yields a function that advances it."""
    times = TimeElapsedColumn(), TimeRemainingColumn()
    columns = text_column(), BarColumn(), TaskProgressColumn(), *times
    if not (drawn := console.is_terminal):
        console.print(text, highlight=False, soft_wrap=True)
    with Progress(*columns, console=console, transient=True, disable=not drawn) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.update(task, advance=done)
