"""Checkpoints that are verified before they are trusted. The only user of Orbax.

Orbax writes shards asynchronously and commits by renaming, but a flipped bit restores silently. So
after each commit a thread writes a manifest with the size and SHA-256 of every file, last and
atomically; a step without a manifest was never finished. A restore takes the newest step whose
files match, and sets damaged ones aside as `STEP.corrupt`. Format: docs/formats/checkpoint.md.
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from moejax.errors import InputError
from moejax.runtime.processes import ALONE, Processes
from moejax.train.state import TrainState

FORMAT_VERSION = 1
MANIFEST = "moejax_manifest.json"


class Saved(NamedTuple):
    """A finished checkpoint: its step and directory, and what its manifest says."""

    step: int
    path: Path
    manifest: dict[str, Any]


class Checkpoints:
    """Saves the state of one run, and restores it."""

    def __init__(self, directory: Path, *, keep: int, processes: Processes = ALONE):
        """Takes the processes that save together, into one directory that all of them see."""
        self.directory, self.keep, self._first = directory.absolute(), keep, processes.first
        options = ocp.CheckpointManagerOptions(max_to_keep=None, create=True)
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[int] | None = None

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Starts a save and returns when the state has been copied out of the way.

        Raises what a previous save failed with: a returned save is no commit.

        Args:
          facts: kept in the manifest: config, mesh, data position.
        """
        self.wait()
        items = {name: ocp.args.StandardSave(_flat(tree)) for name, tree in _items(state).items()}
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._pending = self._thread.submit(self._finish, step, facts)

    def finished(self) -> int | None:
        """The step of a save that finished since the last call, if any."""
        if self._pending is None or not self._pending.done():
            return None
        done, self._pending = self._pending, None
        return done.result()

    def wait(self) -> int | None:
        """Waits for the save under way. Returns its step."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Waits for the save under way, then stops the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._manager.close()

    def _finish(self, step: int, facts: dict[str, Any]) -> int:
        """After the commit: digests, the manifest, and only then the removal of old steps."""
        # Returns when the files of every process are there.
        self._manager.wait_until_finished()
        if self._first:
            write_manifest(self.directory / str(step), {"step": step, **facts})
            for old in sorted(finished_steps(self.directory))[: -self.keep]:
                # Not through the manager: its delete waits for the other processes on a device,
                # where their steps are under way.
                shutil.rmtree(self.directory / str(old))
        return step

    def restore(self, saved: Saved, abstract: TrainState, *, reduction: bool = True) -> TrainState:
        """Reads the state onto the devices and shardings that `abstract` names.

        Args:
          reduction: whether that is read too; else it is None in what is returned.
        """
        names = ("counters", "weights", "optimizer", *(["reduction"] if reduction else []))
        read = restore_items(saved.path, abstract, names)
        kept = read.get("reduction", abstract.reduction if reduction else None)
        parts = read["counters"] | read["weights"]
        return TrainState(**parts, optimizer=read["optimizer"], reduction=kept)


def newest(
    directory: Path, verify: str, processes: Processes = ALONE
) -> tuple[Saved | None, list[str]]:
    """The newest checkpoint whose files match their digests, and what was set aside to find it.

    Touches no device. All processes verify, and return the same.

    Raises:
      InputError: if all are damaged, or a newer version wrote them.
    """
    notes, steps = processes.from_first(lambda: _survey(directory))
    for step in steps:
        path = directory / str(step)
        saved, damage = _verified(path, verify, processes)
        if damage is None:
            return saved, notes
        notes += processes.from_first(partial(_set_aside, path, "corrupt", damage))
    # Also those that an earlier start set aside: else the second attempt would begin from nothing.
    damaged = processes.from_first(lambda: sorted(p.name for p in directory.glob("*.corrupt")))
    if damaged:
        raise InputError(
            f"no whole checkpoint in {directory}. Found {'; '.join(notes) or ', '.join(damaged)}. "
            f"A run never restarts silently from nothing. Restore the files from a copy, set "
            f"another run_dir, or remove what was set aside to begin again."
        )
    return None, notes


def _survey(directory: Path) -> tuple[list[str], list[int]]:
    """Tidies the directory; what was set aside, and the finished steps, newest first."""
    notes = _sweep(directory) if directory.is_dir() else []
    return notes, sorted(finished_steps(directory), reverse=True)


def _verified(path: Path, verify: str, processes: Processes) -> tuple[Saved, str | None]:
    """A finished step, and what any process finds wrong with its files; None: they are whole.

    Digests take long, so each process compares its share of them.
    """
    manifest = processes.together(lambda: read_manifest(path))
    found = find_damage(path, manifest, verify, part=(processes.index, processes.count))
    damage = next(filter(None, processes.gather(found)), None)
    return Saved(int(manifest["step"]), path.absolute(), manifest), damage


def _items(state: TrainState) -> dict[str, Any]:
    """The parts of the state that are stored apart, so that weights can be read alone."""
    return {
        "counters": {"step": state.step, "skipped": state.skipped},
        "weights": {"params": state.params, "balance": state.balance},
        "optimizer": state.optimizer,
        **({"reduction": state.reduction} if jax.tree.leaves(state.reduction) else {}),
    }


def _flat(tree: Any) -> dict[str, Any]:
    """Names each leaf by its path: one plain dict, whatever containers optax uses."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def restore_items(path: Path, abstract: TrainState, names: tuple[str, ...]) -> dict[str, Any]:
    """Reads some items of a checkpoint, shaped and sharded like those of `abstract`."""
    wanted = {name: tree for name, tree in _items(abstract).items() if name in names}
    handler = ocp.CompositeCheckpointHandler()
    args = {name: ocp.args.StandardRestore(_flat(tree)) for name, tree in wanted.items()}
    with ocp.Checkpointer(handler) as reader:
        read = reader.restore(path, args=ocp.args.Composite(**args))
    return {
        name: jax.tree.unflatten(jax.tree.structure(tree), [read[name][key] for key in _flat(tree)])
        for name, tree in wanted.items()
    }


