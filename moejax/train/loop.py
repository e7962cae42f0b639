"""The run: everything from an empty directory to trained weights, in order.

Order of a start: config and data are checked, the processes of the program meet, process 0 takes
the run directory, checkpoint files are checked; then devices are started, a plan is made where one
is wanted, the mesh is resolved, the step is compiled, and state comes from the newest checkpoint,
else from `checkpoint.init_from`, else from the seed; frozen weights always come from
`checkpoint.init_from`. All processes run this code; process 0 alone
writes records and shows them.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from moejax.config.checks import check, resolve_mesh
from moejax.config.load import save_json
from moejax.config.schema import Config
from moejax.errors import DivergedError
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.plan.cluster.topology import Topology
from moejax.runtime.interrupt import Interrupt
from moejax.runtime.processes import Processes, Stop
from moejax.runtime.start import join, measure_peak, platform_of, start
from moejax.step.model import check_adapters
from moejax.step.optimizer import learning_rate
from moejax.step.state import TrainState
from moejax.step.train_step import build_step
from moejax.train.checkpoint import Checkpoints
from moejax.train.codec_schedule import CodecSchedule
from moejax.train.display import Display
from moejax.train.evaluation import evaluate, finish
from moejax.train.inputs import Inputs, open_inputs
from moejax.train.manifest import finished_steps
from moejax.train.memory_check import check_memory, memory_warnings
from moejax.train.metrics import Meter, Records
from moejax.train.plan_monitor import PlanMonitor
from moejax.train.planning import kept_plan, measure, plan_run, save_expert_load
from moejax.train.resume import describe_run
from moejax.train.run import Run
from moejax.train.skips import Skipped, Skips
from moejax.train.source import keep_origin
from moejax.train.start import (
    base_of,
    check_disk,
    check_has_base,
    check_same_config,
    check_simulated_devices,
    choose_checkpoint,
    claim,
    finished_message,
    initial_state,
    set_aside_wrong_steps,
)
from moejax.train.start_record import ExpertLoads, describe_start
from moejax.train.summary import Summary, print_summary, summarize


class RunEnd(NamedTuple):
    """The end of a run.

    Attributes:
      state: None if the run was done before, so that nothing was restored.
      stopped: whether it was asked to stop before its last step.
    """

    state: TrainState | None
    stopped: bool = False


def train(cfg: Config, console: Console) -> RunEnd:
    """Trains as configured, resuming if the run directory holds a checkpoint.

    Raises:
      InputError: for anything the user can fix, before a device is touched where that is possible.
      RunError: if the run could not reach its end.
    """
    check(cfg)
    check_adapters(cfg)
    check_has_base(cfg)
    check_simulated_devices(cfg)
    inputs = open_inputs(cfg)
    with join() as processes:
        check_same_config(cfg, processes)
        run_dir = Path(cfg.run_dir)
        lock = processes.together(lambda: claim(run_dir) if processes.first else None)
        try:
            shown = console if processes.first else Console(quiet=True)
            ended = train_claimed(cfg, inputs, shown, processes)
            # Process 0 may write digests for long, and JAX's own shutdown waits only minutes.
            processes.gather("done")
            return ended
        finally:
            if lock is not None:
                lock.close()


def train_claimed(cfg: Config, inputs: Inputs, console: Console, processes: Processes) -> RunEnd:
    """Trains in a run directory that no other run uses."""
    ended = train_planned(cfg, inputs, console, processes)
    if isinstance(ended, Topology):  # stopped to plan again, because the links changed
        ended = train_planned(cfg, inputs, console, processes, measured=ended)
    assert isinstance(ended, RunEnd), "a run plans at most twice"
    return ended


def train_planned(
    cfg: Config,
    inputs: Inputs,
    console: Console,
    processes: Processes,
    measured: Topology | None = None,
) -> RunEnd | Topology:
    """Plans and trains. Returns the run's end, or a topology to plan again with.

    Args:
      measured: newly measured links to plan with; the run then does not plan a third time.
    """
    run_dir = Path(cfg.run_dir)
    choosing = partial(choose_checkpoint, kept_plan(cfg), inputs.content, processes)
    saved, source, notes = choosing()
    if saved is not None and (
        done := processes.from_first(partial(finished_message, cfg, inputs, saved))
    ):
        for line in (*notes, done):
            console.print(line, highlight=False, soft_wrap=True)
        return RunEnd(None)
    devices = start(cfg.mesh)
    platform = platform_of(devices)
    resuming = saved is not None
    planned = plan_run(cfg, devices, processes, console, resuming=resuming, measured=measured)
    notes += planned.notes
    cfg = resolve_mesh(planned.cfg, len(devices), platform, processes=processes.count)
    train_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)
    limit = check_memory(train_step, processes)
    saved, more = set_aside_wrong_steps(saved, train_step, choosing, processes)
    notes += [note for note in more if note not in notes]
    notes += check_disk(train_step, saved, run_dir / "checkpoints", processes)
    summary = summarize(train_step)
    notes += memory_warnings(summary, limit)
    print_summary(summary, train_step, console, planned.rows())
    records = _open_records(cfg, notes, console, processes)
    if processes.first:
        keep_origin(source, run_dir)
    checkpoints = _checkpoints(cfg, processes)
    state = initial_state(train_step, checkpoints, saved, source, console)
    records.start(int(state.step), describe_start(train_step, summary, processes))
    meter = _meter(cfg, summary, processes)
    display = Display(console, cfg.train.num_steps, int(state.step))
    run = Run(cfg, train_step, inputs, checkpoints, records, display, console, processes)
    run.base = base_of(cfg, source)
    if processes.first and cfg.model.has_experts:
        run.expert_loads = ExpertLoads(Path(cfg.run_dir), cfg.train.num_steps)
    if planned.plan is not None:
        records.event("plan", int(state.step), seconds=planned.plan.predicted["seconds"])
        if planned.topology is not None and measured is None:
            again = partial(measure, cfg, devices, processes, Console(quiet=True))
            run.monitor = PlanMonitor(planned.plan, planned.topology, lambda: again()[0])
    return _run_to_end(run, state, meter)


def _checkpoints(cfg: Config, processes: Processes) -> Checkpoints:
    directory = Path(cfg.run_dir) / "checkpoints"
    return Checkpoints(directory, keep=cfg.checkpoint.keep, processes=processes)


def _open_records(
    cfg: Config, notes: Sequence[str], console: Console, processes: Processes
) -> Records:
    """Writes the resolved config, opens the records, and shows and records the start's notes."""
    run_dir = Path(cfg.run_dir)
    if processes.first:
        save_json(cfg, run_dir / "config.json")
    records = Records(run_dir, written=processes.first)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
        records.event("note", 0, text=note)
    return records


