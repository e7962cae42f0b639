"""Prices each operation of a schedule on a cluster, then simulates them on streams.

A device computes in program order while the links carry collectives. Trips of a loop do not
overlap, as in XLA, so a loop costs one trip times its trip count.

Copies between the memories of host and device have a stream in each direction.

Links carry both directions at once. Pipeline stages send independently of each other, so the link
between them is several streams: of the first stage, of one in the middle, of the last.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from moejax.comm.tokens.rounds import ROUNDS
from moejax.kernels.experts.blocked_mlp import rows_computed
from moejax.layout.layout import Axes, Layout
from moejax.plan.cluster.device import Device
from moejax.plan.cluster.pairs import Groups
from moejax.plan.cluster.topology import Tier, Topology
from moejax.plan.price.simulate import COMPUTE, Task, Timeline, simulate
from moejax.plan.trace.schedule import COPIES, Collective, Op, Schedule

HOST_MEMORY = "host memory"  # the class of all copies between host and device
STREAMS = {kind: kind.replace("_", " ") for kind in COPIES}


@dataclass(frozen=True)
class BucketFill:
    """The fill of buckets: see `plan.price.routing`.

    Attributes:
      filled: filled share of the expert buffer on the busiest device; expert cost scales with it.
      filled_in_rounds: the same share in one overflow round.
      rounds: overflow rounds behind an expert layer; 0: its buckets hold all rows.
    """

    filled: float = 1.0
    filled_in_rounds: float = 1.0
    rounds: int = 0


@dataclass(frozen=True)
class Totals:
    """Sums over a schedule, for one device.

    Attributes:
      computed: seconds of compute by scope.
      sent: seconds on each link by class of traffic: (stream, traffic).
      bytes_sent: bytes that a device puts on each link by class: (stream, traffic).
      exposed: seconds without compute, by the class that was waited for.
    """

    computed: dict[str, float] = field(default_factory=partial(defaultdict, float))
    sent: dict[tuple[str, str], float] = field(default_factory=partial(defaultdict, float))
    bytes_sent: dict[tuple[str, str], float] = field(default_factory=partial(defaultdict, float))
    exposed: dict[str, float] = field(default_factory=partial(defaultdict, float))

    def add(self, other: "Totals", times: float) -> None:
        """Adds the totals of a part that runs `times` times."""
        for name, total in vars(self).items():
            for key, value in getattr(other, name).items():
                total[key] += value * times


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated schedule.

    Attributes:
      timeline: start and end of each task; a loop is one task.
      totals: its sums, with loops multiplied by their trip counts.
      ops: the operation of each task.
      sizes: bytes that each task sends or moves in memory; 0 for a loop.
      inside: (one trip, trip count) of each task that is a loop.
    """

    timeline: Timeline
    totals: Totals
    ops: tuple[Op, ...]
    sizes: tuple[float, ...]
    inside: "dict[int, tuple[SimulatedStep, float]]"

    @property
    def seconds(self) -> float:
        """Time of the whole schedule."""
        return self.timeline.seconds


class Costs:
    """Prices single operations on a cluster for one mesh."""

    def __init__(self, topology: Topology, layout: Layout, fill: BucketFill):
        self.topology, self.layout, self.fill = topology, layout, fill
        self.device = topology.device
        # On CPU a collective waits for the one before it; one that the program computes beside
        # waits for its beginning, and none waits for it (comm.cpu.gloo).
        self.in_order = self.device.platform == "cpu" and topology.nodes > 1
        self.stages = layout.size(layout.stage)
        between = self.links(Collective("ppermute", layout.stage, "", 1, 1))
        self.between_stages = between[0][0] if between else None

    def compute(self, op: Op, filled: float) -> float:
        """Returns the seconds of an operation that computes."""
        share = filled if op.scales_with_fill else 1.0
        return self.device.program_overhead * alone(op, self.device, share)

    def copy(self, op: Op) -> float:
        """Returns the seconds of a copy between the memories of host and device."""
        rate = getattr(self.topology.known_host(), op.kind)
        return self.device.startup_s + op.bytes / rate

    def links(self, collective: Collective) -> list[tuple[Tier, float, float]]:
        """Returns (tier, seconds, bytes of a device) for each link that a collective uses."""
        group = group_of(self.topology, self.layout, collective.axes)
        if group is None:
            return []
        nodes = node_groups(self.layout, collective.axes)
        seconds = self.topology.seconds(collective.kind, collective.bytes, *group, nodes=nodes)
        shares = self.topology.shares(collective.kind, collective.bytes, *group)
        times = list(zip(self.topology.tiers, seconds, shares, strict=True))
        if collective.kind == "ppermute" and group[0] > 1:
            # A chain leaves a node at one of its devices; those of a CPU share the node's link.
            alone = 1 / group[0] if self.device.platform == "cpu" else 1.0
            times[1:] = [(tier, cost * alone, size / group[0]) for tier, cost, size in times[1:]]
        return [(tier, cost, size) for tier, cost, size in times if cost > 0]

    def streams(self, collective: Collective, tier: Tier) -> list[tuple[str, float]]:
        """Returns the streams that a collective occupies on a tier, each with a share of its time.

        One stream stands for all stages in the middle; its share is the part of them that send.
        Along a ring the way around has a stream of its own: its sender is none of the chain's.
        """
        ring, last = self.layout.context, self.layout.size(self.layout.context) - 1
        if ring and collective.axes == ring and collective.senders == (last,):
            return [(f"{tier.name}, way around", 1.0)]
        if tier is not self.between_stages:
            return [(tier.name, 1.0)]
        last, senders = self.stages - 1, set(range(self.stages))
        if collective.kind == "ppermute" and collective.axes == self.layout.stage:
            senders = set(collective.senders)
        middle = len(senders - {0, last}) / max(1, last - 1)
        shares = [
            (tier.name, float(0 in senders)),
            (f"{tier.name}, stages in the middle", middle),
            (f"{tier.name}, last stage", float(last in senders)),
        ]
        return [(name, share) for name, share in shares if share]

    def left(self, tier: Tier, seconds: float, computed: float, *, behind: bool = False) -> float:
        """Returns the seconds that a device waits for a collective after `computed` seconds.

        Devices that share cores compute in turn, so the first one sends while the others still
        compute. A device therefore waits for less than the whole collective. A short
        collective cannot end until all devices have met; a long one sends part of its data before.

        Args:
          behind: whether the collective follows another with no compute between, as scales follow
            the rows that they belong to: the devices have just met, and it starts at once.
        """
        met = 0.0 if behind else tier.sync_delay_s
        if tier is self.topology.tiers[0]:
            return max(met, seconds)
        sharers = max(1.0, self.device.oversubscription)
        return max(met, seconds / sharers, seconds - (1 - 1 / sharers) * computed)


