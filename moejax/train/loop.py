"""The run: everything from an empty directory to trained weights, in order.

Order of a start: config and data are checked, the processes of the program meet, process 0 takes
the run directory, checkpoint files are checked; then devices are started, a plan is made where one
is wanted, the mesh is resolved, the step is compiled, and state comes from the newest checkpoint,
else from `checkpoint.init_from`, else from the seed; frozen weights always come from
`checkpoint.init_from`. All processes run this code; process 0 alone
writes records and shows them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from moejax.config.checks import check, resolve_mesh
from moejax.config.load import save_json
from moejax.config.schema import Config
from moejax.errors import DivergedError, ReplicasError
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.plan.cluster.topology import Topology
from moejax.plan.probe.timer import ProgressFn
from moejax.plan.search.file import Plan
from moejax.runtime.processes import Processes
from moejax.runtime.start import join, measure_peak, platform_of, start
from moejax.runtime.watch import Watch
from moejax.step.model import check_adapters
from moejax.step.optimizer import learning_rate
from moejax.step.state import TrainState
from moejax.step.train_step import build_step
from moejax.train.checkpoint import Checkpoints
from moejax.train.copies import Copies
from moejax.train.display import Display
from moejax.train.evaluation import finish
from moejax.train.inputs import Inputs, open_inputs
from moejax.train.memory.start import Memory
from moejax.train.memory_check import check_memory, memory_warnings
from moejax.train.metrics import Meter, Records
from moejax.train.plan_monitor import PlanMonitor
from moejax.train.planning import RunPlan, kept_plan, measure, plan_run
from moejax.train.profile import name_operations
from moejax.train.restore import resume, set_aside_wrong_steps
from moejax.train.run import Run
from moejax.train.saved import Saved
from moejax.train.source import keep_origin
from moejax.train.start import (
    base_of,
    check_disk,
    check_has_base,
    check_keep,
    check_same_config,
    check_simulated_devices,
    choose_checkpoint,
    claim,
    finished_message,
    initial_state,
    open_copies,
)
from moejax.train.start_record import ExpertLoads, describe_start, highest_peak
from moejax.train.steps import run_steps
from moejax.train.summary import Summary, print_summary, summarize
from moejax.train.trackers import check_trackers, open_trackers
from moejax.train.watching import watching


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
    check_keep(cfg)
    check_simulated_devices(cfg)
    check_trackers(cfg)
    inputs = open_inputs(cfg)
    with join() as processes:
        check_same_config(cfg, processes)
        run_dir = Path(cfg.run_dir)
        lock = processes.together(lambda: claim(run_dir) if processes.first else None)
        try:
            shown = console if processes.first else Console(quiet=True)
            with watching(cfg, processes) as watch:
                ended = train_claimed(cfg, inputs, shown, processes, watch)
                # Process 0 may write digests for long, and JAX's own shutdown waits only minutes.
                processes.gather("done")
            return ended
        finally:
            if lock is not None:
                lock.close()


def train_claimed(
    cfg: Config, inputs: Inputs, console: Console, processes: Processes, watch: Watch
) -> RunEnd:
    """Trains in a run directory that no other run uses."""
    ended = train_planned(cfg, inputs, console, processes, watch)
    if isinstance(ended, Topology):  # stopped to plan again, because the links changed
        watch.enter("start")
        ended = train_planned(cfg, inputs, console, processes, watch, measured=ended)
    assert isinstance(ended, RunEnd), "a run plans at most twice"
    return ended


def train_planned(
    cfg: Config,
    inputs: Inputs,
    console: Console,
    processes: Processes,
    watch: Watch,
    measured: Topology | None = None,
) -> RunEnd | Topology:
    """Plans and trains. Returns the run's end, or a topology to plan again with.

    Args:
      measured: newly measured links to plan with; the run then does not plan a third time.
    """
    run_dir = Path(cfg.run_dir)
    copies = open_copies(cfg, processes)
    choosing = partial(choose_checkpoint, kept_plan(cfg), inputs.content, processes, copies)
    saved, source, notes = choosing()
    if _done(cfg, inputs, saved, notes, console, processes):
        return RunEnd(None)
    memory = Memory(cfg, processes, saved)
    notes += memory.notes
    devices = start(cfg.mesh)
    name_operations(cfg.profile)
    platform = platform_of(devices)
    with watch.during("plan"):
        again = {"resuming": saved is not None or memory.found, "measured": measured}
        planned = plan_run(cfg, devices, processes, console, **again)
    notes += planned.notes
    cfg = resolve_mesh(planned.cfg, len(devices), platform, processes=processes.count)
    train_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)
    limit, summary = check_memory(train_step, processes), summarize(train_step)
    saved, more = set_aside_wrong_steps(saved, train_step, choosing, processes)
    notes += [note for note in more if note not in notes]
    notes += check_disk(train_step, saved, run_dir / "checkpoints", processes)
    notes += memory_warnings(summary, limit)
    print_summary(summary, train_step, console, planned.rows())
    records = _open_records(cfg, notes, console, processes)
    if processes.first:
        keep_origin(source, run_dir)
    base = base_of(cfg, source)
    with watch.during("restore"):
        told = partial(_note, console, records, notes)
        resumed = memory.resume(train_step, inputs.content, base, console, told) or resume(
            train_step, saved, choosing, processes, console, told
        )
        state = initial_state(train_step, resumed, source, console, processes)
    checkpoints = open_checkpoints(cfg, processes, records, console, copies)
    facts = describe_start(train_step, summary, processes)
    meter = _meter(cfg, summary, facts, processes)
    records.start(int(state.step), {**facts, "peak_flops_per_second": meter.peak})
    display = Display(console, cfg.train.num_steps, int(state.step))
    kept = memory.begin(train_step, inputs.content, base, records, console)
    run = Run(cfg, train_step, inputs, checkpoints, records, display, console, processes, watch)
    run.base, run.memory = base, kept
    if processes.first and cfg.model.has_experts:
        run.expert_loads = ExpertLoads(run_dir, cfg.train.num_steps)
    _follow_plan(run, planned, int(state.step), devices, monitored=measured is None)
    return _run_to_end(run, state, meter)


def _follow_plan(
    run: Run, planned: RunPlan, step: int, devices: Sequence[Any], *, monitored: bool
) -> None:
    """Records a planned run's prediction, and has its steps compared with it."""
    if planned.plan is None:
        return
    run.records.event("plan", step, seconds=planned.plan.predicted["seconds"])
    if planned.topology is not None and monitored:
        run.monitor = _monitor(run, planned.plan, planned.topology, devices)


