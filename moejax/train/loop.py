"""The run: everything from an empty directory to trained weights, in order.

Order of a start: config and data are checked, the processes of the program meet, process 0 takes
the run directory, checkpoint files are checked; then devices are started, a plan is made where one
is wanted, the mesh is resolved, the step is compiled, and state comes from the newest checkpoint,
else from `checkpoint.init_from`, else from the seed; frozen weights always come from
`checkpoint.init_from`. All processes run this code; process 0 alone
writes records and shows them.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from moejax.checkpoint.digests import forget_places
from moejax.checkpoint.find import Saved
from moejax.checkpoint.remote import Copies
from moejax.checkpoint.restore import resume, set_aside_wrong_steps
from moejax.checkpoint.source import Source, keep_origin
from moejax.checkpoint.writer import Checkpoints, join_orbax
from moejax.comm.cpu.exchange import disconnect
from moejax.config.checks import check
from moejax.config.checks.paths import check_places
from moejax.config.load import save_json
from moejax.config.schema import Config
from moejax.data.sources import keep_tokenizer
from moejax.errors import DivergedError, ReplicasError
from moejax.plan.cluster.topology import Topology
from moejax.plan.probe.timer import ProgressFn
from moejax.plan.search.file import Plan
from moejax.runtime.assignment import Assignment, find_assignment
from moejax.runtime.processes import Processes
from moejax.runtime.start import join, leave, measure_peak
from moejax.runtime.watch import Watch
from moejax.screen import screen
from moejax.step.model import check_adapters
from moejax.step.optimizer import learning_rate
from moejax.step.state import TrainState
from moejax.train.evaluation import finish
from moejax.train.faults.bad_steps import recent_of
from moejax.train.faults.watching import watching
from moejax.train.inputs import Inputs, open_inputs
from moejax.train.memory.start import Memory
from moejax.train.plan_monitor import PlanMonitor
from moejax.train.planning import Prepared, kept_plan, measure, prepare
from moejax.train.records.display import Display
from moejax.train.records.metrics import Meter, Records
from moejax.train.records.start_record import ExpertLoads, describe_start, highest_peak
from moejax.train.records.summary import memory_warnings, print_summary
from moejax.train.records.trackers import check_trackers, open_trackers
from moejax.train.rollback import run_with_rollbacks
from moejax.train.run import Run
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
    leave_out,
    open_copies,
)

LOCK_S = 60.0  # a run whose hosts change waits so long for the processes before to let it go


class RunEnd(NamedTuple):
    """The end of a run.

    Attributes:
      state: None if the run was done before, so that nothing was restored.
      stopped: whether it was asked to stop before its last step.
      reassigned: whether it goes on with other processes (`runtime.assignment`).
    """

    state: TrainState | None
    stopped: bool = False
    reassigned: bool = False


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
    check_places(cfg)
    check_simulated_devices(cfg)
    check_trackers(cfg)
    inputs, assignment = open_inputs(cfg), find_assignment()
    while True:
        ended = train_together(cfg, inputs, console, assignment)
        if assignment is None or not ended.reassigned:
            return ended
        forget_places()
        disconnect()
        leave()
        if not assignment.take():
            return RunEnd(None, stopped=True)


def train_together(
    cfg: Config, inputs: Inputs, console: Console, assignment: Assignment | None
) -> RunEnd:
    """Trains as one program with the processes that are assigned now."""
    with join() as processes:
        join_orbax(processes)
        check_same_config(cfg, processes)
        run_dir = Path(cfg.run_dir)
        patience_s = LOCK_S if assignment is not None else 0.0
        lock = processes.together(lambda: claim(run_dir, patience_s) if processes.first else None)
        try:
            shown = console if processes.first else screen(quiet=True)
            with watching(cfg, processes) as watch:
                ended = train_claimed(cfg, inputs, shown, processes, watch, assignment)
                # Process 0 may write digests for long, and JAX's own shutdown waits only minutes.
                processes.gather("done")
            return ended
        finally:
            if lock is not None:
                lock.close()


def train_claimed(
    cfg: Config,
    inputs: Inputs,
    console: Console,
    processes: Processes,
    watch: Watch,
    assignment: Assignment | None = None,
) -> RunEnd:
    """Trains in a run directory that no other run uses."""
    train_now = partial(train_planned, cfg, inputs, console, processes, watch, assignment)
    ended = train_now()
    if isinstance(ended, Topology):  # stopped to plan again, because the links changed
        watch.enter("start")
        ended = train_now(measured=ended)
    assert isinstance(ended, RunEnd), "a run plans at most twice"
    return ended


def train_planned(
    cfg: Config,
    inputs: Inputs,
    console: Console,
    processes: Processes,
    watch: Watch,
    assignment: Assignment | None = None,
    measured: Topology | None = None,
) -> RunEnd | Topology:
    """Plans and trains. Returns the run's end, or a topology to plan again with.

    Args:
      measured: newly measured links to plan with; the run then does not plan a third time.
    """
    copies = open_copies(cfg, processes)
    choosing = partial(choose_checkpoint, kept_plan(cfg), inputs.content, processes, copies)
    saved, source, notes = choosing()
    notes += leave_out(inputs, saved, processes)
    if _done(cfg, inputs, saved, notes, console, processes):
        return RunEnd(None)
    memory = Memory(cfg, processes, saved)
    notes += memory.notes
    again = {"resuming": saved is not None or memory.found, "measured": measured}
    prepared = prepare(cfg, processes, console, watch, **again)
    cfg, train_step, summary = prepared.train_step.cfg, prepared.train_step, prepared.summary
    notes += prepared.planned.notes
    saved, more = set_aside_wrong_steps(saved, train_step, choosing, processes)
    notes += [note for note in more if note not in notes]
    notes += check_disk(train_step, saved, Path(cfg.run_dir) / "checkpoints", processes)
    notes += memory_warnings(summary, prepared.limit)
    print_summary(summary, train_step, console, prepared.planned.rows())
    records = open_records(cfg, notes, console, processes)
    if processes.first:
        _keep_for_exports(cfg, source)
    base = base_of(cfg, source)
    with watch.during("restore"):
        told = partial(tell_note, console, records, notes)
        resumed = memory.resume(
            train_step, inputs.content, inputs.skipped, base, console, told
        ) or resume(train_step, saved, choosing, processes, console, told)
        state = initial_state(train_step, resumed and resumed.state, source, console, processes)
    checkpoints = open_checkpoints(cfg, processes, records, console, copies)
    meter = _begin_records(records, int(state.step), prepared, processes)
    display = Display(console, cfg.train.num_steps, int(state.step))
    kept = memory.begin(train_step, inputs.content, base, records, console)
    run = Run(cfg, train_step, inputs, checkpoints, records, display, console, processes, watch)
    run.base, run.assignment, run.memory = base, assignment, kept
    run.recent = {} if resumed is None else recent_of(resumed.facts)
    _follow(run, prepared, int(state.step), monitored=measured is None)
    return _run_to_end(run, state, meter)


def _keep_for_exports(cfg: Config, source: Source | None) -> None:
    """Writes into the run's directory what its exports carry along."""
    keep_origin(source, Path(cfg.run_dir))
    keep_tokenizer(cfg.data, Path(cfg.run_dir))