def group_of(topology: Topology, layout: Layout, axes: Axes) -> tuple[int, ...] | None:
    """Returns a collective's group for `Topology.seconds`; None for one device."""
    inside = layout.size(layout.inside_node(axes))
    across = layout.size(layout.between_nodes(axes))
    return None if inside * across == 1 else topology.group(inside, across)


@lru_cache(maxsize=1024)
def node_groups(layout: Layout, axes: Axes) -> Groups:
    """Returns the nodes of each group of a collective; empty where it stays inside nodes.

    Devices fill nodes in the order of the mesh, so the places along its slow axes count nodes.
    """
    across = layout.between_nodes(axes)
    if not across:
        return ()
    slow = [axis for axis, _ in layout.sizes if axis in layout.slow]
    sizes = [layout.size((axis,)) for axis in slow]
    nodes = np.arange(math.prod(sizes)).reshape(sizes)
    nodes = np.moveaxis(nodes, [slow.index(axis) for axis in across], range(-len(across), 0))
    return tuple(map(tuple, nodes.reshape(-1, layout.size(across)).tolist()))


def alone(op: Op, device: Device, share: float = 1.0) -> float:
    """Returns the seconds of an operation that computes, timed by itself.

    Args:
      share: filled share of the rows, for an operation on buckets.
    """
    if op.kind == "product":
        flops = op.flops * (share if op.blocks is None else _share_computed(*op.blocks, share))
        product = flops / max(device.product_rate(op.dtype, flops), 1.0)
        if op.blocks is None:
            moved = op.bytes / device.copy_rate(op.bytes)
            return device.startup_s + max(product, moved * share)
        # A group's weights are moved at a time, before and after its products.
        _, groups = op.blocks
        return device.startup_s + product + op.bytes / device.copy_rate(op.bytes / groups)
    if op.kind in ("region", "write"):
        computed = op.exponentials / device.exponentials_per_s
        computed += op.reduced / device.reductions_per_s
        moved = op.bytes / device.copy_rate(op.bytes)
        return op.passes * device.startup_s + max(moved, computed)
    if op.kind == "gather":
        return device.startup_s + op.bytes / device.gather_bytes_per_s
    return 0.0


def _share_computed(rows: int, groups: int, share: float) -> float:
    """Returns the share of a buffer's rows that is computed, in whole blocks of each group.

    Group sizes vary around the mean like counts of random draws, so three sizes are averaged.
    """
    mean = share * rows / groups
    around = [max(0.0, mean + sign * math.sqrt(mean)) for sign in (-1, 0, 1)]
    return sum(rows_computed(n, rows) for n in around) / len(around) * groups / rows


def simulate_step(schedule: Schedule, costs: Costs, filled: float | None = None) -> SimulatedStep:
    """Prices every operation and simulates the schedule.

    Args:
      filled: filled share of buckets; by default from `costs.fill`.
    """
    builder = _TaskBuilder(costs, costs.fill.filled if filled is None else filled)
    for op in schedule.ops:
        builder.take(op)
    timeline = simulate(builder.tasks)
    for name, seconds in timeline.exposed().items():
        builder.totals.exposed[name] += seconds
    return SimulatedStep(
        timeline, builder.totals, tuple(builder.ops), tuple(builder.sizes), builder.inside
    )


