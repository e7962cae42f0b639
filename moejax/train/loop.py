"""A run from top to bottom, in the order in which it happens.

    train                 settings are checked, data is opened
      train_together      once for each set of hosts
        join_program      the processes meet, process 0 claims the run directory
        find_origin       a checkpoint or weights are chosen; no device is touched so far
        start_run         plan, mesh, step; then records and the state
        run_to_end        the loop, the last evaluation, the end

All processes run this code. Process 0 alone writes records and shows lines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from moejax.checkpoint.digests import forget_places
from moejax.checkpoint.find import Saved
from moejax.checkpoint.remote import Copies
from moejax.checkpoint.restore import quarantine_wrong_steps, resume
from moejax.checkpoint.source import Source, base_of, keep_origin
from moejax.checkpoint.writer import Checkpoints
from moejax.comm.cpu.exchange import disconnect
from moejax.config.checks import check
from moejax.config.checks.paths import check_places
from moejax.config.load import save_json
from moejax.config.schema import Config
from moejax.data.sources import keep_tokenizer
from moejax.errors import DivergedError, ReplicasError
from moejax.plan.cluster.topology import Topology
from moejax.runtime.assignment import Assignment, find_assignment
from moejax.runtime.patches import let_orbax_begin_again
from moejax.runtime.processes import ALONE, Processes
from moejax.runtime.start import join, leave, measure_peak
from moejax.screen import screen
from moejax.step.model import check_adapters
from moejax.step.optimizer import learning_rate
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.evaluation import finish
from moejax.train.faults.bad_steps import RECENT
from moejax.train.faults.watching import watching
from moejax.train.inputs import Inputs, open_inputs
from moejax.train.memory.headroom import (
    Headroom,
    keeps_on_host,
    lock_warnings,
    naming_failed_allocation,
    needed_of,
)
from moejax.train.memory.start import Memory
from moejax.train.planning import PlannedStep, build_monitor, kept_plan, prepare_step
from moejax.train.records.display import Display
from moejax.train.records.metrics import Meter, Records
from moejax.train.records.start_record import ExpertLoads, describe_start, highest_peak
from moejax.train.records.summary import memory_warnings, print_summary
from moejax.train.records.trackers import check_trackers, open_trackers
from moejax.train.rollback import run_with_rollbacks
from moejax.train.run import OnStep, Run, Start
from moejax.train.sites.hub import token_of
from moejax.train.sites.site import Site
from moejax.train.start import (
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
    restore_skipped,
)

LOCK_S = 60.0  # a run whose hosts change waits so long for the lock of the processes before it


class RunEnd(NamedTuple):
    """The end of a run.

    Attributes:
      state: None if nothing was restored, as the run was finished before, or if it goes on.
      stopped: whether it was asked to stop before its last step.
      reassigned: whether it goes on with other processes (`runtime.assignment`).
      new_links: the cluster as measured just now, if the run goes on with a new plan.
      train_step: the functions that the state is for; None without a state.
      processes: the program's.
    """

    state: TrainState | None
    stopped: bool = False
    reassigned: bool = False
    new_links: Topology | None = None
    train_step: TrainStep | None = None
    processes: Processes = ALONE


def train(cfg: Config, console: Console, on_step: OnStep | None = None) -> RunEnd:
    """Trains as configured, resuming if the run directory holds a checkpoint.

    Args:
      on_step: called between steps. Its errors end the run.
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
    if cfg.outer.hub is not None:
        token_of(None)
    inputs, assignment = open_inputs(cfg), find_assignment()
    while True:  # once, or once for each set of hosts
        end = train_together(cfg, inputs, console, assignment, on_step)
        if assignment is None or not end.reassigned:
            return end
        forget_places()
        disconnect()
        leave()
        if not assignment.take():
            return RunEnd(None, stopped=True)


def train_together(
    cfg: Config,
    inputs: Inputs,
    console: Console,
    assignment: Assignment | None,
    on_step: OnStep | None,
) -> RunEnd:
    """Trains with the processes that are assigned now; plans once more if its links change."""
    with join_program(cfg, inputs, console, assignment) as start:
        start, new_links = replace(start, on_step=on_step), None
        while True:  # once, or once for each plan
            origin = find_origin(start)
            if origin is None:
                return RunEnd(None)
            # No name holds the first state: it would stay on the devices beside the next plan's.
            end = run_to_end(*start_run(start, origin, new_links))
            if end.new_links is None:
                return end
            new_links = end.new_links
            start.watch.enter("start")


