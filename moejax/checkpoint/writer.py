"""Checkpoints that are verified before they are trusted.

Orbax writes shards asynchronously and renames the whole step, but a flipped bit restores silently.
So a thread then commits the step (`commit`): last and atomically it writes a manifest with the size
and SHA-256 of every file and with digests of the numbers as they were on the devices; a step
without a manifest was never finished. A restore takes the newest step whose files match, and
`restore` compares the numbers. Format: docs/formats/checkpoint.md.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from moejax.checkpoint.arrays import (
    FILE_BYTES,
    PIECE_BYTES,
    NewArray,
    apart,
    check_written,
    store_of,
)
from moejax.checkpoint.digests import SITES, DeviceSums, add_up, together
from moejax.checkpoint.disk_space import (
    check_disk_space,
    naming_full_disk,
    quiet_about_full_disks,
)
from moejax.checkpoint.find import Saved, remove_half_written
from moejax.checkpoint.manifest import (
    MANIFEST,
    find_damage,
    finished_steps,
    hash_files,
    read_manifest,
    stored_bytes,
    write_manifest,
)
from moejax.checkpoint.remote import Copies
from moejax.errors import InputError, StorageFullError
from moejax.runtime.processes import ALONE, Processes
from moejax.step.state import Sites, TrainState, flat


class OtherProcessError(Exception):
    """Another process could not finish its part of a save. The message has its error."""


def commit(step: Path, facts: Mapping[str, Any], sums: DeviceSums, processes: Processes) -> None:
    """Writes the manifest of a step whose files are all there. All processes call it.

    Orbax's own commit, which renames the step's directory, comes before it.

    Args:
      facts: entries of the manifest.
    Raises:
      OtherProcessError: in process 0, if another process failed.
    """
    share = (processes.index, processes.count)
    here = {"files": hash_files(step, share), "arrays": sums.here()}
    if not processes.first:
        processes.send(_name(step, processes.index), json.dumps(here))
        return
    everywhere = [here]
    for index in range(1, processes.count):
        there = json.loads(processes.receive(_name(step, index)))
        if "error" in there:
            raise OtherProcessError(f"process {index}: {there['error']}")
        everywhere.append(there)
    files = {name: known for part in everywhere for name, known in part["files"].items()}
    arrays = together(part["arrays"] for part in everywhere)
    digests = {"arrays": {key: arrays[key].to_json() for key in sorted(arrays)}}
    write_manifest(step, {**facts, **digests}, files=files)


def tell_first(step: Path, error: Exception, processes: Processes) -> None:
    """Tells process 0 that this process's part of a save failed."""
    if not processes.first:
        processes.send(_name(step, processes.index), json.dumps({"error": str(error)}))


def _name(step: Path, index: int) -> str:
    return f"saved/{step.name}/{index}"


def prune(directory: Path, keep: int) -> None:
    """Removes steps that are older than the newest `keep` complete ones.

    A step counts as complete if its manifest verifies and all file sizes match. Others stay: the
    next start looks at them again and sets them aside.
    """
    whole = 0
    for step in sorted(finished_steps(directory), reverse=True):
        path = directory / str(step)
        if whole >= keep:
            # Not through Orbax's manager: its delete waits for the other processes on a device,
            # where their steps are under way.
            shutil.rmtree(path)
        else:
            with suppress(InputError):
                whole += find_damage(path, read_manifest(path), "size") is None


# A year: `watchdog.save_s` says how long a save may take. Orbax would end one after 20 minutes, and
# by the wall clock (orbax 0.12), so also when the clock is set forward.
SAVE_TIMEOUT_S = 365 * 24 * 3600
ITEMS = (
    "counters",
    "weights",
    "optimizer",
    *SITES,
    "outer",
    "load",
    "reduction",
)


