"""Takes a run back to the state before bad steps, and on with the batches after them.

Processes, plan, mesh and compiled steps stay. The stages of a start are repeated from the choice of
a checkpoint on, so a run that is killed right afterwards and started again comes to the same bits.
"""

from functools import partial
from pathlib import Path
from typing import Any

from moejax.checkpoint.restore import quarantine_wrong_steps, resume
from moejax.data.skipped import skip_to
from moejax.errors import DivergedError, InputError
from moejax.step.state import TrainState
from moejax.train.faults.bad_steps import RECENT, BadSteps, GoBackError
from moejax.train.records.skipped_data import write_skipped
from moejax.train.run import Run
from moejax.train.start import choose_checkpoint, initial_state
from moejax.train.steps import run_steps


def run_with_rollbacks(run: Run, state: TrainState) -> tuple[TrainState, bool]:
    """Runs the loop, and goes back whenever it asks for that. Returns the same as `run_steps`.

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
    """Returns the state before bad steps. The run leaves out the batches up to the last of them.

    All processes call it. Checkpoints of the first bad step and later are renamed.

    Raises:
      DivergedError: if no state from before is intact, or the data would end too early.
    """
    run.watch.enter("restore", run.watch.now[0].step)  # one more step may be running
    run.record_saved(run.checkpoints.wait_with_copies())
    try:
        state, run.recent = _state_before(run, bad)
        run.inputs.skipped = skipped = skip_to(int(state.step), bad.last, run.inputs.skipped)
        run.inputs.check_enough()
    except InputError as error:
        run.records.event("diverged", bad.last)
        raise DivergedError(f"the run diverged, and cannot go back. {bad.seen}. {error}") from error
    run_dir = Path(run.cfg.run_dir)
    run.processes.from_first(lambda: write_skipped(run_dir, skipped))
    run.checkpoints.reload()
    to, count = skipped[-1]
    text = (
        f"{bad.seen}. The run goes back to step {to}, and leaves out {count} batches: those "
        f"of steps {to + 1} to {bad.last}"
    )
    run.display.note(f"step {bad.last}  warning: {text}")
    run.records.event("rolled_back", bad.last, to=to, skipped=count, text=text)
    return state


def _state_before(run: Run, bad: BadSteps) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state of the newest intact checkpoint before bad steps, else the first state.

    The second result is `Run.recent`: the losses up to it.
    """
    cfg, processes, train_step = run.cfg, run.processes, run.train_step
    choose = partial(
        choose_checkpoint,
        cfg,
        run.inputs.content,
        processes,
        run.checkpoints.copies,
        before=bad.first,
    )
    saved, source, notes = choose()
    saved, more = quarantine_wrong_steps(saved, train_step, choose, processes)

    def note(text: str) -> None:
        run.display.note(text)
        run.records.event("note", bad.last, text=text)

    for text in dict.fromkeys((*notes, *more)):
        note(text)
    found = resume(train_step, saved, choose, processes, run.console, note)
    if run.site is not None:
        run.site.resume(found.facts)
    state = initial_state(train_step, found.state, source, run.console, processes)
    return state, found.facts.get(RECENT, {})
