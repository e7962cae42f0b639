"""Shows a probe's progress and its results."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from moejax.plan.cluster.topology import Topology
from moejax.plan.probe.timer import ProgressFn
from moejax.runtime.processes import Processes
from moejax.screen import screen, text_column

UNSTEADY = 0.25  # fit error above which a link's times are doubted


@contextmanager
def progress_line(processes: Processes) -> Iterator[ProgressFn]:
    """Shows the current measurement on process 0's terminal; elsewhere in one line for each."""
    console, began = screen(stderr=True), time.monotonic()
    plain = processes.first and not console.is_terminal
    columns = (SpinnerColumn(), text_column(), TimeElapsedColumn())
    hidden = plain or not processes.first
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("starting", total=None)

        def show(text: str) -> None:
            if plain:
                seconds = time.monotonic() - began
                print(f"moejax: {seconds:.0f} s: {text}", file=sys.stderr, flush=True)
            progress.update(task, description=text)

        yield show


def print_probe(topology: Topology, odd: Sequence[str], console: Console) -> None:
    """Shows tiers, crossovers and warnings."""
    title = f"{topology.name}: {topology.devices} devices ({topology.device.name})"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("tier", "collective"):
        table.add_column(column, no_wrap=True)
    for column in ("startup", "bytes/s", "Gbit/s", "a node", "fit error"):
        table.add_column(column, justify="right")
    for tier in topology.tiers:
        for kind, link in tier.links.items() if tier.size > 1 else ():
            table.add_row(
                f"{tier.name} {tier.size}",
                kind,
                f"{link.startup_s * 1e3:.2f} ms",
                f"{link.bytes_per_s:.3g}",
                _gigabits(link.bytes_per_s),
                _gigabits(link.bytes_per_s * topology.tiers[0].size),
                f"{link.error:.1%}",
            )
    console.print(table)
    for line in _facts(topology):
        console.print(line, highlight=False)
    if topology.nodes > 1:
        for kind, changes in topology.crossover().items():
            methods = ", ".join(f"{method} from {_size(size)}" for size, method in changes)
            console.print(f"{kind} over all devices: {methods}", highlight=False)
    for line in unsteady(topology):
        console.print(line, style="yellow", highlight=False, soft_wrap=True)
    for line in odd:
        console.print(f"warning: {line}", style="yellow", highlight=False)


def unsteady(topology: Topology) -> list[str]:
    """Returns one line if the times of a link are far off a straight line."""
    far = [
        f"{kind} over {tier.name} {link.error:.0%}"
        for tier in topology.tiers
        if tier.size > 1
        for kind, link in tier.links.items()
        if link.error > UNSTEADY
    ]
    if not far:
        return []
    return [
        f"warning: fit error above {UNSTEADY:.0%}: {', '.join(far)}. Usually another program used "
        "the machine or the network: probe again when it is quiet."
    ]


def _facts(topology: Topology) -> list[str]:
    """Returns a line for each measurement besides the links."""
    lines = [
        f"{tier.name}: two at once take {tier.contention:.2f} times one alone after the other; one "
        f"takes {tier.compute_share:.0%} of compute; between computations it takes at least "
        f"{tier.sync_delay_s * 1e3:.2f} ms"
        for tier in topology.tiers
        if tier.size > 1
    ]
    device = topology.device
    rates = [f"{dtype} {curve[-1][1] / 1e9:.3g}" for dtype, curve in device.products.items()]
    lines += [
        f"largest products, GFLOP/s a device: {', '.join(rates)}",
        f"a whole program computes {device.program_overhead:.2f} times as long as its operations "
        "take by themselves",
    ]
    if (host := topology.host) is not None:
        rates = f"{host.to_device / 1e9:.3g} GB/s to a device, {host.from_device / 1e9:.3g} back"
        lines.append(f"memory of the host: {rates}, {host.memory_bytes / 2**30:.0f} GiB a node")
    if topology.tiers[0].size > 1:
        lines.append(f"devices of a node that share the same cores: {device.oversubscription:.1f}")
    return lines


def _gigabits(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e9:.3g}"


def _size(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"
