"""The whole probe, which every process runs: measures links and devices.

Times the collectives that the trainer issues, on a mesh of the trainer's devices.
"""

import datetime
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from moejax.plan.cluster.device import Device
from moejax.plan.cluster.file import ASYMMETRY, VERSION, from_json, to_text
from moejax.plan.cluster.pairs import Matrix
from moejax.plan.cluster.topology import KINDS, Tier, Topology
from moejax.plan.probe.device import probe_device, probe_host
from moejax.plan.probe.links import probe_oversubscription, probe_pairs, probe_tier
from moejax.plan.probe.nodes import Nodes, find_nodes, host_memory_of, memory_of
from moejax.plan.probe.program import probe_program
from moejax.plan.probe.timer import AXES, ProgressFn, Stopwatch
from moejax.runtime.processes import Processes
from moejax.runtime.start import platform_of

SECONDS, QUICK_SECONDS = 28.0, 10.0  # for all links
LATER, LATER_S = 2.0, 2e-3  # times, and seconds: less is noise of start-ups between nodes
MAX_PAIRED = 64  # nodes whose pairs are measured; more would take minutes


@dataclass(frozen=True)
class Effort:
    """The thoroughness of a probe.

    Attributes:
      seconds: approximate time for the links; sizes grow until they are spent.
      quick: fewer sizes and dtypes; no pairs, no contention.
    """

    seconds: float = SECONDS
    quick: bool = False


def expected_text(quick: bool) -> str:
    """Returns a text about the time of a probe, and about disturbances.

    On two cores of an Intel Xeon with eight simulated devices, beside other programs, a quick probe
    took 156 s and a whole one 338 s (2026-11-26); either computed for 53 s. Operations are timed
    for longer since; of two emulated hosts at 200 Mbit/s a whole probe then took about 90 s.
    """
    how_long = "one to three minutes" if quick else "one to six minutes"
    return f"this takes {how_long}; another program on these machines makes it longer and wrong"


def probe(
    processes: Processes,
    devices: Sequence[Any],
    *,
    name: str,
    nodes: int | None = None,
    effort: Effort,
    progress: ProgressFn,
) -> tuple[Topology, tuple[str, ...]]:
    """Measures devices and links. Every process calls it.

    Args:
      devices: the devices that `runtime.start.start` returns.
      nodes: number of nodes from the user; None: find them from the devices.

    Returns:
      The topology and warnings about it, the same in every process.

    Raises:
      InputError: if nodes have different numbers of devices.
    """
    hosts = processes.hosts()
    nodes_found = find_nodes(devices, hosts, nodes)
    odd = [nodes_found.warning] if nodes_found.warning else []
    watch = Stopwatch(processes, nodes_found.devices)
    here = jax.local_devices()[0], nodes_found, hosts
    memory, host_memory = (min(processes.gather(of(*here))) for of in (memory_of, host_memory_of))
    device = _measure_device(watch, devices, memory, effort, progress)
    host = probe_host(watch, device.platform, host_memory, progress)
    tiers, more = _probe_tiers(watch, nodes_found, device.oversubscription, effort, progress)
    odd += more
    topology = Topology(
        version=VERSION,
        name=name,
        source=_source(processes, len(devices)),
        device=device,
        tiers=tiers,
        host=host,
    )
    if topology.nodes > 1 and not effort.quick and topology.nodes <= MAX_PAIRED:
        topology = _with_pairs(topology, nodes_found, processes, progress)
    odd += _slow_nodes(topology)
    # Each process computed from its own clock, so last digits may differ: process 0's values count.
    text = processes.gather(to_text(topology))[0]
    return from_json(json.loads(text), "what was measured"), tuple(odd)


def _measure_device(
    watch: Stopwatch, devices: Sequence[Any], memory: int, effort: Effort, progress: ProgressFn
) -> Device:
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
    progress("devices that share cores")
    return replace(device, oversubscription=gather(probe_oversubscription(watch))[0])


def _probe_tiers(
    watch: Stopwatch, nodes: Nodes, oversubscription: float, effort: Effort, progress: ProgressFn
) -> tuple[tuple[Tier, ...], list[str]]:
    """Measures both tiers, and joins them if they are equally fast."""
    inside, across = nodes.tier_names
    count = nodes.sizes[0]
    tier = partial(
        probe_tier,
        watch,
        oversubscription=oversubscription,
        seconds=effort.seconds / (2 if count > 1 else 1),
        quick=effort.quick,
        progress=progress,
    )
    fast = tier(AXES[1], inside)
    if count == 1:
        return (fast,), []
    slow = tier(AXES[0], across)
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
    # The slower of the two, because it must hold for every peer.
    whole = replace(fast, size=fast.size * slow.size)
    return (whole,), [
        f"devices of one node ({inside}) exchange no faster than devices of different nodes: the "
        f"cluster counts as one node of {whole.size}"
    ]


def _with_pairs(
    topology: Topology, nodes: Nodes, processes: Processes, progress: ProgressFn
) -> Topology:
    """Adds the rates of pairs of nodes, measured twice if they differed by direction.

    Starts are kept only where some are clearly later than others: else they are noise.
    """
    rate = topology.tiers[1].links["all_to_all"].bytes_per_s

    def measure() -> Sequence[Sequence[Sequence[float]]]:
        return processes.gather(probe_pairs(nodes.devices, processes, rate, progress=progress))[0]

    pairs, starts = (tuple(map(tuple, matrix)) for matrix in measure())
    if _asymmetric(pairs):
        repeated, _ = measure()
        pairs = tuple(tuple(map(max, *rows)) for rows in zip(pairs, repeated, strict=True))
    return replace(
        topology,
        pairs=pairs,
        pair_startup_s=starts if differ(starts) else (),
        node_names=nodes.names,
        asymmetric=_asymmetric(pairs),
    )


def differ(starts: Matrix) -> bool:
    """Returns whether some start-ups between nodes are clearly longer than others."""
    times = [seconds for row in starts for seconds in row if seconds]
    return max(times) > max(LATER * min(times), min(times) + LATER_S)


def _slow_nodes(topology: Topology) -> list[str]:
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