class Checkpoints:
    """Saves the state of one run."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        processes: Processes = ALONE,
        failed: Callable[[int, str], None] = lambda _step, _text: None,
        copies: Copies | None = None,
        copied: Callable[[list[int], str | None], None] = lambda _steps, _error: None,
    ):
        """Takes the processes that save together into one shared directory.

        Args:
          keep: how many complete steps stay.
          failed: told the step and the error of a save that failed, before it is raised.
          copies: destination of copies of finished steps; only in process 0.
          copied: told the copied steps, or the error of a copy, which does not end the run.
        """
        self.directory, self.keep, self._first = directory.absolute(), keep, processes.first
        self._failed, self.copies, self._copied = failed, copies, copied
        waits = ocp.options.AsyncOptions(timeout_secs=SAVE_TIMEOUT_S)
        options = ocp.CheckpointManagerOptions(max_to_keep=None, create=True, async_options=waits)
        # Compressed, trained float32 numbers take 7 % less room and 1.7 times the CPU time.
        plain = {name: ocp.PyTreeCheckpointHandler(use_compression=False) for name in ITEMS}
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=plain)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[int]] | None = None
        self._processes, self._full = processes, False
        quiet_about_full_disks()

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Starts a save and returns when the state has been copied.

        The save is committed later; an error of the previous save is raised here.

        Args:
          facts: entries of the manifest: config, mesh, data position.
        Raises:
          StorageFullError: if less space is free than the newest checkpoint takes.
        """
        self.wait()
        with self._telling(step):
            needed = self._processes.from_first(self._taken)
            check_disk_space(self.directory, needed, step, self._processes)
            arrays = arrays_of(state)
            shapes, sums = {key: x.shape for key, x in arrays.items()}, add_up(arrays)
            args = {name: _save_args(name, flat(tree)) for name, tree in _items(state).items()}
            with self._naming_full_disk(step):
                self._manager.save(step, args=ocp.args.Composite(**args), force=True)
        self._pending = step, self._thread.submit(self._finish, step, facts, shapes, sums)

    def _taken(self) -> int:
        """Returns the newest checkpoint's size on disk; 0 without one."""
        steps = finished_steps(self.directory)
        with suppress(InputError):
            return stored_bytes(read_manifest(self.directory / str(max(steps)))) if steps else 0
        return 0

    def finished(self) -> int | None:
        """Returns the step of a save that finished since the last call, if any."""
        if self.copies is not None:
            self.copies.finished(self._copied)
        return self.wait() if self._pending is not None and self._pending[1].done() else None

    def wait(self) -> int | None:
        """Waits for the save under way. Returns its step."""
        if self._pending is None:
            return None
        (step, pending), self._pending = self._pending, None
        with self._telling(step):
            pending.result()
        if self.copies is not None:
            self.copies.start(self.directory)
        return step

    def wait_with_copies(self) -> int | None:
        """Waits as `wait` does, and for copies, so that finished steps may be renamed."""
        step = self.wait()
        if self.copies is not None:
            self.copies.finished(self._copied, wait=True)
        return step

    def reload(self) -> None:
        """Lists the steps anew, after some were renamed. All processes call it."""
        self._manager.reload()

    @contextmanager
    def _telling(self, step: int) -> Iterator[None]:
        """Reports the error of a save at once, not only at the end of the run."""
        try:
            yield
        except Exception as error:
            self._failed(step, str(error))
            raise

    def close(self) -> None:
        """Waits for the save under way and for copies, then stops the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            # Orbax raises the error of a failed save again, which was already reported.
            with suppress(Exception) if self._full else nullcontext():
                self._manager.close()
            if self._full and self._first:  # Orbax has given up all writes
                remove_half_written(self.directory)
            if self.copies is not None:
                self.copies.close(self.directory, self._copied)

    @contextmanager
    def _naming_full_disk(self, step: int) -> Iterator[None]:
        """Turns errors of a full disk, or one that became read-only, into one line.

        Removes a step without a manifest. `close` removes steps that Orbax has not renamed, or
        else the next start, because its threads may still write there.

        Raises:
          StorageFullError: names the last complete step.
        """
        try:
            with naming_full_disk(self.directory, step):
                yield
        except StorageFullError:
            self._full = True
            renamed = self.directory / str(step)
            if self._first and not (renamed / MANIFEST).is_file():
                shutil.rmtree(renamed, ignore_errors=True)
            raise

    def _finish(
        self,
        step: int,
        facts: dict[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        sums: DeviceSums,
    ) -> int:
        """After Orbax: commits the step (digests and manifest), then removes old steps."""
        path = self.directory / str(step)
        with self._naming_full_disk(step):
            try:
                # Returns when every process has written its files and Orbax has renamed the step.
                self._manager.wait_until_finished()
                if self._first:
                    check_written(path, shapes)
                commit(path, {"step": step, **facts}, sums, self._processes)
            except Exception as error:
                tell_first(path, error, self._processes)
                raise
        if self._first:
            prune(self.directory, self.keep)
        return step


def _items(state: TrainState) -> dict[str, Any]:
    """Returns the state's items. They are stored apart, so that weights can be read alone.

    The keys are part of the file format.
    """
    items: dict[str, Any] = {
        "counters": {"step": state.step, "skipped": state.skipped},
        "weights": {"params": state.params, "balance": state.router_bias},
    }
    if jax.tree.leaves(state.optimizer):  # weights that were imported have none yet
        items["optimizer"] = state.optimizer
    load_LE = state.load_LE
    if (sites := state.sites) is not None:
        own, load_LE = {"params": sites.params, "balance": sites.router_bias}, sites.load_LE
        more = {"sites": own, "sites_optimizer": sites.optimizer, "sites_error": sites.error}
        items |= {name: tree for name, tree in more.items() if jax.tree.leaves(tree)}
        items["outer"] = {"momentum": state.momentum}
    if load_LE is not None:
        items["load"] = {"load": load_LE}
    if jax.tree.leaves(state.reduction):
        items["reduction"] = {"codecs": state.reduction}
    return items


def _save_args(item: str, leaves: dict[str, Any]) -> Any:
    sites = item in SITES
    cut = {
        key: ocp.SaveArgs(chunk_byte_size=PIECE_BYTES, shard_axes=apart(key, x.ndim, sites=sites))
        for key, x in leaves.items()
    }
    return ocp.args.PyTreeSave(leaves, save_args=cut, ocdbt_target_data_file_size=FILE_BYTES)


def by_key(items: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns all arrays of some items by the keys of the manifest's `arrays`."""
    return {f"{name}/{key}": x for name, leaves in items.items() for key, x in leaves.items()}


