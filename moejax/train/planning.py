"""The plan of a run: kept from an earlier start, read from a file, or searched."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from moejax.config.checks import resolve_mesh
from moejax.config.checks.effects import check_effects
from moejax.config.checks.planned import CHUNKS, MODES, check_nodes, is_planned, pinned
from moejax.config.fields import change, get_value
from moejax.config.schema import Config, PlanConfig
from moejax.data.sources import share_inside
from moejax.errors import InputError, write_whole
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.plan.cluster.file import from_json, load_topology, to_text, write_topology
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.routing import read_expert_load
from moejax.plan.probe.measure import Effort, expected_text, probe
from moejax.plan.probe.show import progress_line
from moejax.plan.probe.timer import ProgressFn
from moejax.plan.report.page import write_report
from moejax.plan.report.tables import plan_text, remarks
from moejax.plan.search.file import Plan, load_plan, plan_from, save_plan
from moejax.plan.search.sites import search_all
from moejax.plan.search.space import OUTER, Limits
from moejax.runtime.assignment import changes_hosts
from moejax.runtime.processes import Processes
from moejax.runtime.start import platform_of, start
from moejax.runtime.watch import Watch
from moejax.screen import screen, waiting
from moejax.step.train_step import TrainStep, build_step
from moejax.train.plan_monitor import PlanMonitor
from moejax.train.records.profile import name_operations
from moejax.train.records.summary import Summary, check_hosts, check_memory, summarize
from moejax.train.start import no_mesh_errors

PLAN, TOPOLOGY, PAGE = "plan.json", "topology.json", "plan.html"  # in the run directory
PLANS = "plans"  # folder of a run whose hosts change: a plan for each number of devices


@dataclass(frozen=True)
class RunPlan:
    """The result of planning for a run.

    Attributes:
      cfg: config with the plan's settings.
      plan: the plan; None if there was nothing to choose.
      topology: the measured or configured links; None if the plan came from a file.
      notes: lines for the user.
    """

    cfg: Config
    plan: Plan | None = None
    topology: Topology | None = None
    notes: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str]]:
        """Returns rows of the start table."""
        if self.plan is None:
            return []
        predicted, runner_up = self.plan.predicted["seconds"], self.plan.runner_up
        text = f"{predicted * 1e3:,.1f} ms a step predicted on {self.plan.topology}"
        rows = [("plan", f"{plan_text(self.cfg)}: {text}")]
        if runner_up is not None:
            cfg = change(self.cfg, runner_up["settings"])
            rows.append(("runner-up", f"{plan_text(cfg)}: {runner_up['seconds'] * 1e3:,.1f} ms"))
        if self.plan.cut is not None:
            rows.append(("search", self.plan.cut))
        return rows


def kept_plan(cfg: Config) -> Config:
    """Returns the config with the settings of its plan file, else of the run directory's plan.

    Without a plan it is unchanged. The config of a checkpoint has its plan's settings, and is
    compared with this.
    """
    path = Path(cfg.run_dir) / PLAN if cfg.plan.mode in MODES else Path(cfg.plan.mode)
    if not is_planned(cfg) or (cfg.plan.mode in MODES and not path.exists()):
        return cfg
    return _applied(load_plan(path), cfg)


def plan_run(
    cfg: Config,
    devices: Sequence[Any],
    processes: Processes,
    console: Console,
    *,
    resuming: bool,
    new_links: Topology | None = None,
) -> RunPlan:
    """Returns the run's config with everything chosen. All processes call it and get the same.

    Args:
      resuming: whether the run resumes; its plan is kept while it fits.
      new_links: newly measured links, which replace the configured ones.

    Raises:
      InputError: if the plan is for other devices, or no plan fits.
    """
    if not is_planned(cfg):
        return RunPlan(cfg)
    run_dir, mode = Path(cfg.run_dir), cfg.plan.mode
    if mode not in MODES:
        return _from_file(cfg, len(devices))
    if resuming and new_links is None:
        kept = processes.from_first(lambda: _plan_before(cfg, len(devices)))
        if kept is not None:
            return _planned(Plan(**kept), cfg, _topology_before(run_dir, len(devices)), ())
    cfg, kept = _with_pins(cfg, processes, resuming=resuming)
    if len(devices) == 1:
        return _of_one_device(cfg)
    topology, notes = _topology(cfg, devices, processes, new_links)
    if processes.first:  # before the search, so that the next start need not measure
        run_dir.mkdir(parents=True, exist_ok=True)
        write_topology(topology, run_dir / TOPOLOGY)
    limits = Limits(
        devices=len(devices),
        nodes=cfg.mesh.nodes or topology.nodes,
        platform=platform_of(list(devices)),
        codecs=cfg.plan.codecs,
        pinned=kept,
        documents=processes.from_first(lambda: share_inside(cfg)),
    )
    plan = processes.from_first(
        lambda: vars(_search(cfg, topology, limits, console, run_dir / PAGE))
    )
    chosen = Plan(**plan)
    if processes.first:
        _keep(chosen, run_dir)
    return _planned(chosen, cfg, topology, notes)


def _of_one_device(cfg: Config) -> RunPlan:
    """Returns the plan of one device. Refuses settings that have an effect only on several."""
    check_effects(replace(cfg, plan=PlanConfig(mode="hand")))
    return RunPlan(cfg)


def _keep(plan: Plan, run_dir: Path) -> None:
    """Writes the run's plan. If hosts may change, also a copy for when as many come back."""
    save_plan(plan, run_dir / PLAN)
    if changes_hosts():
        (run_dir / PLANS).mkdir(exist_ok=True)
        save_plan(plan, run_dir / PLANS / f"{plan.devices}.json")


