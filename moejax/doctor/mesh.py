"""`moejax doctor --mesh`: checks that all processes of a program can run together.

Every process runs all checks, and process 0 prints the findings. A check that hangs is ended by the
watchdog, which names the process that is behind.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.console import Console

from moejax.config.checks import check, resolve_mesh
from moejax.config.checks.planned import is_planned
from moejax.config.fields import change
from moejax.config.schema import Config, MeshConfig
from moejax.doctor.machine import versions
from moejax.doctor.mesh_checks import (
    WrongError,
    check_exchange,
    differing,
    groups_of,
    measure_exchange,
)
from moejax.doctor.place import Finding, check_directory, show_findings
from moejax.errors import InputError
from moejax.kernels.select import hardware_of, select_kernels
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.plan.probe.nodes import find_nodes
from moejax.plan.probe.timer import AXES, Stopwatch
from moejax.runtime.processes import Processes
from moejax.runtime.start import join, platform_of, start
from moejax.runtime.watch import Deadlines, Watch, Watchdog, end_process
from moejax.screen import screen
from moejax.train.start import check_same_config, check_simulated_devices

SILENT_S = 20.0
INSIDE, ACROSS = "all-to-all within a node", "all-to-all across nodes"
STAGES = (
    "start", "versions", "devices", "kernels", "run directory", "replica", "fsdp", "expert",
    "tensor", "all devices", INSIDE, ACROSS,
)  # fmt: skip


def check_mesh(
    cfg: Config | None, run_dir: Path | None, deadline_s: float, console: Console
) -> int:
    """Runs all checks, and prints a table and a verdict in process 0.

    Args:
      cfg: config of the run; None: all devices on one axis, and the default model.
      run_dir: directory to check; None: the config's, if there is one.
      deadline_s: seconds of one check, after which a process that is behind counts as hung.

    Returns the exit code: 0 if all holds, else 1, the same in all processes.

    Raises:
      InputError: for anything that a run would refuse.
      MeetingError: if some processes do not come.
    """
    if cfg is not None:
        check(cfg)
        check_simulated_devices(cfg)
    with join() as processes:
        checks = Checks(processes, Watch(), console)
        limits = Deadlines(dict.fromkeys(STAGES, deadline_s), min(SILENT_S, deadline_s))
        watchdog = Watchdog(checks.watch, limits, processes, checks.hang)
        try:
            _check_all(checks, cfg, run_dir)
            processes.gather("done")
        finally:
            watchdog.close()
        return checks.end()


class Checks:
    """The checks of all processes, and the report of process 0."""

    def __init__(self, processes: Processes, watch: Watch, console: Console):
        self.processes, self.watch = processes, watch
        self.findings: list[Finding] = []
        self._console = console if processes.first else screen(quiet=True)
        self._apart = False  # whether the processes can no longer do the same

    def run(self, name: str, stage: str, make: Callable[[], str]) -> None:
        """Runs a check in every process and adds its finding, the same in all.

        Args:
          make: returns a text about the result, or raises WrongError. After any other exception the
            processes do different things, so checks after it are left out.
        """
        if self._apart:
            return
        self.watch.enter(stage)
        apart, text = False, None
        try:
            holds, text = True, make()
        except WrongError as error:
            holds, text = False, str(error)
        except InputError:
            raise
        except Exception as error:  # of any kind: it is what the check found
            first = (str(error).strip().splitlines() or [""])[0][:200]
            holds, apart, text = False, True, f"{type(error).__name__}: {first}"
        said = self.processes.gather([holds, apart, text])
        wrong = [f"process {n}: {text}" for n, (holds, _, text) in enumerate(said) if not holds]
        self._apart = any(apart for _, apart, _ in said)
        wrong += ["checks after it were left out"] * self._apart
        self.findings.append(Finding(name, not wrong, "; ".join(wrong) or said[0][2]))

    def hang(self, found: str) -> None:
        """Prints the findings so far and the hanging check, and ends the process."""
        with contextlib.suppress(Exception):  # whatever happens, the process must end
            self.findings.append(Finding("no process hangs", False, found))
            self.end()
        end_process(found)

    def end(self) -> int:
        """Prints the table and the verdict. Returns the exit code."""
        return show_findings(self.findings, self._console)


def _check_all(checks: Checks, cfg: Config | None, run_dir: Path | None) -> None:
    processes = checks.processes
    hosts = processes.hosts()
    meeting = f"{len(hosts)}, on {', '.join(dict.fromkeys(hosts))}"
    checks.findings.append(Finding("processes have met", True, meeting))
    own = versions()
    gathered = processes.gather(own)
    text = ", ".join(f"{name} {version}" for name, version in own.items())
    checks.run("versions are the same", "versions", lambda: _same(gathered, text))
    if cfg is not None:
        check_same_config(cfg, processes)
    checks.watch.enter("start")
    used, devices = _start(cfg, processes)
    layout = build_layout(used.mesh)
    mesh = build_mesh(layout, devices)
    checks.run("devices are alike", "devices", partial(_devices, devices, processes))
    checks.run("kernels are the same", "kernels", partial(_kernels, used, mesh, processes))
    directory = run_dir or (None if cfg is None else Path(cfg.run_dir))
    if directory is not None:
        _check_directory(checks, directory)
    for name, axes in groups_of(layout).items():
        size, between = layout.size(axes), bool(layout.between_nodes(axes))
        label = f"all-to-all over {name} ({size}), {'across nodes' if between else 'in a node'}"
        checks.run(label, name, partial(check_exchange, mesh, axes, processes))
    nodes = find_nodes(devices, hosts, used.mesh.nodes or processes.count)
    watch = Stopwatch(processes, nodes.devices)
    for axis, name in zip(reversed(AXES), (INSIDE, ACROSS), strict=True):
        if watch.mesh.shape[axis] > 1:
            label = f"{name} ({watch.mesh.shape[axis]})"
            checks.run(label, name, partial(measure_exchange, watch, axis))


def _start(cfg: Config | None, processes: Processes) -> tuple[Config, list[Any]]:
    """Starts the devices. Returns the config with a mesh for them, and the devices.

    Without a config, or if it leaves the mesh to the planner, all devices are on one axis.
    """
    asked = MeshConfig() if cfg is None else cfg.mesh
    devices = processes.together(lambda: start(asked))
    platform, count = platform_of(devices), len(devices)
    if cfg is not None and not is_planned(cfg):
        return resolve_mesh(cfg, count, platform, processes=processes.count), devices
    dtype = "float32" if platform == "cpu" else "bfloat16"
    nodes = asked.nodes or processes.count
    used = change(Config(), {"model.dtype": dtype}) if cfg is None else cfg
    used = change(used, {"mesh.replica": 1, "mesh.expert": count, "mesh.nodes": nodes})
    return used, devices


def _same(values: list[dict[str, Any]], text: str) -> str:
    if (wrong := differing(values)) is not None:
        raise WrongError(wrong)
    return text


def _devices(devices: list[Any], processes: Processes) -> str:
    own = [d for d in devices if d.process_index == processes.index]
    facts = {"kind": ", ".join(dict.fromkeys(d.device_kind for d in own)), "devices": len(own)}
    text = f"{len(devices)} x {facts['kind']}, {len(own)} in each process"
    return _same(processes.gather(facts), text)


def _kernels(cfg: Config, mesh: Mesh, processes: Processes) -> str:
    """Compares the choices of `kernels.select`, which depend on installed packages."""
    hardware = hardware_of(mesh, platform_of(list(mesh.devices.flat)))
    chosen = processes.together(lambda: select_kernels(cfg, hardware))
    taken = {operation: choice.implementation for operation, choice in chosen.items()}
    text = ", ".join(f"{operation}: {name}" for operation, name in taken.items())
    return _same(processes.gather(taken), text)


def _check_directory(checks: Checks, directory: Path) -> None:
    """Checks the run's directory from every process; process 0 removes the folders that it made."""
    processes = checks.processes
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    if processes.first:
        with contextlib.suppress(OSError):  # the check itself says why
            directory.mkdir(parents=True, exist_ok=True)
    processes.gather("made")

    def look() -> str:
        findings = check_directory(directory)
        wrong = [f"{one.check}: {one.text}" for one in findings if not one.holds]
        if wrong:
            raise WrongError(f"{directory}: {'; '.join(wrong)}")
        return ", ".join(f"{one.check}: {one.text}" for one in findings[1:])

    checks.run(f"run directory {directory}", "run directory", look)
    if processes.first:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
