"""What the stages of a run share."""

from dataclasses import dataclass

from rich.console import Console

from moejax.config.schema import Config
from moejax.runtime.processes import ALONE, Processes
from moejax.step.train_step import TrainStep
from moejax.train.checkpoint import Checkpoints
from moejax.train.inputs import Inputs
from moejax.train.metrics import Display, Records
from moejax.train.plan_monitor import PlanMismatch, PlanMonitor


@dataclass
class Run:
    """A run whose devices are started."""

    cfg: Config
    train_step: TrainStep
    inputs: Inputs
    checkpoints: Checkpoints
    records: Records
    display: Display
    console: Console
    processes: Processes = ALONE
    monitor: PlanMonitor | None = None  # of a plan whose links are known
    mismatch: PlanMismatch | None = None  # what the watch has found, if a new plan is allowed

    def record_saved(self, step: int | None) -> None:
        """Records that a checkpoint was finished, if one was."""
        if step is not None:
            self.records.event("saved", step)
