"""The list of batches that a run left out, in its directory and in its manifests.

A run that goes back to a checkpoint writes the list to `skipped_data.json` at once, so that a kill
right afterwards does not lose it. Later checkpoints have it in their manifests. Format:
docs/formats/checkpoint.md.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.checkpoint.find import Saved, quarantine
from moejax.checkpoint.manifest import DamagedError, finished_steps, read_manifest, write_synced
from moejax.data.skipped import SkippedData
from moejax.errors import InputError, writing

FILE = "skipped_data.json"  # in the run directory
ENTRY = "skipped_data"  # of a manifest


def to_json(skipped: Sequence[SkippedData]) -> list[dict[str, int]]:
    """Returns a list as JSON values."""
    return [{"after_step": after, "skip": skip} for after, skip in skipped]


def from_json(listed: Any, where: Path) -> list[SkippedData]:
    """Reads the list from JSON values, the inverse of `to_json`.

    Raises:
      InputError: if it is damaged. The message names `where`.
    """
    try:
        found = [SkippedData(entry["after_step"], entry["skip"]) for entry in listed]
        whole = isinstance(listed, list) and all(
            type(after) is type(skip) is int and after >= 0 and skip > 0 for after, skip in found
        )
    except (TypeError, KeyError):
        found, whole = [], False
    if not whole:
        raise InputError(
            f"list of skipped data is damaged. {where} has {str(listed)[:80]}. Each entry has "
            f"after_step, 0 or more, and skip, 1 or more. Restore it from a copy."
        )
    return found


def write_skipped(run_dir: Path, skipped: Sequence[SkippedData]) -> None:
    """Writes the list to the run directory, atomically and so that it survives a crash.

    Raises:
      StorageFullError: if no space is left. The file is unchanged.
    """
    with writing(run_dir / FILE):
        write_synced(run_dir / FILE, to_json(skipped))


def read_skipped(run_dir: Path) -> list[SkippedData]:
    """Returns the list in the run directory; empty without a file.

    Raises:
      InputError: if the file is damaged.
    """
    path = run_dir / FILE
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):  # brackets nested thousands deep
        listed = text
    return from_json(listed, path)


def known_skipped(run_dir: Path, saved: Saved | None) -> list[SkippedData]:
    """Returns the batches that a run left out so far: the longer of the two lists.

    One is in the run directory, one in the manifest of `saved`.

    Args:
      saved: the checkpoint that the run resumes. Older manifests have no list: nothing was left
        out.
    Raises:
      InputError: if the lists contradict each other.
    """
    here = read_skipped(run_dir)
    there = [] if saved is None else from_json(saved.manifest.get(ENTRY, []), saved.path)
    short, long = sorted((here, there), key=len)
    if long[: len(short)] != short:
        raise InputError(
            f"lists of skipped data contradict each other. {run_dir / FILE} has {to_json(here)}, "
            f"the newest checkpoint has {to_json(there)}. One must begin with the "
            f"other. Restore the file that belongs to this run, or set another run_dir."
        )
    return long


def is_abandoned(
    manifest: Mapping[str, Any], skipped: Sequence[SkippedData], before: int | None = None
) -> bool:
    """Whether the run has gone back to a step before this checkpoint's.

    Args:
      skipped: the batches that the run left out, which say how far it went back.
      before: the run now goes back to before this step.
    """
    step = manifest["step"]
    later = skipped[len(manifest.get(ENTRY, [])) :]
    return any(e.after_step < step for e in later) or (before is not None and step >= before)


def quarantine_abandoned(run_dir: Path, before: int | None = None) -> list[str]:
    """Renames checkpoints of steps that the run undid by going back: none of them is resumed.

    Damaged ones stay: the search for the newest checkpoint renames them. Returns notes.
    """
    notes, skipped, directory = [], read_skipped(run_dir), run_dir / "checkpoints"
    for step in sorted(finished_steps(directory)):
        path = directory / str(step)
        try:
            abandoned = is_abandoned(read_manifest(path), skipped, before)
        except DamagedError:
            abandoned = before is not None and step >= before
        if abandoned:
            notes += quarantine(path, "the run went back to before it", kind="abandoned")
    return notes