def _done(
    cfg: Config,
    inputs: Inputs,
    saved: Saved | None,
    notes: Sequence[str],
    console: Console,
    processes: Processes,
) -> bool:
    """Whether the run was finished before, which is said then."""
    if saved is None:
        return False
    done = processes.from_first(partial(finished_message, cfg, inputs, saved))
    for line in (*notes, done) if done else ():
        console.print(line, highlight=False, soft_wrap=True)
    return bool(done)


def _monitor(run: Run, plan: Plan, topology: Topology, devices: Sequence[Any]) -> PlanMonitor:
    """Returns what compares steps with the plan; links are measured again with `plan.replan`."""

    def again(told: ProgressFn) -> Topology:
        return measure(run.cfg, devices, run.processes, told)[0]

    return PlanMonitor(plan, topology, again if run.cfg.plan.replan else None)


def open_checkpoints(
    cfg: Config,
    processes: Processes,
    records: Records,
    console: Console,
    copies: Copies | None = None,
) -> Checkpoints:
    """Returns the run's checkpoints; failed saves and copies are recorded as soon as seen."""

    def failed(step: int, text: str) -> None:
        records.event("save_failed", step, text=text)

    def copied(steps: list[int], error: str | None) -> None:
        for step in steps:
            records.event("copied", step)
        if error is not None:
            records.event("copy_failed", 0, text=error)
            console.print(
                f"warning: checkpoints are not copied to {cfg.checkpoint.copy_to}: {error}",
                highlight=False,
                soft_wrap=True,
            )

    return Checkpoints(
        Path(cfg.run_dir) / "checkpoints",
        keep=cfg.checkpoint.keep,
        processes=processes,
        failed=failed,
        copies=copies,
        copied=copied,
    )


def _open_records(
    cfg: Config, notes: Sequence[str], console: Console, processes: Processes
) -> Records:
    """Writes the resolved config, opens the records, and shows and records the start's notes."""
    run_dir = Path(cfg.run_dir)
    if processes.first:
        save_json(cfg, run_dir / "config.json")
    trackers = open_trackers(cfg) if processes.first else None
    records = Records(run_dir, written=processes.first, trackers=trackers)
    for text in notes:
        _note(console, records, (), text)
    return records


def _note(console: Console, records: Records, known: Sequence[str], text: str) -> None:
    """Shows and records a note of the start, unless it is known."""
    if text in known:
        return
    console.print(text, highlight=False, soft_wrap=True)
    records.event("note", 0, text=text)


def _meter(cfg: Config, summary: Summary, facts: Mapping[str, Any], processes: Processes) -> Meter:
    """Returns the meter, which knows the peak of all devices."""
    measured = sum(processes.gather(measure_peak(jax.local_devices(), cfg.model.dtype)))
    log = Path(cfg.run_dir) / "metrics.jsonl"
    return Meter(
        tokens_per_step=summary.tokens_per_step,
        flops_per_token=summary.counts.flops_per_token,
        peak=processes.from_first(lambda: highest_peak(log, facts, measured)),
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
            run.end_memory()
    except (DivergedError, ReplicasError):
        # A restart goes on from the checkpoint that the message names, and not from a later step.
        run.end_memory()
        raise
    finally:
        run.watch.enter("finish")
        run.checkpoints.close()
        if run.memory is not None:
            run.memory.close()
        for problem in run.records.close():
            run.display.note(f"warning: {problem}")
        if run.expert_loads is not None:
            run.expert_loads.close()
    if stopped and run.mismatch is not None and run.mismatch.topology is not None:
        return run.mismatch.topology
    return RunEnd(state, stopped)