def _plan_before(cfg: Config, devices: int) -> dict[str, Any] | None:
    """Returns the plan of an earlier start on as many devices, and makes it the run's again."""
    run_dir = Path(cfg.run_dir)
    for path in (run_dir / PLAN, run_dir / PLANS / f"{devices}.json"):
        plan = load_plan(path) if path.exists() else None
        if plan is not None and plan.devices == devices and cfg.mesh.nodes in (None, plan.nodes):
            if path.parent != run_dir:
                save_plan(plan, run_dir / PLAN)
            return vars(plan)
    return None


def _with_pins(
    cfg: Config, processes: Processes, *, resuming: bool
) -> tuple[Config, frozenset[str]]:
    """Returns the config, and the settings that the search must not change.

    On resume the number of chunks is fixed: it shapes the checkpoint. And a run has an outer loop
    from its first step to its last, or none; the number of sites may change.
    """
    if not resuming and cfg.checkpoint.init_from is None:
        return cfg, pinned(cfg)
    path = Path(cfg.run_dir) / PLAN
    chosen = processes.from_first(lambda: load_plan(path).settings if path.exists() else {})
    cfg = change(cfg, {CHUNKS: chosen.get(CHUNKS, get_value(cfg, CHUNKS))})
    if resuming and cfg.plan.sites:
        own = {name: chosen[name] for name in OUTER if chosen.get("outer.every") is not None}
        cfg = change(cfg, own | {"plan.sites": bool(own)})
    return cfg, pinned(cfg) | {CHUNKS}


def _topology_before(run_dir: Path, devices: int) -> Topology | None:
    """Returns the links of an earlier start; None if they are not known for so many devices."""
    path = run_dir / TOPOLOGY
    return _of_devices(load_topology(str(path)), devices) if path.exists() else None


def _of_devices(topology: Topology, devices: int) -> Topology | None:
    """Returns the cluster with the nodes that so many devices fill; None if it has none such."""
    if topology.devices == devices:
        return topology
    nodes, left = divmod(devices, topology.sizes[0])
    with suppress(ValueError):
        return None if left else topology.of_nodes(nodes)
    return None


