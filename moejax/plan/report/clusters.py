"""The known clusters as a table, and one of them with its sources."""

from rich.console import Console

from moejax.errors import located
from moejax.plan.cluster.file import known_clusters, load_topology
from moejax.plan.cluster.topology import Topology

ALIKE = 0.05  # relative difference below which two rates of a link are shown as one


def print_clusters(console: Console) -> None:
    """Shows each known cluster in one line."""
    lines = [_line("name", "size", "device", "links")]
    for name in known_clusters():
        known = load_topology(name)
        size = f"{known.nodes} x {known.tiers[0].size}"
        lines.append(_line(name, size, known.device.name, links_text(known)))
    lines += [
        "size: nodes x devices of a node; --topology NAME:4 is the same with 4 nodes.",
        "links: GB/s of a device one way; of two, the first is that of an all-to-all.",
        "Where the rates come from: --clusters NAME, and docs/rates.md.",
    ]
    for line in lines:
        console.print(located(line), highlight=False, soft_wrap=True)


def _line(name: str, size: str, device: str, links: str) -> str:
    return f"{name:13} {size:8} {device:27} {links}"


def print_cluster(name: str, console: Console) -> None:
    """Shows one cluster, and the sources of its rates.

    Raises:
      InputError: if there is no such cluster.
    """
    known = load_topology(name)
    for line in (
        f"{name}: {known.nodes} x {known.tiers[0].size} {known.device.name}",
        f"links, GB/s of a device one way: {links_text(known)}",
        f"memory that a program may use: {known.device.memory_bytes / 2**30:.1f} GiB",
        f"source: {known.source}",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def links_text(topology: Topology) -> str:
    """Returns the links in a few words: rates of an all-to-all, and of gathers if others."""
    parts = []
    for tier in topology.tiers:
        first, other = (tier.links[k].bytes_per_s / 1e9 for k in ("all_to_all", "all_gather"))
        alike = abs(other / first - 1) < ALIKE
        parts.append(f"{tier.name} {first:.3g}" + ("" if alike else f" / {other:.3g}"))
    return ", ".join(parts)
