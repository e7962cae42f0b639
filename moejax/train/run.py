"""The two states of a run that its stages share: started, and running."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console

from moejax.checkpoint.writer import Checkpoints
from moejax.config.schema import Config
from moejax.plan.cluster.topology import Topology
from moejax.runtime.assignment import Assignment
from moejax.runtime.processes import ALONE, Processes
from moejax.runtime.watch import Watch
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.inputs import Inputs
from moejax.train.memory.checkpoints import MemoryCheckpoints
from moejax.train.memory.headroom import Headroom
from moejax.train.plan_monitor import PlanMonitor
from moejax.train.records.display import Display
from moejax.train.records.metrics import Meter, Records
from moejax.train.records.start_record import ExpertLoads
from moejax.train.sites.site import Site


class OnStep(NamedTuple):
    """A function that is called with the run and its state after every so many steps.

    All processes call it. It leaves the state as it is, and the next step deletes its arrays.
    """

    call: Callable[["Run", TrainState], None]
    every: int


@dataclass(frozen=True)
class Start:
    """A run before its devices are started: its processes have met, its directory is claimed.

    Attributes:
      cfg: as the user gave it: a plan may still choose some of its settings.
      console: shows lines in process 0 only.
      watch: is told which stage the run is in.
      assignment: of a process whose program's hosts may change.
      on_step: called between steps.
    """

    cfg: Config
    inputs: Inputs
    console: Console
    processes: Processes
    watch: Watch
    assignment: Assignment | None = None
    on_step: OnStep | None = None


@dataclass
class Run:
    """A run after its devices are started: its step is built, its state is restored.

    Attributes:
      cfg: with everything chosen.
      memory: saves to hosts' memory, with `checkpoint.memory_every`.
      headroom: what is left of hosts' memory, of a run that keeps arrays there.
      recent: losses and skipped updates up to the state that was restored or saved last, an entry
        of manifests (`faults.bad_steps`).
      base: identity of the frozen weights, with adapters.
      expert_loads: in process 0, of a model with experts.
      monitor: if the run has a plan with known links.
      new_links: measured by the monitor, if the run shall stop and plan again with them.
      assignment: of a process whose program's hosts may change.
      reassigned: whether the loop ended because they do.
      on_step: called between steps.
      site: rounds with other runs, with `outer.hub`.
      save_is_late: whether a checkpoint was due within a round.
    """

    cfg: Config
    train_step: TrainStep
    inputs: Inputs
    checkpoints: Checkpoints
    records: Records
    meter: Meter
    display: Display
    console: Console
    processes: Processes = ALONE
    watch: Watch = field(default_factory=Watch)
    memory: MemoryCheckpoints | None = None
    headroom: Headroom | None = None
    recent: dict[str, Any] = field(default_factory=dict)
    base: dict[str, str] | None = None
    expert_loads: ExpertLoads | None = None
    monitor: PlanMonitor | None = None
    new_links: Topology | None = None
    assignment: Assignment | None = None
    reassigned: bool = False
    on_step: OnStep | None = None
    site: Site | None = None
    save_is_late: bool = False

    @property
    def whole(self) -> bool:
        """Whether no part of the state is on its way to other sites: it can be saved."""
        return self.site is None or self.site.between_rounds

    @property
    def hosts_change(self) -> bool:
        """Whether other hosts shall train from now on."""
        return self.assignment is not None and self.assignment.proposed is not None

    @property
    def host_short(self) -> str | None:
        """Why this process's host has too little memory left; None if it has enough."""
        return None if self.headroom is None else self.headroom.short

    @property
    def must_end(self) -> bool:
        """Whether the run must end before its last step, though nobody asked for it."""
        return self.hosts_change or self.host_short is not None

    def record_saved(self, step: int | None) -> None:
        """Records a finished checkpoint, if there is a new one."""
        if step is not None:
            self.records.event("saved", step)

    def end_memory(self) -> None:
        """Removes the copies in hosts' memory, which nobody needs any more. All processes call it.

        A run that ends in another way leaves them to its next start.
        """
        if self.memory is not None:
            self.memory.end()

    def close(self) -> None:
        """Waits for saves under way, and closes all records."""
        self.watch.enter("finish")
        if self.site is not None:
            self.site.close()
        self.checkpoints.close()
        if self.memory is not None:
            self.memory.close()
        for problem in self.records.close():
            self.display.note(f"warning: {problem}")
        if self.expert_loads is not None:
            self.expert_loads.close()