def planned_devices(cfg: Config) -> int | None:
    """Returns the number of devices of the configured plan or cluster; None without one."""
    if cfg.plan.mode not in MODES:
        return load_plan(Path(cfg.plan.mode)).devices
    return None if cfg.plan.topology is None else load_topology(cfg.plan.topology).devices


def plan_dry(cfg: Config, devices: int) -> RunPlan:
    """Returns the choice of `plan_run` for a dry run, which does not measure.

    Raises:
      InputError: as `plan_run`, or if the links are unknown.
    """
    if not is_planned(cfg):
        return RunPlan(cfg)
    if cfg.plan.mode not in MODES:
        return _from_file(cfg, devices)
    if devices == 1:
        return _of_one_device(cfg)
    if cfg.plan.topology is None:
        raise InputError(
            "links are not known. `plan.topology` is none, and a dry run measures nothing. Name a "
            "known cluster or a topology file, or choose the mesh by hand."
        )
    topology = load_topology(cfg.plan.topology)
    _check_topology(cfg, topology, devices)
    limits = Limits(devices, topology.nodes, topology.device.platform, cfg.plan.codecs, pinned(cfg))
    plan = _search(cfg, topology, limits, screen(stderr=True))
    return _planned(plan, cfg, topology, ())


def _search(
    cfg: Config, topology: Topology, limits: Limits, console: Console, page: Path | None = None
) -> Plan:
    """Returns the best plan, and writes a page about the search if `page` is a path."""
    load = read_expert_load(cfg.plan.routing, cfg.moe.num_experts)
    with waiting(console, "planning") as say:

        def progress(text: str) -> None:
            say(f"planning: {text}")

        result = search_all(
            cfg,
            topology,
            limits,
            load,
            traces=cfg.plan.traces,
            seconds=cfg.plan.seconds,
            progress=progress,
        )
        if page is not None:
            progress("writing the page")
            write_report(result, topology, load, page)
    for text in remarks(result, topology, load):
        console.print(text, highlight=False, soft_wrap=True)
    return plan_from(result, topology, cfg.plan.routing)


def _topology(
    cfg: Config, devices: Sequence[Any], processes: Processes, new_links: Topology | None
) -> tuple[Topology, tuple[str, ...]]:
    """Returns the links to plan with: given, configured, kept from an earlier start, or probed."""
    if new_links is not None:
        return new_links, ()
    if cfg.plan.topology is not None:
        topology = load_topology(cfg.plan.topology)
        if changes_hosts():
            topology = _of_devices(topology, len(devices)) or topology
        _check_topology(cfg, topology, len(devices))
        return topology, ()
    path = Path(cfg.run_dir) / TOPOLOGY
    kept = processes.from_first(lambda: _kept_links(cfg, path, devices))
    if kept is not None:
        note = f"links as an earlier start measured them: remove {path} to measure again"
        return from_json(json.loads(kept), str(path)), (note,)
    with progress_line(processes) as progress:
        progress("measuring links and devices for the plan; plan.topology names known ones")
        progress(expected_text(quick=True))
        return measure(cfg, devices, processes, progress)


def _kept_links(cfg: Config, path: Path, devices: Sequence[Any]) -> str | None:
    """Returns the topology that an earlier start measured, as text, if it fits these devices."""
    if not path.exists():
        return None
    topology = load_topology(str(path))
    if changes_hosts():
        topology = _of_devices(topology, len(devices)) or topology
    fits = (
        topology.devices == len(devices)
        and topology.device.name == devices[0].device_kind
        and cfg.mesh.nodes in (None, topology.nodes)
    )
    return to_text(topology) if fits else None


def measure(
    cfg: Config, devices: Sequence[Any], processes: Processes, progress: ProgressFn
) -> tuple[Topology, tuple[str, ...]]:
    """Runs a quick probe. Returns its topology and warnings."""
    return probe(
        processes,
        devices,
        name="measured",
        nodes=cfg.mesh.nodes,
        effort=Effort(quick=True, seconds=10.0),
        progress=progress,
    )


