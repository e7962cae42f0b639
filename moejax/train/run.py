"""The objects that the stages of a run share."""

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from moejax.checkpoint.writer import Checkpoints
from moejax.config.schema import Config
from moejax.runtime.assignment import Assignment
from moejax.runtime.processes import ALONE, Processes
from moejax.runtime.watch import Watch
from moejax.step.train_step import TrainStep
from moejax.train.inputs import Inputs
from moejax.train.memory.checkpoints import MemoryCheckpoints
from moejax.train.plan_monitor import PlanMismatch, PlanMonitor
from moejax.train.records.display import Display
from moejax.train.records.metrics import Records
from moejax.train.records.start_record import ExpertLoads


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
    watch: Watch = field(default_factory=Watch)
    memory: MemoryCheckpoints | None = None  # with `checkpoint.memory_every`
    # Losses and skipped updates before the state that the run goes on from, or saves (`bad_steps`):
    # an entry of manifests.
    recent: dict[str, Any] = field(default_factory=dict)
    base: dict[str, str] | None = None  # identity of the frozen weights, with adapters
    expert_loads: ExpertLoads | None = None  # in process 0, of a model with experts
    monitor: PlanMonitor | None = None  # if the run has a plan with known links
    mismatch: PlanMismatch | None = None  # the monitor's result, if a new plan is allowed
    assignment: Assignment | None = None  # of a process whose program's hosts may change
    reassigned: bool = False  # whether the loop ended because they do

    @property
    def hosts_change(self) -> bool:
        """Whether other hosts shall train from now on."""
        return self.assignment is not None and self.assignment.proposed is not None

    def end_memory(self) -> None:
        """Removes what hosts hold in memory, which is not needed any more. All processes call it.

        A run that ends in another way leaves it to its next start.
        """
        if self.memory is not None:
            self.memory.end()

    def record_saved(self, step: int | None) -> None:
        """Records a finished checkpoint, if there is a new one."""
        if step is not None:
            self.records.event("saved", step)
