"""The loop over the steps of a run; between them reports, checks, saves and evaluations."""

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.checkpoint.compatible import describe_run
from moejax.checkpoint.disk_space import safe_text
from moejax.checkpoint.writer import arrays_of
from moejax.data.skipped import data_position
from moejax.errors import ReplicasError
from moejax.runtime.interrupt import Interrupt
from moejax.runtime.processes import Stop
from moejax.step.state import Batch, Metrics, TrainState
from moejax.train.codec_schedule import CodecSchedule
from moejax.train.evaluation import evaluate
from moejax.train.faults.bad_steps import RECENT, StepCheck
from moejax.train.faults.replicas import check_replicas
from moejax.train.memory.headroom import memory_full
from moejax.train.plan_monitor import PlanMonitor
from moejax.train.planning import save_expert_load
from moejax.train.records.metrics import losses_of, router_distance
from moejax.train.records.profile import Profile
from moejax.train.records.skipped_data import ENTRY, to_json
from moejax.train.run import Run


def run_steps(run: Run, state: TrainState) -> tuple[TrainState, bool]:
    """Runs the loop. Returns the state, and whether it was asked to stop early.

    Raises:
      GoBackError: if the run must go back to before bad steps (`train.rollback`).
      DivergedError: if it must end.
    """
    cfg, last, step = run.cfg, run.cfg.train.num_steps, int(state.step)
    schedule = CodecSchedule(run.train_step, run.processes, run.watch)
    stopping = Stop(run.processes)
    profile = Profile(cfg.profile, Path(cfg.run_dir), process=run.processes.index)
    shown, watched = "", (cfg.checkpoint.save_every, cfg.checkpoint.memory_every, called(run))
    if run.meter.started is None:  # after going back it is compiled already
        compile_step(run, schedule, step)
    with (
        closing(profile),
        Interrupt() as interrupt,
        run.inputs.batches(run.train_step, step, last) as batches,
    ):
        check = StepCheck(run, int(state.skipped), interrupt)
        run.watch.enter("input", step + 1)
        for batch in batches:
            run.watch.enter("step", step + 1)
            run_step, codecs = schedule.step_for(step)
            shown = show_codecs(run, step, codecs, shown)
            profile.before(step + 1)
            state, metrics = one_step(run, run_step, state, batch, step)
            step += 1
            run.meter.add(metrics)
            end_profile(run, profile, step, metrics, schedule.program)
            check.check_previous(step, metrics)
            run.display.step(step)
            if run.meter.started is None or step == last or step % cfg.train.log_every == 0:
                report(run, step, state, metrics)
            look_at_memory(run, step, cfg.train.log_every, *watched)
            stop = run.whole and stopping.after(step, interrupt.requested or run.must_end)
            saves = save_due(run, step)
            if step == last or stop or saves or due(step, *watched):
                check.settle(step, metrics)
            if (saves := saves and not check.suspicious) or step == last or stop:
                save(run, step, state)
            else:
                between_saves(run, step, state, suspicious=check.suspicious)
            run.record_saved(run.checkpoints.finished())
            if step < last and (stop or (saves and run.new_links is not None)):
                stop_early(run, step, interrupt.requested)
                return state, True
            between_steps(run, state, step, lambda: interrupt.requested)
            run.watch.enter("input", step + 1)
    return state, False


def one_step(
    run: Run, run_step: Callable, state: TrainState, batch: Batch, step: int
) -> tuple[TrainState, Metrics]:
    """Runs the step after `step`. A site that is a run of its own begins or ends a round there."""
    if run.site is None:
        return run_step(state, batch)
    state = run.site.before(step, state)
    state, metrics = run_step(state, batch)
    return run.site.after(step + 1, state), metrics


def save_due(run: Run, step: int) -> bool:
    """Returns whether to save after a step; within a round of sites it is put off to its end."""
    found = run.save_is_late or due(step, run.cfg.checkpoint.save_every)
    run.save_is_late = found and not run.whole
    return found and run.whole


def look_at_memory(run: Run, step: int, *every: int | None) -> None:
    """Looks at what is left of hosts' memory, where due, if the run keeps arrays there."""
    if run.headroom is not None and due(step, *every):
        run.headroom.look()


def compile_step(run: Run, schedule: CodecSchedule, step: int) -> None:
    """Compiles the first step. Ctrl-C ends it at once: it is not caught yet."""
    with run.display.busy("compiling the step"):
        began = time.perf_counter()
        schedule.step_for(step)
    run.display.note(f"compiled in {time.perf_counter() - began:.0f} s")


def show_codecs(run: Run, step: int, codecs: str, shown: str) -> str:
    """Shows the codecs of a step if they are not those shown last. Returns them."""
    if codecs != shown:
        note(run, "codecs", step, f"codecs across nodes: {codecs}", codecs=codecs)
    return codecs


def called(run: Run) -> int | None:
    """Returns the steps between two calls of `Run.on_step`."""
    return None if run.on_step is None else run.on_step.every


def between_steps(run: Run, state: TrainState, step: int, asked: Callable[[], bool]) -> None:
    """Evaluates, and calls the user's function, where due. Rates do not count the time."""
    began = time.perf_counter()
    if due(step, run.cfg.train.eval_every) and step < run.cfg.train.num_steps:
        evaluate_part(run, state, step, asked)
    if run.on_step is not None and due(step, run.on_step.every):
        with run.watch.during("on_step", step):
            run.on_step.call(run, state)
    run.meter.pause(time.perf_counter() - began)


def evaluate_part(run: Run, state: TrainState, step: int, asked: Callable[[], bool]) -> None:
    """Evaluates on a part of the held-out text."""
    with run.watch.during("evaluate", step):
        batches = run.cfg.train.eval_batches
        evaluate(run, state, step, batches, lambda: asked() or run.hosts_change)


