"""Runs a step of a run again, and checks whether it comes to the same bits.

A step that differs was computed wrongly then or now: by a device, a kernel or a change of the code.
Nothing is written, and a run that goes on meanwhile is not disturbed.
"""

import fcntl
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from moejax.checkpoint.compatible import check_same_base, resume_notes, same_reduction
from moejax.checkpoint.find import Saved, intact_before
from moejax.checkpoint.manifest import finished_steps, read_manifest
from moejax.checkpoint.source import Source, base_of, find_source
from moejax.checkpoint.verify import wrong_numbers
from moejax.checkpoint.writer import arrays_of, restore_state
from moejax.config.checks import AXES, resolve_mesh
from moejax.config.checks.planned import is_planned
from moejax.config.load import from_dict
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.event_log import read_events
from moejax.runtime.processes import Processes
from moejax.runtime.start import join, platform_of, start
from moejax.runtime.watch import Watch, Watchdog
from moejax.screen import screen
from moejax.step.model import check_adapters
from moejax.step.state import Metrics, TrainState
from moejax.step.train_step import TrainStep, build_step
from moejax.train.codec_schedule import CodecSchedule
from moejax.train.faults.watching import deadlines_of
from moejax.train.inputs import Inputs, open_inputs
from moejax.train.planning import PLAN, kept_plan, plan_run
from moejax.train.start import (
    check_has_base,
    check_same_config,
    check_simulated_devices,
    initial_state,
    restore_skipped,
)

MEASURED = {"loss": "loss", "gradient_norm": "gradient norm"}


def replay(cfg: Config, step: int, console: Console) -> bool:
    """Runs a step of the run in `run_dir` again from the newest checkpoint before it.

    Prints its loss and gradient norm, and whether they and the state equal those of the run.

    Returns:
      Whether all that could be compared is equal, to the bit.

    Raises:
      InputError: if the step cannot be run again, before a device is touched where possible.
    """
    check_adapters(cfg)
    check_has_base(cfg)
    if cfg.outer.hub is not None:
        raise InputError(
            "a step of a site is not run again alone: what other sites sent is at the hub. Got "
            f"`outer.hub` = {cfg.outer.hub}. A copy of the hub's rounds.jsonl in an empty folder "
            "lets new runs repeat all rounds."
        )
    check_simulated_devices(cfg)
    inputs = open_inputs(cfg)
    with join() as processes:
        check_same_config(cfg, processes)
        watch = Watch()
        with closing(Watchdog(watch, deadlines_of(cfg.watchdog), processes)), processes:
            shown = console if processes.first else screen(quiet=True)
            return _replay(cfg, step, inputs, shown, processes, watch)


def _replay(
    cfg: Config, step: int, inputs: Inputs, console: Console, processes: Processes, watch: Watch
) -> bool:
    run_dir = Path(cfg.run_dir)
    logged, live = processes.from_first(lambda: (_logged(run_dir, step), _holder(run_dir)))
    if live is not None:
        _say(console, f"{live} trains in {run_dir} now; it may remove old checkpoints meanwhile")
    saved, notes = intact_before(run_dir, step, cfg.checkpoint.verify, processes)
    source, more = _check(cfg, saved, inputs, processes)
    for text in (*notes, *more, *restore_skipped(inputs, saved, processes)):
        _say(console, text)
    train_step = _build(cfg, saved, processes, console)
    watch.enter("restore")
    state = _restore(train_step, saved, source, console, processes)
    _say(console, f"running steps {saved.step + 1} to {step} again from {saved.path}")
    state, metrics = _run(train_step, state, inputs, step, processes, watch)
    results = [*_compare_measured(metrics, logged), _compare_state(cfg, step, state, processes)]
    for _, text in results:
        _say(console, text)
    return all(equal for equal, _ in results)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _holder(run_dir: Path) -> str | None:
    """Returns the process that trains in a run directory now, in words; None if none does."""
    lock = run_dir / "lock"
    if not lock.is_file():
        return None
    with lock.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().strip() or "another process"
    return None


def _logged(run_dir: Path, step: int) -> dict[str, float | None]:
    """Returns the numbers that the run logged of a step; empty if it logged none.

    Raises:
      InputError: if the run has not come to the step.
    """
    found: dict[str, Any] = {}
    last = max(finished_steps(run_dir / "checkpoints"), default=0)
    for line in read_events(run_dir / "metrics.jsonl"):
        if not {"event", "step"} <= line.keys():
            continue
        event, at = line["event"], int(line["step"])
        if event == "rolled_back" and line["to"] < step:
            found = {}
        if event in ("step", "first_step"):
            last = max(last, at)
            if at == step and (event == "step" or not found):
                found = {name: line[name] for name in MEASURED if name in line}
    if not 1 <= step <= last:
        raise InputError(
            f"no such step. --replay_step is {step}, and the last known step of {run_dir} is "
            f"{last}. A step is run again that the run has done. Name one from 1 to {last}."
            if last
            else f"no run. {run_dir} has no checkpoint and no logged step. A step is run again "
            f"that the run has done. Set the run_dir of a run."
        )
    return found


