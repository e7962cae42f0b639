"""The run: everything from an empty directory to trained weights, in order.

Order of a start: config and data are checked, the processes of the program meet, process 0 takes
the run directory, checkpoint files are checked; then devices are started, a plan is made where one
is wanted, the mesh is resolved, the step is compiled, and state comes from the newest checkpoint,
else from `checkpoint.init_from`, else from the seed. All processes run this code; process 0 alone
writes records and shows them.
"""

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from moejax.checks import check, resolve_mesh
from moejax.config import Config
from moejax.dims import build_layout
from moejax.plan.build import build_mesh
from moejax.plan.topology import Topology
from moejax.runtime.interrupt import Interrupt
from moejax.runtime.processes import ALONE, Processes, Stop
from moejax.runtime.start import join, measure_peak, platform_of, start
from moejax.settings import save_json
from moejax.train.checkpoint import Checkpoints
from moejax.train.inputs import Inputs, open_inputs
from moejax.train.metrics import Display, Meter, Records
from moejax.train.planning import kept_plan, measure, plan_run, save_routing
from moejax.train.resume import describe_run
from moejax.train.sample import sample
from moejax.train.start import check_place, check_same_config, choose, claim, counted, first_state
from moejax.train.state import TrainState
from moejax.train.step import Trainer, build_trainer
from moejax.train.stretches import Stretches
from moejax.train.summary import print_summary, summarize
from moejax.train.watch import Doubt, Watch

LN2 = math.log(2)


@dataclass
class Run:
    """What the stages of a run share."""

    cfg: Config
    trainer: Trainer
    inputs: Inputs
    checkpoints: Checkpoints
    records: Records
    display: Display
    console: Console
    processes: Processes = ALONE
    watch: Watch | None = None  # of a plan whose links are known
    doubt: Doubt | None = None  # what the watch has found, if a new plan is allowed


def train(cfg: Config, console: Console) -> TrainState:
    """Trains as configured, resuming if the run directory holds a checkpoint. Returns the state.

    Raises:
      InputError: for anything the user can fix, before a device is touched where that is possible.
    """
    check(cfg)
    check_place(cfg)
    inputs = open_inputs(cfg)
    with join() as processes:
        check_same_config(cfg, processes)
        run_dir = Path(cfg.run_dir)
        lock = processes.together(lambda: claim(run_dir) if processes.first else None)
        try:
            shown = console if processes.first else Console(quiet=True)
            state = train_claimed(cfg, inputs, shown, processes)
            # Process 0 may have written digests for long, and JAX's own end waits only minutes.
            processes.gather("done")
            return state
        finally:
            if lock is not None:
                lock.close()


def train_claimed(
    cfg: Config, inputs: Inputs, console: Console, processes: Processes
) -> TrainState:
    """Trains in a run directory that no other run uses."""
    found = train_planned(cfg, inputs, console, processes)
    if isinstance(found, Topology):  # at a checkpoint, with other links than the plan was made for
        found = train_planned(cfg, inputs, console, processes, measured=found)
    assert isinstance(found, TrainState), "a run is planned again once"
    return found


def train_planned(
    cfg: Config,
    inputs: Inputs,
    console: Console,
    processes: Processes,
    measured: Topology | None = None,
) -> TrainState | Topology:
    """Plans and trains. Returns the last state, or links by which to plan again.

    Args:
      measured: links as they are now, to plan by; then the run does not ask again.
    """
    run_dir = Path(cfg.run_dir)
    choosing = partial(choose, kept_plan(cfg), inputs.content, processes)
    saved, source, notes = choosing()
    devices = start(cfg.mesh)
    platform = platform_of(devices)
    planned = plan_run(
        cfg, devices, processes, console, resuming=saved is not None, measured=measured
    )
    notes += planned.notes
    cfg = resolve_mesh(planned.cfg, len(devices), platform, processes=processes.count)
    trainer = build_trainer(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)
    saved, more = counted(saved, trainer, choosing, processes)
    notes += [note for note in more if note not in notes]
    summary = summarize(trainer)
    print_summary(summary, trainer, console, planned.rows())
    if processes.first:
        save_json(cfg, run_dir / "config.json")
    records = Records(run_dir, written=processes.first)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
        records.event("note", 0, text=note)
    keep = cfg.checkpoint.keep
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=keep, processes=processes)
    state = first_state(trainer, checkpoints, saved, source, console)
    meter = Meter(
        tokens_per_step=summary.tokens_per_step,
        flops_per_token=summary.counts.flops_per_token,
        peak=sum(processes.gather(measure_peak(jax.local_devices(), cfg.model.dtype))),
        num_steps=cfg.train.num_steps,
    )
    display = Display(console, cfg.train.num_steps, int(state.step))
    run = Run(cfg, trainer, inputs, checkpoints, records, display, console, processes)
    if planned.plan is not None:
        records.event("plan", int(state.step), seconds=planned.plan.predicted["seconds"])
        if planned.topology is not None and measured is None:
            again = partial(measure, cfg, devices, processes, Console(quiet=True))
            run.watch = Watch(planned.plan, planned.topology, lambda: again()[0])
    try:
        # A failure ends one process of several here: the save under way waits for all of them.
        with display, processes:
            state, stopped = steps(run, state, meter)
        with processes:
            if not stopped:
                finish(run, state)
    finally:
        checkpoints.close()
        records.close()
    return run.doubt.topology if run.doubt is not None and stopped else state


