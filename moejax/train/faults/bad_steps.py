"""Checks the metrics of each step for skipped updates and for losses that jump.

All processes see the same numbers, so all decide the same at the same step.
"""

import math
from typing import NamedTuple

from moejax.checkpoint.manifest import finished_steps
from moejax.errors import DivergedError
from moejax.runtime.interrupt import Interrupt
from moejax.step.state import Metrics
from moejax.train.faults.spikes import STEPS, Spike, Spikes
from moejax.train.records.metrics import has_targets
from moejax.train.run import Run


class SkippedUpdate(NamedTuple):
    """An update that was not applied."""

    step: int
    loss: float
    gradient_norm: float
    in_a_row: int  # this one included

    @property
    def reason(self) -> str:
        """Says whether loss or gradient was not finite."""
        if math.isfinite(self.loss):
            return f"the gradient's norm is {self.gradient_norm} (loss {self.loss:.4f})"
        return f"the loss is {self.loss}"


RECENT = "recent_losses"  # an entry of manifests, not of older ones: `Run.recent`


class BadSteps(NamedTuple):
    """The first and the last of some steps with bad numbers, and the finding in words."""

    first: int
    last: int
    seen: str


class GoBackError(Exception):
    """Ends the loop of a run that goes back to before its bad steps. `rollback` catches it."""

    def __init__(self, bad: BadSteps, interrupt: Interrupt):
        """Takes the interrupt too: meanwhile this process may have been asked to stop."""
        super().__init__(bad.seen)
        self.bad, self.interrupt = bad, interrupt


class StepCheck:
    """Reports bad steps of a run, and makes it go back or end."""

    def __init__(self, run: Run, skipped: int, interrupt: Interrupt):
        """Goes on from the losses in `run.recent`, and the number of updates skipped so far."""
        recent, self._run, self._interrupt = run.recent, run, interrupt
        self._skipped, self._skipped_in_a_row = skipped, recent.get("skipped_in_a_row", 0)
        known = recent.get("losses", []), recent.get("high_in_a_row", 0)
        self._spikes = Spikes(run.cfg.train.spike_threshold, *known)
        self._running: Metrics | None = None
        # With rarer saves one of the two newest checkpoints is from before a spike.
        often = (run.cfg.checkpoint.save_every or STEPS) < STEPS
        self._waits_for_spikes = often and run.cfg.train.on_spike == "roll_back"

    @property
    def suspicious(self) -> bool:
        """Whether the last steps may be bad: their checkpoints must not replace earlier ones.

        Skipped updates do not change the weights, and a spike may have broken them.
        """
        return self._skipped_in_a_row > 0 or (self._waits_for_spikes and self._spikes.suspected)

    def check_previous(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of the step that runs now, and checks the step before it.

        At most one step runs while the next is prepared, so a stop, a report or a save waits for
        one step only. Raises as `after` does.
        """
        if self._running is not None:
            self.after(step - 1, self._running)
        self._running = metrics

    def settle(self, step: int, metrics: Metrics) -> None:
        """Checks a step before it is saved, and updates `run.recent`, which is saved with it.

        A start that resumes from there then decides as this one would. Raises as `after` does.
        """
        self._running = None
        self.after(step, metrics)
        self._run.recent = {
            "losses": self._spikes.losses,
            "high_in_a_row": self._spikes.in_a_row,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def after(self, step: int, metrics: Metrics) -> None:
        """Checks the metrics of a step, which waits for it. Steps come in order.

        Raises:
          GoBackError: if the run goes back, in all processes at the same step.
          DivergedError: if it ends, in all processes at the same step.
        """
        before, self._skipped = self._skipped, int(metrics.skipped)
        self._skipped_in_a_row = 0 if self._skipped == before else self._skipped_in_a_row + 1
        if self._skipped_in_a_row:
            loss, norm = float(metrics.loss), float(metrics.gradient_norm)
            skipped = SkippedUpdate(step, loss, norm, self._skipped_in_a_row)
            self._run.records.event("skipped", step, loss=loss, gradient_norm=norm)
            if skipped.in_a_row == 1:
                self._run.display.note(f"warning: update of step {step} skipped: {skipped.reason}")
            if skipped.in_a_row == self._run.cfg.train.max_skipped:
                self._go_back_or_end(skipped)
        elif has_targets(metrics):
            spike = self._spikes.after(step, float(metrics.loss))
            if spike is not None:
                self._report_spike(spike)

    def _rollbacks_left(self) -> int:
        return self._run.cfg.train.rollbacks - len(self._run.inputs.skipped)

    def _go_back_or_end(self, skipped: SkippedUpdate) -> None:
        first = skipped.step - skipped.in_a_row + 1
        if self._rollbacks_left() <= 0:
            raise divergence(self._run, skipped, first)
        seen = f"updates of steps {first} to {skipped.step} were skipped: {skipped.reason}"
        raise GoBackError(BadSteps(first, skipped.step, seen), self._interrupt)

    def _report_spike(self, spike: Spike) -> None:
        """Reports a spike, and makes the run go back if it should and may."""
        run, train = self._run, self._run.cfg.train
        run.records.event("spike", spike.step, loss=spike.loss, median=spike.median)
        seen = (
            f"the loss jumped at step {spike.first}: it is {spike.loss:.4f} at step {spike.step}, "
            f"and its median was {spike.median:.4f}"
        )
        rolls_back = train.on_spike == "roll_back"
        if rolls_back and self._rollbacks_left() > 0:
            raise GoBackError(BadSteps(spike.first, spike.step, seen), self._interrupt)
        used = f"; the run went back {train.rollbacks} times before" if rolls_back else ""
        run.display.note(f"warning: {seen}{used}")


def divergence(run: Run, skipped: SkippedUpdate, first: int) -> DivergedError:
    """Records that a run diverged, and returns the error. Step `first` is the first skipped one."""
    run.record_saved(run.checkpoints.wait())
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
    went = len(run.inputs.skipped)
    back = f" The run went back {went} times before (train.rollbacks)." if went else ""
    return DivergedError(
        f"the run diverged. Updates of steps {first} to {skipped.step} were skipped: "
        f"{skipped.reason}. train.max_skipped allows {skipped.in_a_row - 1} in a row.{back} "
        f"{good}; or set train.max_skipped=none to go on all the same."
    )