def _follow(run: Run, prepared: Prepared, step: int, *, monitored: bool) -> None:
    """Has a run record its experts' loads, and compare its steps with what was planned."""
    planned, devices = prepared.planned, prepared.devices
    if run.processes.first and run.cfg.model.has_experts:
        run.expert_loads = ExpertLoads(Path(run.cfg.run_dir), run.cfg.train.num_steps)
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


def _begin_records(records: Records, step: int, prepared: Prepared, processes: Processes) -> Meter:
    """Records the start of a run. Returns its meter, which knows the peak of all devices."""
    cfg, summary = prepared.train_step.cfg, prepared.summary
    facts = describe_start(prepared.train_step, summary, processes)
    measured = sum(processes.gather(measure_peak(jax.local_devices(), cfg.model.dtype)))
    log = Path(cfg.run_dir) / "metrics.jsonl"
    peak = processes.from_first(lambda: highest_peak(log, facts, measured))
    records.start(step, {**facts, "peak_flops_per_second": peak})
    return Meter(
        tokens_per_step=summary.tokens_per_step,
        flops_per_token=summary.counts.flops_per_token,
        peak=peak,
        num_steps=cfg.train.num_steps,
        schedule=learning_rate(cfg.optimizer, cfg.train.num_steps, cfg.optimizer.learning_rate),
    )


def _run_to_end(run: Run, state: TrainState, meter: Meter) -> RunEnd | Topology:
    """Runs the steps and the last evaluation. Returns the same as `train_planned`."""
    try:
        # One process of several fails at once here: a save under way would wait for all of them.
        with run.display, run.processes:
            state, stopped = run_with_rollbacks(run, state, meter)
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
    return RunEnd(None if run.reassigned else state, stopped, run.reassigned)


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


def open_records(
    cfg: Config, notes: Sequence[str], console: Console, processes: Processes
) -> Records:
    """Writes the resolved config, opens the records, and shows and records the start's notes."""
    run_dir = Path(cfg.run_dir)
    if processes.first:
        save_json(cfg, run_dir / "config.json")
    trackers = open_trackers(cfg) if processes.first else None
    records = Records(run_dir, written=processes.first, trackers=trackers)
    for text in notes:
        tell_note(console, records, (), text)
    return records


def tell_note(console: Console, records: Records, known: Sequence[str], text: str) -> None:
    """Shows and records a note of the start, unless it is known."""
    if text in known:
        return
    console.print(text, highlight=False, soft_wrap=True)
    records.event("note", 0, text=text)