def _meter(cfg: Config, summary: Summary, processes: Processes) -> Meter:
    """Returns the meter, which knows the peak of all devices."""
    return Meter(
        tokens_per_step=summary.tokens_per_step,
        flops_per_token=summary.counts.flops_per_token,
        peak=sum(processes.gather(measure_peak(jax.local_devices(), cfg.model.dtype))),
        num_steps=cfg.train.num_steps,
        schedule=learning_rate(cfg.optimizer, cfg.train.num_steps, cfg.optimizer.learning_rate),
    )


def _run_to_end(run: Run, state: TrainState, meter: Meter) -> RunEnd | Topology:
    """Runs the steps and the last evaluation. Returns the same as `train_planned`."""
    try:
        # One process of several fails at once here: a save under way would wait for all of them.
        with run.display, run.processes:
            state, stopped = run_steps(run, state, meter)
        with run.processes:
            if not stopped:
                finish(run, state)
    finally:
        run.checkpoints.close()
        run.records.close()
        if run.expert_loads is not None:
            run.expert_loads.close()
    return run.mismatch.topology if run.mismatch is not None and stopped else RunEnd(state, stopped)


def run_steps(run: Run, state: TrainState, meter: Meter) -> tuple[TrainState, bool]:
    """Runs the loop. Returns the state, and whether it was asked to stop early."""
    cfg, last, step = run.cfg, run.cfg.train.num_steps, int(state.step)
    schedule, stopping = CodecSchedule(run.train_step, run.processes), Stop(run.processes)
    skips = Skips(int(state.skipped))
    before, shown = None, ""
    with run.display.busy("compiling the step"):  # Ctrl-C ends it at once: it is not caught yet
        began = time.perf_counter()
        schedule.step_for(step, state)
    run.display.note(f"compiled in {time.perf_counter() - began:.0f} s")
    with Interrupt() as interrupt, run.inputs.batches(run.train_step, step, last) as batches:
        for batch in batches:
            run_step, codec_text = schedule.step_for(step, state)
            if codec_text != shown:
                text = f"codecs across nodes: {codec_text}"
                note(run, "codecs", step, text, codecs=codec_text)
                shown = codec_text
            state, metrics = run_step(state, batch)
            step += 1
            # At most one step runs while the next is prepared, so that a stop, a report or a save
            # waits for one step only.
            if before is not None:
                check_update(run, skips.after(step - 1, before))
            before = metrics
            run.display.step(step)
            if meter.started is None or step == last or step % cfg.train.log_every == 0:
                report(run, meter, step, metrics)
            if step == last:
                check_update(run, skips.after(step, metrics))
            stop = stopping.after(step, interrupt.requested)
            # Skipped updates do not change the weights, so their checkpoints must not replace
            # earlier ones.
            saves = due(step, cfg.checkpoint.save_every) and not skips.in_a_row
            if saves or step == last or stop:
                save(run, step, state)
            run.record_saved(run.checkpoints.finished())
            if step < last and (stop or (saves and run.mismatch is not None)):
                stop_early(run, step, stop or interrupt.requested)
                return state, True
            if due(step, cfg.train.eval_every) and step < last:
                began = time.perf_counter()
                evaluate(run, state, step, limit=cfg.train.eval_batches)
                meter.pause(time.perf_counter() - began)
    return state, False