def _check(
    cfg: Config, saved: Saved, inputs: Inputs, processes: Processes
) -> tuple[Source | None, list[str]]:
    """Checks config, data and mesh as a resume would. Returns the frozen weights, and notes."""
    kept, step = kept_plan(cfg), saved.step
    notes = list(resume_notes(saved.manifest, kept, inputs.content, step=step, rates=False))
    if not is_planned(cfg):
        _check_mesh(cfg, saved)
    if cfg.lora.rank is None:
        return None, notes
    source = find_source(cfg, cfg.checkpoint.verify, processes)
    if (base := base_of(cfg, source)) is not None:
        check_same_base(saved.manifest, base)
    return source, notes


def _check_mesh(cfg: Config, saved: Saved) -> None:
    """Raises InputError if the mesh, as far as it is known, is not the checkpoint's.

    Sums over other devices have other last bits.
    """
    known = {
        "stage": 1,
        **saved.manifest["mesh"],
        "nodes": from_dict(saved.manifest["config"]).mesh.nodes,
    }
    own = {name: getattr(cfg.mesh, name) for name in (*AXES, "nodes")}
    if other := [name for name in own if own[name] not in (None, known[name])]:
        listed = ", ".join(f"mesh.{name} is {own[name]}, was {known[name]}" for name in other)
        raise InputError(
            f"mesh differs from the checkpoint's. {listed}. Bits are equal on the same mesh alone. "
            f"Set the same mesh, and start as many processes."
        )


def _build(cfg: Config, saved: Saved, processes: Processes, console: Console) -> TrainStep:
    """Starts the devices and returns the run's step."""
    devices = start(cfg.mesh)
    platform = platform_of(devices)
    kept = (Path(cfg.run_dir) / PLAN).exists() or len(devices) == 1
    if is_planned(cfg) and not kept:
        raise InputError(
            f"no plan. {cfg.run_dir} has no {PLAN}, and the mesh is left to the planner. A step is "
            f"run again with the plan of its run. Set its mesh."
        )
    cfg = plan_run(cfg, devices, processes, console, resuming=True).cfg
    cfg = resolve_mesh(cfg, len(devices), platform, processes=processes.count)
    _check_mesh(cfg, saved)
    return build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)


def _restore(
    train_step: TrainStep,
    saved: Saved,
    source: Source | None,
    console: Console,
    processes: Processes,
) -> TrainState:
    """Returns the state of a checkpoint; InputError if it is damaged."""
    valid = same_reduction(saved.manifest, train_step)
    state = restore_state(saved, train_step.abstract, reduction=valid)
    wrong = wrong_numbers(saved.manifest, arrays_of(state), processes)
    if wrong is None and int(state.step) != saved.step:
        wrong = f"its state is of step {int(state.step)}"
    if wrong is not None:
        raise InputError(
            f"checkpoint is damaged. {saved.path}: {wrong}. Restored numbers must be those that "
            f"were saved. Copy it again, or rename it, so that the one before it is taken."
        )
    if state.reduction is None:
        state = state._replace(reduction=train_step.first_reduction())
    return initial_state(train_step, state, source, console, processes)


def _run(
    train_step: TrainStep,
    state: TrainState,
    inputs: Inputs,
    last: int,
    processes: Processes,
    watch: Watch,
) -> tuple[TrainState, Metrics]:
    """Runs the steps up to `last`. Returns the state after it, and its metrics."""
    schedule, step = CodecSchedule(train_step, processes, watch), int(state.step)
    metrics = None
    with inputs.batches(train_step, step, last) as batches:
        for batch in batches:
            run_step, _ = schedule.step_for(step)
            step += 1
            watch.enter("step", step)
            state, metrics = run_step(state, batch)
    assert metrics is not None, "the checkpoint is of a step before"
    return state, metrics


def _compare_measured(
    metrics: Metrics, logged: dict[str, float | None]
) -> Iterator[tuple[bool, str]]:
    """Yields for each number whether it equals the logged one, and a line about it."""
    for name, shown in MEASURED.items():
        value = float(getattr(metrics, name))
        # JSON has no number that is not finite: null was logged.
        comparable = value if math.isfinite(value) else None
        if name not in logged:
            yield True, f"{shown} {value!r}: none was logged"
        elif comparable == logged[name]:
            yield True, f"{shown} {value!r}: equals the logged one"
        else:
            yield False, f"{shown} {value!r}: differs from the logged one, {logged[name]!r}"


def _compare_state(
    cfg: Config, step: int, state: TrainState, processes: Processes
) -> tuple[bool, str]:
    """Returns whether the state equals the checkpoint of the step, and a line about it."""
    path = Path(cfg.run_dir) / "checkpoints" / str(step)
    steps = processes.from_first(lambda: finished_steps(path.parent))
    manifest = processes.from_first(lambda: read_manifest(path)) if step in steps else {}
    if not manifest.get("arrays"):
        return True, f"state: no checkpoint of step {step} with digests to compare it with"
    wrong = wrong_numbers(manifest, arrays_of(state), processes)
    if wrong is None:
        return True, f"state: all {len(manifest['arrays'])} arrays equal {path}"
    return False, f"state: differs from {path}: {wrong}"