@contextmanager
def join_program(
    cfg: Config, inputs: Inputs, console: Console, assignment: Assignment | None
) -> Iterator[Start]:
    """Has the processes that are assigned now meet, and claims the run directory for the block.

    Raises:
      InputError: in all processes, if their configs differ or another run has the directory.
      MeetingError: if some processes do not come.
    """
    run_dir, patience_s = Path(cfg.run_dir), LOCK_S if assignment is not None else 0.0
    with join() as processes:
        let_orbax_begin_again(processes.gather)
        check_same_config(cfg, processes)
        lock = processes.together(lambda: claim(run_dir, patience_s) if processes.first else None)
        shown = console if processes.first else screen(quiet=True)
        with nullcontext() if lock is None else closing(lock), watching(cfg, processes) as watch:
            yield Start(cfg, inputs, shown, processes, watch, assignment)
            # Process 0 may write digests for long, and JAX's own shutdown waits only minutes.
            processes.gather("done")


@dataclass
class Origin:
    """The checkpoint or weights that a run starts from.

    Attributes:
      saved: the checkpoint to resume; None: there is none.
      source: of the first weights if nothing is resumed, and of frozen weights always.
      memory: copies of the state in hosts' memory, one of which may be newer than `saved`.
      copies: of checkpoints in another place, with `checkpoint.copy_to`.
      choose: chooses again, after a damaged checkpoint was renamed.
      notes: lines for the user so far.
    """

    saved: Saved | None
    source: Source | None
    memory: Memory
    copies: Copies | None
    choose: Callable[[], tuple[Saved | None, Source | None, list[str]]]
    notes: list[str]


def find_origin(start: Start) -> Origin | None:
    """Chooses the checkpoint or weights to go on from. Touches no device. All processes call it.

    Returns None if the run was finished before, and says so.
    """
    cfg, inputs, processes = start.cfg, start.inputs, start.processes
    copies = open_copies(cfg, processes)
    choose = partial(choose_checkpoint, kept_plan(cfg), inputs.content, processes, copies)
    saved, source, notes = choose()
    notes += restore_skipped(inputs, saved, processes)
    if saved is not None:
        finished = processes.from_first(partial(finished_message, cfg, inputs, saved))
        if finished:
            for line in (*notes, finished):
                start.console.print(line, highlight=False, soft_wrap=True)
            return None
    memory = Memory(cfg, processes, saved)
    return Origin(saved, source, memory, copies, choose, [*notes, *memory.notes])


def start_run(start: Start, origin: Origin, new_links: Topology | None) -> tuple[Run, TrainState]:
    """Starts the devices: plan, mesh, step, records, state. Returns a run that is ready to loop.

    Args:
      new_links: newly measured links to plan with; the run then does not plan a third time.
    """
    inputs, processes, console = start.inputs, start.processes, start.console
    resuming = origin.saved is not None or origin.memory.found is not None
    planned = prepare_step(
        start.cfg, processes, console, start.watch, resuming=resuming, new_links=new_links
    )
    train_step, cfg = planned.train_step, planned.train_step.cfg
    check_origin(origin, planned, processes)
    print_summary(planned.summary, train_step, console, planned.run_plan.rows())

    records = open_records(cfg, origin.notes, console, processes)
    if processes.first:  # what exports carry along
        keep_origin(origin.source, Path(cfg.run_dir))
        keep_tokenizer(cfg.data, Path(cfg.run_dir))

    base = base_of(cfg, origin.source)
    with start.watch.during("restore"), naming_failed_allocation(train_step):
        state, facts = restore(start, origin, train_step, base, records)
    step = int(state.step)
    checkpoints = open_checkpoints(cfg, processes, records, console, origin.copies)
    meter = record_start(records, step, planned, processes)
    display = Display(console, cfg.train.num_steps, step)
    warn = partial(console.print, highlight=False, soft_wrap=True)
    memory = origin.memory.begin_saves(train_step, inputs.content, base, records.event, warn)
    run = Run(cfg, train_step, inputs, checkpoints, records, meter, display, console)
    run.processes, run.watch, run.assignment = processes, start.watch, start.assignment
    run.memory, run.base, run.recent = memory, base, facts.get(RECENT, {})
    run.on_step, run.site = start.on_step, join_sites(run, facts)
    if keeps_on_host(cfg):
        run.headroom = Headroom(needed_of(train_step), processes)
    if processes.first and cfg.model.has_experts:
        run.expert_loads = ExpertLoads(Path(cfg.run_dir), cfg.train.num_steps)
    if planned.run_plan.plan is not None:
        records.event("plan", step, seconds=planned.run_plan.plan.predicted["seconds"])
    if new_links is None:
        run.monitor = build_monitor(planned, processes)
    return run, state


