"""A run that goes back: to the state before bad steps, and on with the batches behind them.

It happens inside the processes: mesh, plan and compiled steps stay. What a start would do is done
again from the choice of a checkpoint on, so that a run that is killed right afterwards and started
again goes on to the same bits.
"""

from functools import partial
from pathlib import Path
from typing import Any

from moejax.checkpoint.restore import resume, set_aside_wrong_steps
from moejax.data.skipped import SkippedData, skip_to
from moejax.errors import DivergedError, InputError
from moejax.step.state import TrainState
from moejax.train.faults.bad_steps import BadSteps, GoBackError, recent_of
from moejax.train.records.skipped_data import write_skipped
from moejax.train.run import Run
from moejax.train.start import choose_checkpoint, initial_state
from moejax.train.steps import run_steps


def run_with_rollbacks(run: Run, state: TrainState) -> tuple[TrainState, bool]:
    """Runs the loop, and goes back where it asks for that. Returns the same as `run_steps`.

    Raises:
      DivergedError: if the run cannot go back, or went back often enough.
    """
    while True:
        try:
            return run_steps(run, state)
        except GoBackError as asked:
            bad, interrupt = asked.bad, asked.interrupt
        # Here the loop's frames are gone, and with them the state that they held on the devices.
        state = go_back(run, bad)
        step = int(state.step)
        if any(run.processes.gather(interrupt.requested)):
            run.new_links = None
            run.display.note(f"stopped at step {step}; run the same command to go on")
            run.records.event("stopped", step)
            return state, True
        run.meter.start(step)


def go_back(run: Run, bad: BadSteps) -> TrainState:
    """Returns the state before bad steps, and has the run leave out the batches up to their last.

    All processes call it. Checkpoints from the first bad step on are set aside.

    Raises:
      DivergedError: if nothing from before is whole, or the data would end too early.
    """
    run.watch.enter("restore", run.watch.now[0].step)  # one step more may have run
    run.record_saved(run.checkpoints.settle())
    try:
        state, run.recent = _state_before(run, bad)
        step = int(state.step)
        skipped = skip_to(step, bad.last, run.inputs.skipped)
        run.inputs.skipped = skipped
        run.inputs.check_enough()
    except InputError as error:
        run.records.event("diverged", bad.last)
        raise DivergedError(f"the run diverged, and cannot go back. {bad.seen}. {error}") from error
    run_dir = Path(run.cfg.run_dir)
    run.processes.from_first(lambda: write_skipped(run_dir, skipped))
    run.checkpoints.reload()
    _tell(run, bad, skipped[-1])
    return state


def _state_before(run: Run, bad: BadSteps) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state of the newest whole checkpoint before bad steps, else the first state.

    With it comes what was seen of the losses up to it (`Run.recent`).
    """
    cfg, processes, train_step = run.cfg, run.processes, run.train_step
    choosing = partial(
        choose_checkpoint,
        cfg,
        run.inputs.content,
        processes,
        run.checkpoints.copies,
        before=bad.first,
    )
    saved, source, notes = choosing()
    saved, more = set_aside_wrong_steps(saved, train_step, choosing, processes)

    def told(text: str) -> None:
        run.display.note(text)
        run.records.event("note", bad.last, text=text)

    for text in dict.fromkeys((*notes, *more)):
        told(text)
    resumed = resume(train_step, saved, choosing, processes, run.console, told)
    state, recent = (None, {}) if resumed is None else (resumed.state, recent_of(resumed.facts))
    return initial_state(train_step, state, source, run.console, processes), recent


def _tell(run: Run, bad: BadSteps, entry: SkippedData) -> None:
    to, count = entry
    text = (
        f"{bad.seen}. The run goes back to step {to}, and leaves out {count} batches: those "
        f"of steps {to + 1} to {bad.last}"
    )
    run.display.note(f"step {bad.last}  warning: {text}")
    run.records.event("rolled_back", bad.last, to=to, skipped=count, text=text)