def end_profile(
    run: Run,
    profile: Profile,
    step: int,
    metrics: Any,
    program: Callable[[], str],
) -> None:
    """Ends the profile if `step` was its last. Rates do not count the time to write the trace."""
    began = time.perf_counter()
    if profile.after(step, metrics.loss, program):
        run.meter.pause(time.perf_counter() - began)
        text = f"profile: xprof --logdir {profile.directory}"
        note(run, "profile", step, text, directory=str(profile.directory))


def stop_early(run: Run, step: int, asked: bool) -> None:
    """Ends the loop before its last step: as asked, for other hosts, or to plan again.

    Args:
      asked: whether this process was asked to stop. It comes first: a new plan would forget it.

    Raises:
      HostMemoryError: in all processes, if a host has too little memory left.
    """
    run.record_saved(run.checkpoints.wait())
    why = run.assignment.proposed if run.assignment is not None else None
    found = run.processes.gather([asked, why, run.host_short])
    asked_by, whys, shorts = zip(*found, strict=True)
    if any(asked_by):
        run.new_links = None
        run.display.note(f"stopped at step {step}; run the same command to go on")
        run.records.event("stopped", step)
    elif short := next(filter(None, shorts), None):
        run.records.event("memory_full", step, text=short)
        raise memory_full(short, step)
    elif why := next(filter(None, whys), None):
        run.new_links, run.reassigned = None, True
        run.display.note(f"step {step}  hosts change: {why}")
        run.records.event("hosts_change", step, text=why)
    else:
        note(run, "planning_again", step, "planning again")


def note(run: Run, event: str, step: int, text: str, **values: str) -> None:
    """Shows and records a note about a step."""
    run.display.note(f"step {step}  {text}")
    run.records.event(event, step, **values)


def due(step: int, *every: int | None) -> bool:
    """Whether `step` is a multiple of one of these."""
    return any(one is not None and step % one == 0 for one in every)


def report(run: Run, step: int, state: TrainState, metrics: Any) -> None:
    """Shows and records the step's metrics. The first call starts the clock."""
    if (distance := router_distance(state)) is not None:
        run.records.event("sites", step, router_distance=distance)
    meter = run.meter
    if meter.started is None:
        run.records.event("first_step", step, loss=losses_of(metrics)[0])
        meter.start(step)
        return
    line = meter.report(step)
    run.records.report(line)
    run.display.show(line)
    if run.expert_loads is not None:
        run.expert_loads.add(step, metrics.load_LE)
        if run.cfg.moe.router.forced == "none":  # else a planner would take it for a model's load
            save_expert_load(np.asarray(metrics.load_LE), Path(run.cfg.run_dir) / "routing.json")
    if run.monitor is not None:
        compare_with_plan(run, run.monitor, step, meter.tokens_per_step / line.tokens_per_second)
    for problem in run.records.trackers.problems():
        run.display.note(f"step {step}  warning: {problem}")
        run.records.event("note", step, text=problem)
    meter.start(step)


def compare_with_plan(run: Run, monitor: PlanMonitor, step: int, seconds: float) -> None:
    """Records measured over predicted time; explains it if it stays off. All processes call it."""
    seconds = run.processes.gather(seconds)[0]
    run.records.event("predicted", step, ratio=seconds / monitor.predicted)
    if not monitor.off(seconds):
        return
    now = None
    if monitor.measure is not None:
        busy = run.display.busy("steps are not as predicted: measuring links again")
        with run.watch.during("plan", step), busy as progress:
            now = monitor.measure(progress)
    text = monitor.mismatch(seconds, now)
    run.display.note(text)
    run.records.event("note", step, text=text)
    run.new_links = now


def compare(run: Run, step: int, state: TrainState) -> None:
    """Raises ReplicasError, and records it, if copies of the state on different devices differ."""
    try:
        check_replicas(arrays_of(state), step, run.processes)
    except ReplicasError as error:
        run.records.event("replicas_differ", step, text=str(error))
        raise


def between_saves(run: Run, step: int, state: TrainState, *, suspicious: bool) -> None:
    """Compares copies of the state, and saves it to hosts' memory if not suspicious, where due."""
    if due(step, run.cfg.train.compare_every):
        compare(run, step, state)
    keeps = run.memory is not None and run.whole and not suspicious
    if keeps and due(step, run.cfg.checkpoint.memory_every):
        facts = describe_data(run, step)
        assert run.memory is not None
        run.memory.save(step, arrays_of(state), facts, run.watch.during("save", step))


def save(run: Run, step: int, state: TrainState) -> None:
    """Starts a checkpoint after the previous one is complete. Waits for it if memory is short."""
    with run.watch.during("save", step):
        # `Checkpoints.save` waits too, for callers that do not, but does not say what was finished.
        run.record_saved(run.checkpoints.wait())
        compare(run, step, state)
        run.records.event("save", step)
        facts = describe_run(run.train_step, run.inputs.content, run.base)
        facts |= describe_data(run, step)
        safe = partial(safe_text, run.checkpoints.directory)
        wait = run.headroom is not None and run.headroom.must_wait(safe)
        run.checkpoints.save(step, state, {**facts, "jax": jax.__version__})
        if wait:
            run.record_saved(run.checkpoints.wait())


def describe_data(run: Run, step: int) -> dict[str, Any]:
    """Returns a manifest's entries about the position in the data, and the losses up to a step."""
    skipped = run.inputs.skipped
    position = data_position(step, skipped)
    rounds = {} if run.site is None else run.site.facts()
    return {"data_position": position, ENTRY: to_json(skipped), RECENT: run.recent, **rounds}