def arrays_of(state: TrainState) -> dict[str, jax.Array]:
    """Returns the arrays that a checkpoint of the state holds, by key (`by_key`)."""
    return by_key({name: flat(tree) for name, tree in _items(state).items()})


def restore_items(path: Path, abstract: TrainState, names: tuple[str, ...]) -> dict[str, Any]:
    """Reads some items of a checkpoint, shaped and sharded like the items of `abstract`."""
    wanted = {name: tree for name, tree in _items(abstract).items() if name in names}
    handler = ocp.CompositeCheckpointHandler()
    args = {name: ocp.args.StandardRestore(flat(tree)) for name, tree in wanted.items()}
    with ocp.Checkpointer(handler) as reader:
        read = reader.restore(path, args=ocp.args.Composite(**args))
    return {name: _like(tree, read[name]) for name, tree in wanted.items()}


def _like(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns a tree with these leaves, given by path, in the form of another."""
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in flat(tree)])


def restore_state(saved: Saved, abstract: TrainState, *, reduction: bool = True) -> TrainState:
    """Reads the state onto the devices and shardings that `abstract` names.

    Frozen weights are in no checkpoint of the run: they are None.

    Args:
      reduction: whether to read the codecs' state too; otherwise it is None.
    """
    names = ITEMS if reduction else ITEMS[:-1]
    # The run had no copies of experts before, or no codec with feedback.
    gone = [name for name in ("load", "sites_error") if not (saved.path / name).exists()]
    names = tuple(name for name in names if name not in gone)
    return _of_items(restore_items(saved.path, abstract, names), abstract, reduction)


def state_of(
    arrays: Mapping[str, jax.Array], abstract: TrainState, *, reduction: bool = True
) -> TrainState:
    """Returns the state with these arrays (`arrays_of`), in the form of `restore_state`."""
    read = {
        name: _like(tree, {path: arrays[f"{name}/{path}"] for path in flat(tree)})
        for name, tree in _items(abstract).items()
        if (reduction or name != "reduction")
        and (name not in ("load", "sites_error") or _has_item(name, arrays))
    }
    return _of_items(read, abstract, reduction)


def _has_item(name: str, arrays: Mapping[str, Any]) -> bool:
    return any(key.startswith(f"{name}/") for key in arrays)


def _of_items(read: Mapping[str, Any], abstract: TrainState, reduction: bool) -> TrainState:
    codec_state: Any = abstract.reduction if reduction else None
    if "reduction" in read:
        codec_state = read["reduction"]["codecs"]
    like, load_LE = abstract.sites, None
    load = abstract.load_LE if like is None else like.load_LE
    if "load" in read:
        load_LE = read["load"]["load"]
    elif load is not None:
        load_LE = _zeros(load)
    sites = None
    if like is not None:
        own = read.get("sites", {"params": None, "balance": None})
        error = read.get("sites_error", jax.tree.map(_zeros, like.error))
        sites = Sites(own["params"], own["balance"], read["sites_optimizer"], load_LE, error)
        load_LE = None
    return TrainState(
        **read["counters"],
        params=read["weights"]["params"],
        router_bias=read["weights"]["balance"],
        optimizer=read.get("optimizer", ()),
        reduction=codec_state,
        load_LE=load_LE,
        sites=sites,
        momentum=read["outer"]["momentum"] if "outer" in read else None,
    )


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)


def step_of_state(saved: Saved, abstract: TrainState) -> int:
    """Returns the step counter inside a checkpoint's state."""
    return int(restore_items(saved.path, abstract, ("counters",))["counters"]["step"])


def save_written(
    step: Path,
    items: Mapping[str, Sequence[NewArray]],
    stores: Path,
    facts: dict[str, Any],
    processes: Processes,
) -> None:
    """Makes a checkpoint of arrays that are written already. All processes call it.

    Args:
      step: its directory, named by the step's number; made here.
      stores: directory of the output of `PieceWriter`: a folder for each item, and in it one for
        each process (`store_of`). The output moves into the checkpoint.
      facts: entries of the manifest.
    Raises:
      RunError: in process 0, if the written checkpoint lacks arrays.
    """
    handlers, args = {}, {}
    for name, arrays in items.items():
        moved = _Written(store_of(stores / name, processes.index))
        # Orbax asks the registry for JAX's arrays too, though there are none.
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ocp.type_handlers.ArrayHandler()), (NewArray, moved)
        )
        handlers[name] = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        args[name] = ocp.args.PyTreeSave({array.key: array for array in arrays})
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as writer:
        writer.save(step.absolute(), args=ocp.args.Composite(**args))
    if processes.first:
        every = ((name, array) for name, arrays in items.items() for array in arrays)
        check_written(step, {f"{name}/{array.key}": array.shape for name, array in every})
        write_manifest(step, {"step": int(step.name), **facts})


class _Written(ocp.type_handlers.TypeHandler):
    """Lets Orbax take arrays that are written already for its own."""

    def __init__(self, store: Path):
        self._store = store

    def typestr(self) -> str:
        """The type as which a restore reads them."""
        return "jax.Array"

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Moves this process's part of an item to the directory that Orbax merges."""

        async def move() -> None:
            for info in infos:
                await info.await_path_creation()
            if self._store.is_dir():
                self._store.rename(infos[0].parent_dir / self._store.name)

        return [future.CommitFutureAwaitingContractedSignals(move())]

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Is never called: a restore uses Orbax's own handlers."""
        raise NotImplementedError

    async def metadata(self, infos: Any) -> Any:
        """Is never called, like `deserialize`."""
        raise NotImplementedError