def steps(run: Run, state: TrainState, meter: Meter) -> tuple[TrainState, bool]:
    """The loop. Returns the state and whether it was asked to stop before the last step."""
    cfg, last, step = run.cfg, run.cfg.train.num_steps, int(state.step)
    stretches, stopping = Stretches(run.trainer, run.processes), Stop(run.processes)
    before, said = None, ""
    stretches.go_to(step, state)  # Ctrl-C ends a compilation at once: it is not caught yet
    with Interrupt() as interrupt, run.inputs.batches(run.trainer, step, last) as batches:
        for batch in batches:
            if (codecs := stretches.go_to(step, state)) != said:
                run.display.say(f"step {step}  codecs across nodes: {codecs}")
                run.records.event("codecs", step, codecs=codecs)
                said = codecs
            state, metrics = stretches.advance(state, batch)
            step += 1
            # One step in flight beside the one being prepared: never more, so that a stop, a
            # report or a save waits for one step only.
            jax.block_until_ready(before)
            before = metrics.loss
            run.display.step(step)
            if meter.started is None or step == last or step % cfg.train.log_every == 0:
                report(run, meter, step, metrics)
            stop = stopping.after(step, interrupt.requested)
            if due(step, cfg.checkpoint.save_every) or step == last or stop:
                save(run, step, state)
            record_saved(run, run.checkpoints.finished())
            if stop and step < last:
                record_saved(run, run.checkpoints.wait())
                run.display.say(f"stopped at step {step}; run the same command to go on")
                run.records.event("stopped", step)
                run.doubt = None
                return state, True
            if run.doubt is not None and due(step, cfg.checkpoint.save_every) and step < last:
                record_saved(run, run.checkpoints.wait())
                run.display.say(f"step {step}  planning again")
                run.records.event("planning_again", step)
                return state, True
            if due(step, cfg.train.eval_every) and step < last:
                began = time.perf_counter()
                evaluate(run, state, step, limit=cfg.train.eval_batches)
                meter.pause(time.perf_counter() - began)
    return state, False


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def report(run: Run, meter: Meter, step: int, metrics: Any) -> None:
    """Shows and records the step's metrics; the first call notes the loss and starts the clock."""
    if meter.started is None:
        run.records.event("first_step", step, loss=float(metrics.loss))
        meter.start(step)
        return
    line = meter.report(step, metrics)
    run.records.report(line)
    run.display.show(line)
    if run.processes.first and metrics.load_LE.size:
        save_routing(np.asarray(metrics.load_LE), Path(run.cfg.run_dir) / "routing.json")
    if run.watch is not None:
        hold_against_plan(run, run.watch, step, meter.tokens_per_step / line.tokens_per_second)
    meter.start(step)


def hold_against_plan(run: Run, watch: Watch, step: int, seconds: float) -> None:
    """Records how far a step is from its plan; when it stays off, says why. Takes all processes."""
    seconds = run.processes.gather(seconds)[0]
    run.records.event("predicted", step, ratio=seconds / watch.predicted)
    if not watch.off(seconds):
        return
    doubt = watch.doubt(seconds)
    run.display.say(doubt.text)
    run.records.event("note", step, text=doubt.text)
    if run.cfg.plan.replan:
        run.doubt = doubt


def save(run: Run, step: int, state: TrainState) -> None:
    """Starts a checkpoint, when the one before it is done."""
    record_saved(run, run.checkpoints.wait())
    run.records.event("save", step)
    facts = describe_run(run.trainer, run.inputs.content)
    run.checkpoints.save(step, state, {**facts, "data_position": step, "jax": jax.__version__})


def record_saved(run: Run, step: int | None) -> None:
    """Records that a checkpoint was finished, if one was."""
    if step is not None:
        run.records.event("saved", step)


def evaluate(run: Run, state: TrainState, step: int, limit: int | None) -> None:
    """Measures held-out text; says and records nats per token and bits per byte."""
    if run.inputs.held_out is None:
        return
    nats = targets = 0.0
    shapes = run.trainer.abstract, run.trainer.abstract_batch()
    run.processes.compile(run.trainer.evaluate, *shapes)
    for batch, count in run.inputs.eval_batches(run.trainer, limit):
        nats += float(run.trainer.evaluate(state, batch))
        targets += count
    nats_per_token = nats / targets
    values = {"nats_per_token": nats_per_token}
    shown = f"{nats_per_token:.4f} nats per token"
    if (density := run.inputs.eval_tokens_per_byte) is not None:
        values["bits_per_byte"] = nats_per_token / LN2 * density
        shown = f"{values['bits_per_byte']:.3f} bits per byte, {shown}"
    part = "all" if limit is None else f"{int(targets):,} tokens"
    run.display.say(f"step {step}  held-out ({part}): {shown}")
    run.records.event("eval" if limit is not None else "final_eval", step, **values)


def finish(run: Run, state: TrainState) -> None:
    """After the last step: all held-out text beside what compressors need, and a sample."""
    evaluate(run, state, run.cfg.train.num_steps, limit=None)
    for name, bits in run.inputs.baselines().items():
        run.console.print(f"  for the same files {name} needs {bits:.3f} bits per byte")
    record_saved(run, run.checkpoints.wait())
    length = run.cfg.train.sample_tokens
    if length:
        # As a training document begins.
        tokenizer = run.inputs.tokenizer
        prompt = [tokenizer.eos_id, *tokenizer.encode(run.cfg.train.sample_prompt)]
        tokens = sample(
            run.trainer,
            state,
            prompt,
            length=length,
            allowed=run.inputs.vocab_size,
            seed=run.cfg.train.seed,
            processes=run.processes,
        )
        run.console.rule("sample", align="left")
        run.console.print(tokenizer.decode(tokens), markup=False, highlight=False)
