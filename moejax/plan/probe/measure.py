"""Measures links and devices: the whole of a probe, in every process.

Times the collectives that the trainer issues, on the mesh that its devices make.
"""

import datetime
import json
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from moejax.plan.cluster.file import ASYMMETRY, VERSION, from_json, to_text
from moejax.plan.cluster.topology import KINDS, Device, Tier, Topology
from moejax.plan.probe.device import probe_device
from moejax.plan.probe.links import probe_oversubscription, probe_pairs, probe_tier
from moejax.plan.probe.nodes import Nodes, find_nodes, memory_of
from moejax.plan.probe.program import probe_program
from moejax.plan.probe.timer import AXES, ProgressFn, Stopwatch
from moejax.runtime.processes import Processes
from moejax.runtime.start import platform_of

SECONDS, QUICK_SECONDS = 28.0, 10.0  # for the links
MOST_PAIRED = 64  # nodes; more would take minutes


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
    progress: ProgressFn,
) -> tuple[Topology, tuple[str, ...]]:
    """Measures the program's devices and links; every process calls it.

    Args:
      devices: as `runtime.start.start` returns them.
      nodes: how many the user says there are; None: look at the devices.
      progress: is told what is measured next.

    Returns:
      The same in every process: the topology, and what is odd about it.

    Raises:
      InputError: if the devices do not make nodes of one size.
    """
    hosts = processes.gather(socket.gethostname())
    found = find_nodes(devices, hosts, nodes)
    odd = [found.warning] if found.warning else []
    watch = Stopwatch(processes, found.devices)
    memory = min(processes.gather(memory_of(jax.local_devices()[0], found, hosts)))
    device = _measure_device(watch, devices, memory, effort, progress)
    tiers, more = _probe_tiers(watch, found, device.oversubscription, effort, progress)
    odd += more
    topology = Topology(
        version=VERSION,
        name=name,
        source=_source(processes, len(devices)),
        device=device,
        tiers=tiers,
    )
    if topology.nodes > 1 and not effort.quick and topology.nodes <= MOST_PAIRED:
        topology = _with_pairs(topology, found, processes, progress)
    odd += _slow_nodes(topology)
    # What the others were told by a clock of their own may differ in the last digit.
    text = processes.gather(to_text(topology))[0]
    return from_json(json.loads(text), "what was measured"), tuple(odd)


def _measure_device(
    watch: Stopwatch, devices: Sequence[Any], memory: int, effort: Effort, progress: ProgressFn
) -> Device:
    """Rates of one device, of a whole program on it, and of devices that share cores."""
    device = probe_device(
        watch,
        name=devices[0].device_kind,
        platform=platform_of(list(devices)),
        memory_bytes=memory,
        quick=effort.quick,
        progress=progress,
    )
    gather = watch.processes.gather
    progress("a whole program")
    device = replace(device, program_overhead=gather(probe_program(watch, device))[0])
    progress("devices that take turns")
    return replace(device, oversubscription=gather(probe_oversubscription(watch))[0])


def _probe_tiers(
    watch: Stopwatch, found: Nodes, oversubscription: float, effort: Effort, progress: ProgressFn
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
            progress=progress,
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


def _with_pairs(
    topology: Topology, found: Nodes, processes: Processes, progress: ProgressFn
) -> Topology:
    """Adds the pairs of nodes, measured twice where the first time they differed by direction."""
    rate = topology.tiers[1].links["all_to_all"].bytes_per_s

    def measure() -> tuple[tuple[float, ...], ...]:
        return processes.gather(probe_pairs(found.devices, processes, rate, progress=progress))[0]

    pairs = tuple(map(tuple, measure()))
    if _asymmetric(pairs):
        again = measure()
        pairs = tuple(tuple(map(max, one, other)) for one, other in zip(pairs, again, strict=True))
    return replace(topology, pairs=pairs, node_names=found.names, asymmetric=_asymmetric(pairs))


def _slow_nodes(topology: Topology) -> list[str]:
    """A warning for each node that is slower than the others."""
    return [
        f"node {slow.node} ({slow.name}) is {slow.times_slower:.1f} times slower than usual: "
        f"{slow.bytes_per_s:.3g} bytes a second a device in its slower direction"
        for slow in topology.slow_nodes()
    ]


def _asymmetric(pairs: Sequence[Sequence[float]]) -> bool:
    places = range(len(pairs))
    return any(pairs[a][b] > ASYMMETRY * pairs[b][a] for a in places for b in places)


def _source(processes: Processes, devices: int) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return (
        f"measured by moejax plan probe on {now:%Y-%m-%d}: {devices} devices, {processes.count} "
        f"processes, JAX {jax.__version__}, Python {platform.python_version()}"
    )
