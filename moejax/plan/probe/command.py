"""The command `python -m moejax.plan probe`: measures the cluster and writes its topology.

Runs as the trainer does, in every process that a launcher of `launch/` starts, and times the
collectives that the trainer issues. Process 0 writes the file and talks to the user.
"""

import argparse
import datetime
import json
import platform
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from moejax.config.checks.paths import check_output
from moejax.config.fields import short
from moejax.config.schema import MeshConfig
from moejax.errors import InputError, exit_code
from moejax.plan.cluster.file import ASYMMETRY, VERSION, from_json, to_text, write_topology
from moejax.plan.cluster.topology import KINDS, Tier, Topology
from moejax.plan.probe.device import probe_device
from moejax.plan.probe.links import Say, probe_oversubscription, probe_pairs, probe_tier
from moejax.plan.probe.nodes import Nodes, find_nodes, memory_of
from moejax.plan.probe.program import probe_program
from moejax.plan.probe.timer import AXES, Stopwatch
from moejax.runtime.processes import Processes
from moejax.runtime.start import join, platform_of, start

SECONDS, QUICK_SECONDS = 28.0, 10.0  # for the links
MOST_PAIRED = 64  # nodes; more would take minutes
EPILOG = """\
examples:
  python -m moejax.plan probe --out topology.json
  launch/emulate --hosts 2 --link 100mbit -- python -m moejax.plan probe --out topology.json
  srun ... python -m moejax.plan probe --out topology.json   (see launch/slurm.sbatch)

Run it in the same processes, on the same devices, as the training that is to be planned, and on an
otherwise idle cluster. Exit codes: docs/formats/exit.md.
"""


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure.

    Attributes:
      seconds: for the links, about; sizes grow until they are spent.
      quick: fewer sizes, dtypes and codecs; no pairs, no contention.
    """

    seconds: float = SECONDS
    quick: bool = False


def probe(
    processes: Processes,
    devices: Sequence[Any],
    *,
    name: str,
    nodes: int | None = None,
    effort: Effort,
    say: Say,
) -> tuple[Topology, tuple[str, ...]]:
    """Measures the program's devices and links; every process calls it.

    Args:
      devices: as `runtime.start.start` returns them.
      nodes: how many the user says there are; None: look at the devices.
      say: is told what is measured next.

    Returns:
      The same in every process: the topology, and what is odd about it.

    Raises:
      InputError: if the devices do not make nodes of one size.
    """
    hosts = processes.gather(socket.gethostname())
    found = find_nodes(devices, hosts, nodes)
    odd = [found.warning] if found.warning else []
    watch = Stopwatch(processes, found.devices)
    device = probe_device(
        watch,
        name=devices[0].device_kind,
        platform=platform_of(list(devices)),
        memory_bytes=min(processes.gather(memory_of(jax.local_devices()[0], found, hosts))),
        quick=effort.quick,
        say=say,
    )
    say("a whole program")
    device = replace(device, program_overhead=processes.gather(probe_program(watch, device))[0])
    say("devices that take turns")
    device = replace(device, oversubscription=processes.gather(probe_oversubscription(watch))[0])
    tiers, more = _probe_tiers(watch, found, device.oversubscription, effort, say)
    odd += more
    topology = Topology(
        version=VERSION,
        name=name,
        source=_source(processes, len(devices)),
        device=device,
        tiers=tiers,
    )
    if topology.nodes > 1 and not effort.quick and topology.nodes <= MOST_PAIRED:
        topology = _with_pairs(topology, found, processes, say)
    odd += [
        f"node {slow.node} ({slow.name}) is {slow.times_slower:.1f} times slower than usual: "
        f"{slow.bytes_per_s:.3g} bytes a second a device in its slower direction"
        for slow in topology.slow_nodes()
    ]
    # What the others were told by a clock of their own may differ in the last digit.
    text = processes.gather(to_text(topology))[0]
    return from_json(json.loads(text), "what was measured"), tuple(odd)


def _probe_tiers(
    watch: Stopwatch, found: Nodes, oversubscription: float, effort: Effort, say: Say
) -> tuple[tuple[Tier, ...], list[str]]:
    """Measures both tiers, and joins them where the measurement says that they are one."""
    inside, across = found.tier_names
    count = found.sizes[0]
    seconds = effort.seconds / (2 if count > 1 else 1)

    def one(axis: str, name: str) -> Tier:
        quick = effort.quick
        return probe_tier(
            watch,
            axis,
            name,
            oversubscription=oversubscription,
            seconds=seconds,
            quick=quick,
            say=say,
        )

    fast = one(AXES[1], inside)
    if count == 1:
        return (fast,), []
    slow = one(AXES[0], across)
    slower = [
        kind
        for kind in KINDS
        if fast.size > 1 and fast.links[kind].bytes_per_s < slow.links[kind].bytes_per_s
    ]
    if not slower:
        return (fast, slow), []
    if len(slower) < len(KINDS):
        what = f"{' and '.join(slower)} inside a node ({inside}): slower than across nodes"
        return (fast, slow), [what]
    # The slower of the two: it holds wherever a peer is.
    whole = replace(fast, size=fast.size * slow.size)
    return (whole,), [
        f"devices of one node ({inside}) exchange no faster than devices of different nodes: the "
        f"cluster counts as one node of {whole.size}"
    ]


def _with_pairs(topology: Topology, found: Nodes, processes: Processes, say: Say) -> Topology:
    """Adds the pairs of nodes, measured twice where the first time they differed by direction."""
    rate = topology.tiers[1].links["all_to_all"].bytes_per_s

    def measure() -> tuple[tuple[float, ...], ...]:
        return processes.gather(probe_pairs(found.devices, processes, rate, say=say))[0]

    pairs = tuple(map(tuple, measure()))
    if _asymmetric(pairs):
        again = measure()
        pairs = tuple(tuple(map(max, one, other)) for one, other in zip(pairs, again, strict=True))
    return replace(topology, pairs=pairs, node_names=found.names, asymmetric=_asymmetric(pairs))


def _asymmetric(pairs: Sequence[Sequence[float]]) -> bool:
    places = range(len(pairs))
    return any(pairs[a][b] > ASYMMETRY * pairs[b][a] for a in places for b in places)


def _source(processes: Processes, devices: int) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return (
        f"measured by moejax plan probe on {now:%Y-%m-%d}: {devices} devices, {processes.count} "
        f"processes, JAX {jax.__version__}, Python {platform.python_version()}"
    )


def print_probe(topology: Topology, odd: Sequence[str], console: Console) -> None:
    """Shows tiers, crossovers and what is odd."""
    title = f"{topology.name}: {topology.devices} devices ({topology.device.name})"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("tier", "collective"):
        table.add_column(column, no_wrap=True)
    for column in ("startup", "bytes/s", "Gbit/s", "a node", "fit error"):
        table.add_column(column, justify="right")
    for tier in topology.tiers:
        for kind, link in tier.links.items() if tier.size > 1 else ():
            node = _gigabits(link.bytes_per_s * topology.tiers[0].size)
            table.add_row(
                f"{tier.name} {tier.size}",
                kind,
                f"{link.startup_s * 1e3:.2f} ms",
                f"{link.bytes_per_s:.3g}",
                _gigabits(link.bytes_per_s),
                node,
                f"{link.error:.1%}",
            )
    console.print(table)
    for tier in topology.tiers:
        if tier.size > 1:
            console.print(
                f"{tier.name}: two at once take {tier.contention:.2f} of one after the other; one "
                f"takes {tier.compute_share:.0%} of the compute beside it, and between "
                f"computations takes {tier.sync_delay_s * 1e3:.2f} ms longer",
                highlight=False,
            )
    rates = [
        f"{dtype} {curve[-1][1] / 1e9:.3g}" for dtype, curve in topology.device.products.items()
    ]
    console.print(f"largest products, GFLOP/s a device: {', '.join(rates)}", highlight=False)
    console.print(
        f"a whole program computes {topology.device.program_overhead:.2f} times as long as its "
        "operations take by themselves",
        highlight=False,
    )
    if topology.tiers[0].size > 1:
        console.print(
            "devices of a node that take turns on the same cores: "
            f"{topology.device.oversubscription:.1f}",
            highlight=False,
        )
    if topology.nodes > 1:
        for one in topology.crossover():
            ways = ", ".join(f"{way} from {_size(size)}" for size, way in one.changes)
            console.print(f"{one.kind} over all devices: {ways}", highlight=False)
    for line in odd:
        console.print(f"warning: {line}", style="yellow", highlight=False)


def _gigabits(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e9:.3g}"


def _size(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="moejax plan probe",
        description="Measures links and devices, and writes the topology that plans are made by.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", metavar="FILE", required=True, help="the topology to write")
    made.add_argument("--quick", action="store_true", help="fewer sizes, and no more than needed")
    made.add_argument(
        "--seconds", type=float, help=f"for the links, about (default {SECONDS:g}, quick 10)"
    )
    made.add_argument("--nodes", type=int, help="how many nodes the devices make up, if not seen")
    made.add_argument("--name", help="of the cluster (default: the file's)")
    made.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="default: what JAX finds")
    made.add_argument("--simulated-devices", type=int, help="CPU devices, over all processes")
    return made


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0, or 2 for bad input."""
    args = parser().parse_args(argv)

    def run() -> None:
        out = _checked(args)
        with join() as processes:
            _run(args, out, processes)

    return exit_code(run, stopped="nothing was written", files=True)