class _TaskBuilder:
    """Turns operations into tasks."""

    def __init__(self, costs: Costs, filled: float):
        self.costs, self.filled = costs, filled
        self.tasks: list[Task] = []
        self.ops: list[Op] = []
        self.sizes: list[float] = []
        self.totals = Totals()
        self.inside: dict[int, tuple[SimulatedStep, float]] = {}
        self.ends: list[tuple[int, ...]] = []  # tasks that finish each operation
        self.sending: tuple[int, ...] = ()  # tasks of the last collective that others wait for
        self.begun: tuple[int, ...] = ()  # tasks that the last collective waited for
        self.first = True  # whether there was no collective yet
        self.computed = 0.0  # seconds since the last collective

    def take(self, op: Op) -> None:
        """Adds the next operation."""
        after = tuple(sorted({task for maker in op.after for task in self.ends[maker]}))
        if op.collective is not None:
            own = self._send(op, op.collective, after)
        elif op.body is not None:
            own = self._repeat(op, op.body, after)
        elif op.kind in COPIES:
            own = self._copy(op, after)
        else:
            seconds = self.costs.compute(op, self.filled)
            self.totals.computed[op.scope] += seconds
            self.computed += seconds
            own = self._add(op, op.bytes, Task(op.scope, COMPUTE, seconds, after))
        self.ends.append(own or after)

    def _add(self, op: Op, size: float, task: Task) -> tuple[int]:
        self.tasks.append(task)
        self.ops.append(op)
        self.sizes.append(size)
        return (len(self.tasks) - 1,)

    def _copy(self, op: Op, after: tuple[int, ...]) -> tuple[int, ...]:
        """Adds a copy between host and device. Cores of a CPU do nothing else meanwhile."""
        seconds, stream = self.costs.copy(op), STREAMS[op.kind]
        self.totals.sent[stream, HOST_MEMORY] += seconds
        self.totals.bytes_sent[stream, HOST_MEMORY] += op.bytes
        taken = float(self.costs.device.platform == "cpu")
        task = Task(HOST_MEMORY, stream, seconds, after, compute_share=taken)
        return self._add(op, op.bytes, task)

    def _send(self, op: Op, collective: Collective, after: tuple[int, ...]) -> tuple[int, ...]:
        """Adds a collective: one task on each link that it uses."""
        beside = collective.kind == "ppermute" or collective.beside
        if self.costs.in_order:
            before = self.begun if beside else self.begun + self.sending
            after = tuple(sorted({*after, *self._last(before)}))
        own: tuple[int, ...] = ()
        name = collective.traffic or op.scope
        behind = not self.first and self.computed == 0.0
        for tier, seconds, size in self.costs.links(collective):
            waited = self.costs.left(tier, seconds, self.computed, behind=behind)
            taken = tier.compute_share
            for stream, share in self.costs.streams(collective, tier):
                task = Task(name, stream, share * waited, after, compute_share=taken)
                own += self._add(op, size, task)
                taken = 0.0  # once, on whichever stage
            self.totals.sent[tier.name, name] += seconds
            self.totals.bytes_sent[tier.name, name] += size
        if own:
            self.begun, self.first, self.computed = after, False, 0.0
            self.sending = self.sending if beside else own
        return own

    def _last(self, tasks: tuple[int, ...]) -> Iterable[int]:
        """Returns the last of some tasks on each stream, which stands for those before it there."""
        return {self.tasks[task].stream: task for task in sorted(tasks)}.values()

    def _repeat(self, op: Op, body: Schedule, after: tuple[int, ...]) -> tuple[int, ...]:
        """Adds a loop as one task; its totals count once per trip."""
        filled = self.costs.fill.filled_in_rounds if op.scope == ROUNDS else self.filled
        body = _unrolled(op, body) if op.unrolled > 1 else body
        trip = simulate_step(body, self.costs, filled)
        self.totals.add(trip.totals, op.trip_count)
        seconds = trip.seconds * op.trip_count
        own = self._add(op, 0.0, Task(f"{op.trip_count:g} x loop", COMPUTE, seconds, after))
        self.inside[own[0]] = trip, op.trip_count
        met = any(name != HOST_MEMORY for _, name in trip.totals.sent)
        self.computed = 0.0 if met else self.computed + seconds
        return own


def _unrolled(op: Op, body: Schedule) -> Schedule:
    """Returns `unrolled` trips in one schedule; each waits for the values carried from the last."""
    ops: list[Op] = []
    ready: dict[int, int] = {}  # carried buffer -> the operation of the last trip that wrote it
    for _ in range(op.unrolled):
        first, writer = len(ops), {}
        for body_op in body.ops:
            waits = {ready[b] for b in body_op.reads if b in ready}
            after = tuple(sorted({first + index for index in body_op.after} | waits))
            ops.append(replace(body_op, after=after))
            writer |= dict.fromkeys(body_op.writes, len(ops) - 1)
        ready = {read: writer[left] for read, left in op.carried if left in writer}
    return replace(body, ops=tuple(ops))
