"""Finds and verifies finished checkpoints on disk, and sets damaged ones aside.

Nothing here touches a device, and nothing reads arrays (`checkpoint.writer` does).
"""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from moejax.checkpoint.manifest import (
    MANIFEST,
    DamagedError,
    find_damage,
    finished_steps,
    is_step,
    read_manifest,
)
from moejax.errors import InputError
from moejax.runtime.processes import ALONE, Processes


class Saved(NamedTuple):
    """A finished checkpoint: its step, directory and manifest."""

    step: int
    path: Path
    manifest: dict[str, Any]


def newest(
    directory: Path, verify: str, processes: Processes = ALONE
) -> tuple[Saved | None, list[str]]:
    """Returns the newest intact checkpoint, and notes about damaged ones that were set aside.

    Touches no device. All processes verify, and return the same. A step whose files, manifest or
    name changed is set aside, and the step before it is tried.

    Raises:
      InputError: if all are damaged, or a newer moejax wrote them.
    """
    notes, steps = processes.from_first(lambda: _survey(directory))
    for step in steps:
        path = directory / str(step)
        saved, damage = _verified(path, verify, processes)
        if saved is not None:
            return saved, notes
        notes += quarantine(path, damage, processes)
    # Counts steps set aside by an earlier start too: else a second attempt would start anew.
    damaged = processes.from_first(lambda: sorted(p.name for p in directory.glob("*.corrupt")))
    if damaged:
        raise InputError(
            f"no whole checkpoint in {directory}. Found {'; '.join(notes) or ', '.join(damaged)}. "
            f"A run never restarts silently from nothing. Restore the files from a copy, set "
            f"another run_dir, or remove what was set aside to begin again."
        )
    return None, notes


def _survey(directory: Path) -> tuple[list[str], list[int]]:
    """Removes half-written steps of a killed run, and sets aside steps without digests.

    Returns notes, and the finished steps, newest first.
    """
    notes: list[str] = []
    if directory.is_dir():
        remove_half_written(directory)
        for path in sorted(directory.iterdir()):
            if path.is_dir() and is_step(path.name) and not (path / MANIFEST).is_file():
                notes += quarantine(path, "no manifest", kind="unfinished")
    return notes, sorted(finished_steps(directory), reverse=True)


def _verified(path: Path, verify: str, processes: Processes) -> tuple[Saved | None, str]:
    """Returns a step if it is intact, and otherwise the damage that a process found.

    Digests take long, so each process compares a share of them.
    """

    def look() -> tuple[dict[str, Any], str | None]:
        try:
            manifest = read_manifest(path)
        except DamagedError as error:
            return {}, str(error)
        return manifest, find_damage(path, manifest, verify, (processes.index, processes.count))

    manifest, damage_seen = processes.together(look)
    damage = next(filter(None, processes.gather(damage_seen)), None)
    if damage is not None:
        return None, damage
    return Saved(manifest["step"], path.absolute(), manifest), ""


def quarantine(
    path: Path, reason: str, processes: Processes = ALONE, *, kind: str = "corrupt"
) -> list[str]:
    """Renames a step to STEP.`kind`: nothing takes it for a checkpoint then. Returns the notes."""
    aside = path.with_name(f"{path.name}.{kind}")

    def rename() -> list[str]:
        # An earlier one of the same step is older, from before the run repeated that step.
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        return [f"checkpoint {path.name} set aside as {aside.name}: {reason}"]

    return processes.from_first(rename)


def remove_half_written(directory: Path) -> None:
    """Removes the files of saves that were killed or failed before Orbax committed them."""
    for _ in range(20):
        for left in directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)
        if not any(directory.glob("*.orbax-checkpoint-tmp*")):
            break
        time.sleep(0.1)  # the last writes of a failed save still end there
    for trial in directory.glob(".writable*"):
        trial.unlink(missing_ok=True)


def locate(source: str, verify: str, processes: Processes = ALONE) -> Saved:
    """Finds the checkpoint that `checkpoint.init_from` names: a run directory or one step.

    Raises:
      InputError: if there is none, or its files are damaged.
    """
    path = next(iter(_steps_below(source, processes)), Path(source))
    saved, damage = _verified(path, verify, processes)
    if saved is None:
        raise InputError(
            f"checkpoint is damaged. {path}: {damage}. Its files must match the manifest. Copy it "
            f"again, or name an older step."
        )
    return saved


def latest_intact(
    source: str, step: int | None, verify: str, processes: Processes = ALONE
) -> tuple[Saved, list[str]]:
    """Returns the newest intact checkpoint, and notes about damaged ones. Changes no file.

    Args:
      source: a run directory, its checkpoints, or one of them.
      step: the wanted step; None for the newest.
    Raises:
      InputError: if there is none.
    """
    found = _steps_below(source, processes)
    paths = [path for path in found if step is None or path.name == str(step)]
    if step is not None and not paths:
        raise InputError(
            f"no checkpoint of step {step}. {source} has steps {_numbers(found)}. A run keeps its "
            "newest ones. Name one of them, or leave --step out."
        )
    saved, notes = _first_intact(paths or [Path(source)], verify, processes)
    if saved is None:
        raise InputError(
            f"no whole checkpoint. {'; '.join(notes)}. Files must match their manifest. Restore "
            "them from a copy."
        )
    return saved, notes


def intact_before(
    run_dir: Path, step: int, verify: str, processes: Processes = ALONE
) -> tuple[Saved, list[str]]:
    """Returns a run's newest intact checkpoint before a step, and notes. Changes no file.

    Raises:
      InputError: if there is none.
    """
    found = _steps_below(run_dir, processes)
    before = [path for path in found if int(path.name) < step]
    saved, notes = _first_intact(before, verify, processes)
    if saved is None:
        raise InputError(
            f"no whole checkpoint before step {step}. "
            f"{'; '.join([f'{run_dir} has steps {_numbers(found)}', *notes])}. A step is run again "
            "from one before it. Name a later step."
        )
    return saved, notes


def _first_intact(
    paths: Iterable[Path], verify: str, processes: Processes
) -> tuple[Saved | None, list[str]]:
    """Returns the first intact checkpoint, if any, and notes about the damaged ones before it."""
    notes: list[str] = []
    for path in paths:
        saved, damage = _verified(path, verify, processes)
        if saved is not None:
            return saved, notes
        notes.append(f"checkpoint {path} is damaged: {damage}")
    return None, notes


def _numbers(steps: Iterable[Path]) -> str:
    return ", ".join(path.name for path in steps) or "none"


def _steps_below(source: str | Path, processes: Processes) -> list[Path]:
    """Returns the finished steps of a run or checkpoints directory, newest first."""
    path = Path(source)

    def find() -> list[str]:
        below = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        steps = finished_steps(below) if below.is_dir() else []
        return [str(below / str(step)) for step in sorted(steps, reverse=True)]

    return [Path(step) for step in processes.from_first(find)]