def _checked(args: argparse.Namespace) -> Path:
    """Checks what can be checked before a device is touched."""
    out = Path(args.out)
    if not out.parent.is_dir():
        raise InputError(
            f"cannot write. --out is {out}. It must name a file in a folder that exists. Make the "
            f"folder, or correct the path."
        )
    check_output(out, "--out")
    name = args.name if args.name is not None else out.stem
    if not name or not name.isprintable():
        raise InputError(
            f"no name for the cluster. It is {short(name)}. It must be text on one line. Give "
            f"--name."
        )
    for flag in ("seconds", "nodes", "simulated_devices"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < 1e6:
            raise InputError(
                f"--{flag.replace('_', '-')} is {value}. It must be above 0. Correct it."
            )
    return out


class _Shown:
    """Says on process 0's terminal what is measured; a context manager."""

    def __init__(self, processes: Processes):
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None)
        # Without a terminal, lines that stay.
        self._plain = not console.is_terminal
        self._shown, self._began = processes.first, time.monotonic()

    def __enter__(self) -> Say:
        if self._shown and not self._plain:
            self._progress.start()
        return self._say

    def __exit__(self, *_: object) -> None:
        if not self._plain:
            self._progress.stop()

    def _say(self, words: str) -> None:
        if self._shown and self._plain:
            seconds = time.monotonic() - self._began
            print(f"moejax: {seconds:.0f} s: {words}", file=sys.stderr, flush=True)
        self._progress.update(self._task, description=words)


def _run(args: argparse.Namespace, out: Path, processes: Processes) -> None:
    def begin() -> list[Any]:
        mesh = MeshConfig(platform=args.platform, simulated_devices=args.simulated_devices)
        return start(mesh)

    devices = processes.together(begin)
    effort = Effort(args.seconds or (QUICK_SECONDS if args.quick else SECONDS), args.quick)
    with _Shown(processes) as say:
        topology, odd = probe(
            processes,
            devices,
            name=args.name if args.name is not None else out.stem,
            nodes=args.nodes,
            effort=effort,
            say=say,
        )
    if processes.first:
        write_topology(topology, out)
        print_probe(topology, odd, Console())
        print(f"wrote {out}")
    processes.gather("written")