def run_to_end(run: Run, state: TrainState) -> RunEnd:
    """Runs the loop and the last evaluation, and closes the run."""
    try:
        # One process of several fails at once here: a save under way would wait for all of them.
        with run.display, run.processes, naming_failed_allocation(run.train_step):
            state, stopped = run_with_rollbacks(run, state)
        with run.processes:
            if not stopped:
                finish(run, state)
            run.end_memory()
    except (DivergedError, ReplicasError):
        # A restart goes on from the checkpoint that the message names, and not from a later step.
        run.end_memory()
        raise
    finally:
        run.close()
    if stopped and run.new_links is not None:
        return RunEnd(None, stopped, new_links=run.new_links)
    if run.reassigned:
        return RunEnd(None, stopped, reassigned=True)
    return RunEnd(state, stopped, train_step=run.train_step, processes=run.processes)


def check_origin(origin: Origin, planned: PlannedStep, processes: Processes) -> None:
    """Checks the origin against the built step: step of the state, disk, memory. Adds notes.

    Raises:
      InputError: if no checkpoint is whole.
      StorageFullError: if no checkpoint fits the disk.
    """
    train_step, notes = planned.train_step, origin.notes
    notes += planned.run_plan.notes
    origin.saved, more = quarantine_wrong_steps(origin.saved, train_step, origin.choose, processes)
    notes += [note for note in more if note not in notes]
    checkpoints = Path(train_step.cfg.run_dir) / "checkpoints"
    notes += check_disk(train_step, origin.saved, checkpoints, processes)
    notes += memory_warnings(planned.summary, planned.limit)
    notes += lock_warnings(train_step, planned.summary.host_bytes, processes)


def restore(
    start: Start,
    origin: Origin,
    train_step: TrainStep,
    base: dict[str, str] | None,
    records: Records,
) -> tuple[TrainState, Mapping[str, Any]]:
    """Returns the state to go on from, and the entries of its manifest.

    The state comes from hosts' memory if a newer step is there, else from the checkpoint, else from
    `checkpoint.init_from`, else from the seed. Frozen weights always come from
    `checkpoint.init_from`.
    """
    inputs, processes, console = start.inputs, start.processes, start.console
    note = partial(note_once, console, records, origin.notes)
    say = partial(console.print, soft_wrap=True)
    found = origin.memory.resume(
        train_step, inputs.content, inputs.skipped, base, say, note
    ) or resume(train_step, origin.saved, origin.choose, processes, console, note)
    state = initial_state(train_step, found.state, origin.source, console, processes)
    return state, found.facts


def join_sites(run: Run, facts: Mapping[str, Any]) -> Site | None:
    """Joins the other sites of an outer loop, if they are runs of their own.

    Args:
      facts: entries of the manifest of the state that was restored.
    """
    if run.cfg.outer.hub is None:
        return None
    waiting = partial(run.watch.during, "sites")
    site = Site(run.train_step, run.processes, waiting, run.records.event)
    site.resume(facts)
    return site


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
        note_once(console, records, (), text)
    return records


def note_once(console: Console, records: Records, known: Sequence[str], text: str) -> None:
    """Shows and records a note of the start, unless it is known."""
    if text in known:
        return
    console.print(text, highlight=False, soft_wrap=True)
    records.event("note", 0, text=text)


def record_start(records: Records, step: int, planned: PlannedStep, processes: Processes) -> Meter:
    """Records the start of a run. Returns its meter, which knows the peak of all devices."""
    cfg, summary = planned.train_step.cfg, planned.summary
    facts = describe_start(planned.train_step, summary, processes)
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
        forced_routing=None if (forced := cfg.moe.router.forced) == "none" else forced,
    )


def open_checkpoints(
    cfg: Config,
    processes: Processes,
    records: Records,
    console: Console,
    copies: Copies | None = None,
) -> Checkpoints:
    """Returns the run's checkpoints. Failed saves and copies are recorded as soon as seen."""

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
        failed=lambda step, text: records.event("save_failed", step, text=text),
        copies=copies,
        copied=copied,
    )