def finished_steps(directory: Path) -> list[int]:
    """Steps that have a manifest."""
    found = directory.glob(f"*/{MANIFEST}")
    return [int(path.parent.name) for path in found if path.parent.name.isdigit()]


def write_manifest(path: Path, facts: dict[str, Any]) -> None:
    """Records every file of a committed step; written beside, synced, then renamed into place."""
    files = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.relative_to(path).as_posix()
        files[name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    manifest = {"format_version": FORMAT_VERSION, **facts, "files": files}
    beside = path / f"{MANIFEST}.tmp"
    with beside.open("w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    beside.rename(path / MANIFEST)


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a step directory.

    Raises:
      InputError: if there is none, or a newer moejax wrote it.
    """
    file = path / MANIFEST
    if not file.is_file():
        found = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
        raise InputError(
            f"no finished checkpoint at {path}. Found {', '.join(found[:8]) or 'nothing'}. A "
            f"finished one holds {MANIFEST}. Name a run directory or one of its checkpoints/STEP."
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = int(manifest["format_version"])
        if version <= FORMAT_VERSION:
            _ = int(manifest["step"])
            _ = [(facts["bytes"], facts["sha256"]) for facts in manifest["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"manifest is damaged. {file}: {error!r}. It must be the JSON that moejax wrote. "
            f"Restore it from a copy, or rename the directory to {path.name}.corrupt to go on "
            f"with an older checkpoint."
        ) from error
    if version > FORMAT_VERSION:
        raise InputError(
            f"checkpoint of a newer moejax. {path} has format {version}. This version reads up to "
            f"{FORMAT_VERSION}. Upgrade moejax."
        )
    return manifest


def find_damage(
    path: Path, manifest: dict[str, Any], verify: str, part: tuple[int, int] = (0, 1)
) -> str | None:
    """Says what is wrong with a checkpoint's files; None when they are whole.

    Args:
      verify: "full" compares digests, "size" only sizes.
      part: compares the digests of the first of so many shares of the files.
    """
    for number, (name, facts) in enumerate(manifest["files"].items()):
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, expected {facts['bytes']}"
        compared = verify == "full" and number % part[1] == part[0]
        if compared and (found := sha256(file)) != facts["sha256"]:
            return f"{name} has digest {found[:12]}, expected {facts['sha256'][:12]}"
    return None


def sha256(file: Path) -> str:
    """Returns the digest of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sweep(directory: Path) -> list[str]:
    """Removes what a killed run left half written, and sets aside what it left without digests."""
    for left in directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(left, ignore_errors=True)
    notes = []
    for path in sorted(directory.iterdir()):
        if path.is_dir() and path.name.isdigit() and not (path / MANIFEST).is_file():
            notes += _set_aside(path, "unfinished", "no manifest")
    return notes


def _set_aside(path: Path, kind: str, reason: str) -> list[str]:
    """Renames a step's directory so that nothing takes it for a checkpoint. Returns the note."""
    aside = path.with_name(f"{path.name}.{kind}")
    # One of the same step is older: the run has passed that step again since.
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return [f"checkpoint {path.name} set aside as {aside.name}: {reason}"]


def locate(source: str, verify: str, processes: Processes = ALONE) -> Saved:
    """Finds the checkpoint that `checkpoint.init_from` names: a run directory or one step.

    Raises:
      InputError: if there is none, or its files are damaged.
    """
    path = Path(processes.from_first(lambda: str(_newest_below(Path(source)))))
    saved, damage = _verified(path, verify, processes)
    if damage is not None:
        raise InputError(
            f"checkpoint is damaged. {path}: {damage}. Its files must match the manifest. Copy it "
            f"again, or name an older step."
        )
    return saved


def _newest_below(path: Path) -> Path:
    """The newest finished step of a run or checkpoints directory; else the path itself."""
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    steps = finished_steps(path) if path.is_dir() else []
    return path / str(max(steps)) if steps else path