def _check_topology(cfg: Config, topology: Topology, devices: int) -> None:
    if topology.devices != devices:
        raise InputError(
            f"`plan.topology` {cfg.plan.topology} has {topology.devices} devices, this program has "
            f"{devices}. They must be equal. Name the nodes, as in h200:4, or leave plan.topology "
            "out to measure."
        )
    check_nodes(cfg, topology.nodes, f"`plan.topology` {cfg.plan.topology}")


def _from_file(cfg: Config, devices: int) -> RunPlan:
    """Returns the plan of a file, with notes about the settings that it replaces."""
    path = cfg.plan.mode
    plan = load_plan(Path(path))
    if plan.devices != devices:
        raise InputError(
            f"plan {path} is for {plan.devices} devices, this program has {devices}. A plan fits "
            "the devices it was made for. Plan again, or start on as many."
        )
    check_nodes(cfg, plan.nodes, f"plan {path}")
    notes = tuple(
        f"{path} replaces {name} = {get_value(cfg, name)} by {plan.settings[name]}"
        for name in sorted(pinned(cfg).union(OUTER))
        if plan.settings.get(name, get_value(cfg, name)) != get_value(cfg, name)
    )
    if plan.order is not None:
        notes += (f"{path} is for nodes in the order {' '.join(plan.order)}",)
    return _planned(plan, cfg, None, notes)


def _applied(plan: Plan, cfg: Config) -> Config:
    """Returns the config with the plan's settings, and `plan.mode` as for a search."""
    return change(plan.apply(cfg), {"plan.mode": "auto"})


def _planned(plan: Plan, cfg: Config, topology: Topology | None, notes: tuple[str, ...]) -> RunPlan:
    return RunPlan(_applied(plan, cfg), plan, topology, notes)


def save_expert_load(load_LE: Any, path: Path) -> None:
    """Writes the expert load of a run, for `--routing` and `plan.routing`."""
    counts = [[int(n) for n in layer] for layer in load_LE]
    write_whole(path, json.dumps({"load": counts}) + "\n")


class PlannedStep(NamedTuple):
    """A step on its mesh, and the plan that it follows.

    Attributes:
      devices: of the whole program.
      train_step: its config has everything chosen.
      limit: bytes that a device may use.
    """

    devices: Sequence[Any]
    run_plan: RunPlan
    train_step: TrainStep
    limit: int
    summary: Summary


def prepare_step(
    cfg: Config,
    processes: Processes,
    console: Console,
    watch: Watch,
    *,
    resuming: bool,
    new_links: Topology | None,
) -> PlannedStep:
    """Starts the devices, plans, and traces the step. All processes call it.

    Args:
      resuming, new_links: as `plan_run` takes them.
    Raises:
      InputError: if the devices are too few or too small.
      NoMeshError: the same of a run whose hosts may change.
    """
    devices = start(cfg.mesh)
    name_operations(cfg.profile)
    platform = platform_of(devices)
    with watch.during("plan"), no_mesh_errors(devices):
        run_plan = plan_run(
            cfg, devices, processes, console, resuming=resuming, new_links=new_links
        )
        cfg = resolve_mesh(run_plan.cfg, len(devices), platform, processes=processes.count)
        train_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)
        limit, summary = check_memory(train_step, processes), summarize(train_step)
        check_hosts(train_step, summary, processes)
    processes.gather("traced")  # gloo gives up on a process half a minute late
    return PlannedStep(devices, run_plan, train_step, limit, summary)


def build_monitor(planned: PlannedStep, processes: Processes) -> PlanMonitor | None:
    """Returns the monitor that compares steps with their plan; None without a plan or its links.

    With `plan.replan` it measures the links again when steps are not as predicted.
    """
    cfg, plan, topology = planned.train_step.cfg, planned.run_plan.plan, planned.run_plan.topology
    if plan is None or topology is None:
        return None

    def measure_links(progress: ProgressFn) -> Topology:
        return measure(cfg, planned.devices, processes, progress)[0]

    return PlanMonitor(plan, topology, measure_links if cfg.plan.replan else None)
