"""Stages of a start: checks, the choice of a checkpoint, the first state.

Only `initial_state` touches a device.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from moejax.checkpoint.compatible import check_same_base, resume_notes
from moejax.checkpoint.disk_space import check_disk_space, check_writable
from moejax.checkpoint.find import Saved, newest
from moejax.checkpoint.manifest import finished_steps, stored_bytes
from moejax.checkpoint.remote import Copies
from moejax.checkpoint.source import Source, base_of, find_source, read_weights, take_weights
from moejax.config.checks import resolve_mesh
from moejax.config.checks.paths import check_folder, check_places
from moejax.config.checks.planned import is_planned
from moejax.config.load import diff, from_dict, to_dict
from moejax.config.schema import Config
from moejax.data.skipped import SkippedData
from moejax.data.sources import Content
from moejax.errors import InputError, NoMeshError
from moejax.runtime.assignment import changes_hosts
from moejax.runtime.event_log import RunLock, read_events
from moejax.runtime.processes import ALONE, Processes, find_rank
from moejax.runtime.start import simulated_here
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.inputs import Inputs
from moejax.train.records.metrics import EVALUATED, held_out_text
from moejax.train.records.skipped_data import (
    is_abandoned,
    known_skipped,
    quarantine_abandoned,
    read_skipped,
)


def check_simulated_devices(cfg: Config) -> None:
    """Raises InputError, before processes meet, if they cannot share simulated devices or nodes."""
    total = cfg.mesh.simulated_devices
    if total is not None and simulated_here(cfg.mesh) is not None and not is_planned(cfg):
        resolve_mesh(cfg, total, "cpu", processes=find_rank().count)


def check_has_base(cfg: Config) -> None:
    """Raises InputError if a run with adapters does not name the weights that they adapt."""
    if cfg.lora.rank is not None and cfg.checkpoint.init_from is None:
        raise InputError(
            f"`lora.rank` is {cfg.lora.rank}, and `checkpoint.init_from` is none. Adapters are "
            "trained beside the weights of a model. Name its checkpoint."
        )


def check_keep(cfg: Config) -> None:
    """Raises InputError if a run keeps fewer than 2 checkpoints, so none to fall back to.

    The setting itself allows 1, because configs of older runs may have it.
    """
    if cfg.checkpoint.keep < 2:
        raise InputError(
            f"`checkpoint.keep` is {cfg.checkpoint.keep}. A run keeps at least 2 checkpoints, so "
            f"that one is left if the newest is damaged. Set 2 or more."
        )


def check_paths(cfg: Config) -> None:
    """Raises InputError if the run directory cannot be written, or first weights are missing.

    For a dry run: creates nothing, and compares the sizes of files but not their digests.
    """
    check_keep(cfg)
    check_has_base(cfg)
    check_places(cfg)
    check_folder(Path(cfg.run_dir), f"`run_dir` = {cfg.run_dir}")
    if cfg.checkpoint.memory_every is not None:
        place = cfg.checkpoint.memory_dir
        check_folder(Path(place), f"`checkpoint.memory_dir` = {place}")
    if cfg.lora.rank is not None or not finished_steps(Path(cfg.run_dir) / "checkpoints"):
        find_source(cfg, "size", ALONE)


def check_same_config(cfg: Config, processes: Processes) -> None:
    """Raises InputError, in all processes, if they were started with different settings."""
    for index, config in enumerate(processes.gather(to_dict(cfg))):
        if changes := diff(from_dict(config), cfg):
            listed = ", ".join(f"{name}: {theirs} and {ours}" for name, theirs, ours in changes)
            raise InputError(
                f"processes have different configs. {index} and {processes.index} differ: "
                f"{listed}. One program has one config. Start all with the same file and settings."
            )


def open_copies(cfg: Config, processes: Processes) -> Copies | None:
    """Returns the copies of the run's checkpoints elsewhere, in process 0; None if none are made.

    Raises:
      InputError: in all processes, if their place cannot be reached.
    """
    place, keep = cfg.checkpoint.copy_to, cfg.checkpoint.keep
    if place is None:
        return None
    return processes.together(lambda: Copies(place, keep=keep) if processes.first else None)


def _newest(
    cfg: Config, processes: Processes, copies: Copies | None, before: int | None
) -> tuple[Saved | None, list[str]]:
    """Returns the newest intact checkpoint, and notes. A copy is fetched first if it is newer."""
    run_dir, verify = Path(cfg.run_dir), cfg.checkpoint.verify
    directory = run_dir / "checkpoints"
    abandoned = processes.from_first(lambda: quarantine_abandoned(run_dir, before))
    if cfg.checkpoint.copy_to is None:
        saved, notes = newest(directory, verify, processes)
        return saved, [*abandoned, *notes]
    damaged = None
    try:
        saved, notes = newest(directory, verify, processes)
    except InputError as error:  # all are damaged; the same in all processes
        saved, notes, damaged = None, [], error
    newest_step = None if saved is None else saved.step

    def fetch() -> list[str]:
        passed_over = partial(is_abandoned, skipped=read_skipped(run_dir), before=before)
        return copies.fetch_newer(directory, newest_step, passed_over) if copies else []

    fetched = processes.from_first(fetch)
    if damaged is not None and not fetched:
        raise damaged
    notes += [str(damaged)] if damaged is not None else []
    saved, more = newest(directory, verify, processes)
    return saved, [*abandoned, *notes, *fetched, *more]


def choose_checkpoint(
    cfg: Config,
    content: Content,
    processes: Processes,
    copies: Copies | None = None,
    before: int | None = None,
) -> tuple[Saved | None, Source | None, list[str]]:
    """Returns the checkpoint to resume, the one to take weights from, and notes.

    Weights are taken from a source if no checkpoint is resumed; frozen weights always are.

    Args:
      copies: from `open_copies`.
      before: only checkpoints before this step count, as the run goes back; None: all count.
    """
    saved, notes = _newest(cfg, processes, copies, before)
    if saved is not None:
        notes += resume_notes(saved.manifest, cfg, content, step=saved.step)
        if cfg.lora.rank is None:
            return saved, None, notes
    source = find_source(cfg, cfg.checkpoint.verify, processes)
    if saved is not None and (base := base_of(cfg, source)) is not None:
        check_same_base(saved.manifest, base)
    return saved, source, notes


def restore_skipped(inputs: Inputs, saved: Saved | None, processes: Processes) -> list[str]:
    """Has `inputs` leave out the batches that earlier starts of the run left out. Returns notes.

    Raises:
      InputError: in all processes, if their lists contradict each other, or the data is too short.
    """
    run_dir = Path(inputs.cfg.run_dir)
    listed = processes.from_first(lambda: known_skipped(run_dir, saved))
    inputs.skipped = [SkippedData(*entry) for entry in listed]
    inputs.check_enough()
    return [
        f"the run went back to step {after}: the next {skip} batches are left out"
        for after, skip in inputs.skipped
    ]


def check_disk(
    train_step: TrainStep, saved: Saved | None, directory: Path, processes: Processes
) -> list[str]:
    """Checks the disk space for future checkpoints, and that they can be written. Returns notes.

    Each is assumed as large as the newest checkpoint, else as the state in memory.

    Raises:
      InputError: if nothing can be written there.
      StorageFullError: if not one fits.
    """
    cfg, done = train_step.cfg, 0 if saved is None else saved.step
    if done >= cfg.train.num_steps:
        return []
    check_writable(directory, processes)
    every = cfg.checkpoint.save_every or cfg.train.num_steps
    first = min((done // every + 1) * every, cfg.train.num_steps)
    leaves = jax.tree.leaves(train_step.abstract._replace(frozen=None))
    in_memory = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    needed = in_memory if saved is None else stored_bytes(saved.manifest)
    free = check_disk_space(directory, needed, first, processes)
    # An old checkpoint is removed after a newer one is complete.
    more = cfg.checkpoint.keep + 1 - len(processes.from_first(lambda: finished_steps(directory)))
    if free >= needed * more:
        return []
    return [
        f"warning: {free:,} bytes are free in {directory}, {more} checkpoints more take about "
        f"{needed * more:,}; checkpoint.keep says how many are kept"
    ]


@contextmanager
def no_mesh_errors(devices: Sequence[Any]) -> Iterator[None]:
    """Raises NoMeshError in place of InputError, where a run's hosts may change.

    Its supervisors then try fewer hosts.
    """
    try:
        yield
    except InputError as error:
        if not changes_hosts():
            raise
        raise NoMeshError(f"no mesh fits {len(devices)} devices. {error}") from error


def claim(run_dir: Path, patience_s: float = 0.0) -> RunLock:
    """Makes the run directory and takes its lock.

    Args:
      patience_s: seconds to wait while another run holds it.
    Raises:
      InputError: if another run still holds it, or the directory cannot be written.
    """
    until = time.monotonic() + patience_s
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                return RunLock(run_dir)
            except InputError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
    except OSError as error:
        raise InputError(
            f"run directory cannot be written. {run_dir}: {error.strerror}. It must be a directory "
            f"this user may write. Set another run_dir."
        ) from error


def initial_state(
    train_step: TrainStep,
    resumed: TrainState | None,
    source: Source | None,
    console: Console,
    processes: Processes = ALONE,
) -> TrainState:
    """Returns the resumed state, else the source's weights, else drawn weights.

    Frozen weights always come from `source`.
    """
    lora, abstract = train_step.abstract.frozen is not None, train_step.abstract
    if source is not None and (lora or resumed is None):
        what = "frozen weights" if lora else "weights"
        where = f"{source.path} (step {source.step})" if isinstance(source, Saved) else source.path
        console.print(f"{what} from {where}", soft_wrap=True)
    if resumed is not None:
        if lora and source is not None:
            return resumed._replace(frozen=read_weights(source, abstract, processes)[0])
        return resumed
    if lora and source is not None:
        return train_step.first_state(*read_weights(source, abstract, processes))
    state = train_step.init()
    if source is None:
        return state
    return train_step.at_sites(take_weights(source, state, abstract, processes))


def finished_message(cfg: Config, inputs: Inputs, saved: Saved) -> str | None:
    """Returns the message of a finished run; None if it has work left.

    A run that was stopped in its last evaluation still has this evaluation left.
    """
    if saved.step < cfg.train.num_steps:
        return None
    values: dict[str, float | None] = {}
    for record in read_events(Path(cfg.run_dir) / "metrics.jsonl"):
        if (record.get("event"), record.get("step")) == ("final_eval", saved.step):
            values = {name: record[name] for name in (*EVALUATED, "targets") if name in record}
    if inputs.held_out is not None and not values:
        return None
    held_out = f"; held-out (all): {held_out_text(values)}" if values else ""
    return (
        f"done before: step {saved.step} of {cfg.train.num_steps} is in {saved.path}{held_out}. "
        f"Raise train.num_steps to go on."
    )