def stop_early(run: Run, step: int, asked: bool) -> None:
    """Ends the loop before its last step, either as asked or to plan again.

    Args:
      asked: whether this process was asked to stop; after planning again that would be forgotten.
    """
    run.record_saved(run.checkpoints.wait())
    if any(run.processes.gather(asked)):
        run.mismatch = None
        run.display.note(f"stopped at step {step}; run the same command to go on")
        run.records.event("stopped", step)
    else:
        note(run, "planning_again", step, "planning again")


def note(run: Run, event: str, step: int, text: str, **values: str) -> None:
    """Shows and records a note about a step."""
    run.display.note(f"step {step}  {text}")
    run.records.event(event, step, **values)


def check_update(run: Run, skipped: Skipped | None) -> None:
    """Reports an update that was not applied; ends the run after too many in a row.

    Raises:
      DivergedError: in all processes at the same step.
    """
    if skipped is None:
        return
    run.records.event(
        "skipped", skipped.step, loss=skipped.loss, gradient_norm=skipped.gradient_norm
    )
    if skipped.in_a_row == 1:
        run.display.note(f"warning: update of step {skipped.step} skipped: {skipped.reason}")
    if skipped.in_a_row != run.cfg.train.max_skipped:
        return
    run.record_saved(run.checkpoints.wait())
    first = skipped.step - skipped.in_a_row + 1
    directory = run.checkpoints.directory
    steps = run.processes.from_first(lambda: [s for s in finished_steps(directory) if s <= first])
    run.records.event("diverged", skipped.step)
    good = (
        f"The last checkpoint from before them is {directory / str(max(steps))}. Lower "
        f"optimizer.learning_rate: the same command goes on from there, and from an older one if "
        f"you remove it"
        if steps
        else "No checkpoint is from before them. Lower optimizer.learning_rate and begin again"
    )
    raise DivergedError(
        f"the run diverged. Updates of steps {first} to {skipped.step} were skipped: "
        f"{skipped.reason}. train.max_skipped allows {skipped.in_a_row - 1} in a row. {good}; or "
        f"set train.max_skipped=none to go on all the same."
    )


def due(step: int, every: int | None) -> bool:
    """Whether `step` is a multiple of `every`."""
    return every is not None and step % every == 0


def report(run: Run, meter: Meter, step: int, metrics: Any) -> None:
    """Shows and records the step's metrics. The first call starts the clock."""
    if meter.started is None:
        run.records.event("first_step", step, loss=float(metrics.loss))
        meter.start(step)
        return
    line = meter.report(step, metrics)
    run.records.report(line)
    run.display.show(line)
    if run.expert_loads is not None:
        run.expert_loads.add(step, metrics.load_LE)
        save_expert_load(np.asarray(metrics.load_LE), Path(run.cfg.run_dir) / "routing.json")
    if run.monitor is not None:
        compare_with_plan(run, run.monitor, step, meter.tokens_per_step / line.tokens_per_second)
    meter.start(step)


def compare_with_plan(run: Run, monitor: PlanMonitor, step: int, seconds: float) -> None:
    """Records measured over predicted time; explains it if it stays off. All processes call it."""
    seconds = run.processes.gather(seconds)[0]
    run.records.event("predicted", step, ratio=seconds / monitor.predicted)
    if not monitor.off(seconds):
        return
    mismatch = monitor.mismatch(seconds)
    run.display.note(mismatch.text)
    run.records.event("note", step, text=mismatch.text)
    if run.cfg.plan.replan:
        run.mismatch = mismatch


def save(run: Run, step: int, state: TrainState) -> None:
    """Starts a checkpoint after the previous one is complete."""
    run.record_saved(run.checkpoints.wait())
    run.records.event("save", step)
    facts = describe_run(run.train_step, run.inputs.content, run.base)
    run.checkpoints.save(step, state, {**facts, "data_position": step, "jax": jax.__version__})
