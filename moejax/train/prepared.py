"""From devices to a step that fits them: plan, mesh, traced step, memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from moejax.config.checks import resolve_mesh
from moejax.config.schema import Config
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.plan.cluster.topology import Topology
from moejax.runtime.processes import Processes
from moejax.runtime.start import platform_of, start
from moejax.runtime.watch import Watch
from moejax.step.train_step import TrainStep, build_step
from moejax.train.memory_check import check_memory
from moejax.train.planning import RunPlan, plan_run
from moejax.train.profile import name_operations
from moejax.train.start import fitting
from moejax.train.summary import Summary, summarize


class Prepared(NamedTuple):
    """A step, and what it was made from.

    Attributes:
      devices: of the whole program.
      train_step: its config has everything chosen.
      limit: bytes that a device may use.
    """

    devices: Sequence[Any]
    planned: RunPlan
    train_step: TrainStep
    limit: int
    summary: Summary


def prepare(
    cfg: Config,
    processes: Processes,
    console: Console,
    watch: Watch,
    *,
    resuming: bool,
    measured: Topology | None,
) -> Prepared:
    """Starts the devices, plans, and traces the step. All processes call it.

    Args:
      resuming: whether the run resumes, so that its plan is kept while it fits.
      measured: newly measured links to plan with.
    Raises:
      InputError: if the devices are too few or too small.
      NoMeshError: the same of a run whose hosts may change.
    """
    devices = start(cfg.mesh)
    name_operations(cfg.profile)
    platform = platform_of(devices)
    with watch.during("plan"), fitting(devices):
        planned = plan_run(cfg, devices, processes, console, resuming=resuming, measured=measured)
        cfg = resolve_mesh(planned.cfg, len(devices), platform, processes=processes.count)
        train_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)
        limit, summary = check_memory(train_step, processes), summarize(train_step)
    processes.gather("traced")  # gloo gives up on one that comes half a minute later
    return Prepared(devices, planned, train_step, limit, summary)
