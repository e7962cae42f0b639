"""What a schedule costs on a cluster: every operation priced by itself, then played on streams.

A device computes in program order, and the links carry collectives beside that. Turns of a loop do
not overlap, as in XLA's loops, so a loop costs its turn as often as it turns.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from moejax.dims import Layout
from moejax.plan.schedule import Collective, Op, Schedule
from moejax.plan.simulate import Task, Timeline, simulate
from moejax.plan.topology import Tier, Topology

COMPUTE = "compute"


@dataclass(frozen=True)
class Work:
    """What routing makes of buckets: see `plan.rows`.

    Attributes:
      filled: rows over room for rows, of the fullest device; what experts cost goes with it.
      filled_in_rounds: the same of one round, where buckets overflow.
      rounds: in how many an expert layer goes; 0: its buckets hold all.
    """

    filled: float = 1.0
    filled_in_rounds: float = 1.0
    rounds: int = 0


@dataclass
class Played:
    """A schedule on its streams. Seconds are of one device.

    Attributes:
      computed: seconds of compute by scope.
      sent: seconds on each link by class of traffic: (stream, traffic).
      bytes_sent: bytes that a device puts on each link by class: (stream, traffic).
      exposed: seconds in which nothing computes, by what was waited for.
      timeline: of the operations; of a loop one block.
      inside: timeline of one turn of each loop, by place in the schedule.
    """

    seconds: float
    timeline: Timeline
    tasks: list[Task]
    computed: Counter = field(default_factory=Counter)
    sent: Counter = field(default_factory=Counter)
    bytes_sent: Counter = field(default_factory=Counter)
    exposed: Counter = field(default_factory=Counter)
    inside: "dict[int, tuple[Played, int]]" = field(default_factory=dict)


class Costs:
    """Seconds of single operations on a cluster, for a mesh."""

    def __init__(self, topology: Topology, layout: Layout, work: Work):
        self.topology, self.layout, self.work = topology, layout, work
        self.device = topology.device
        # Gloo carries one collective at a time (comm.gloo).
        self.in_order = self.device.platform == "cpu" and topology.nodes > 1

    def compute(self, op: Op, filled: float) -> float:
        """Seconds of anything but a collective or a loop."""
        device, share = self.device, filled if op.work else 1.0
        if op.kind == "product":
            rate = device.product_rate(op.dtype, op.flops * share)
            moved = op.bytes / device.copy_bytes_per_s
            return device.startup_s + max(op.flops * share / max(rate, 1.0), moved * share)
        if op.kind == "region":
            return op.passes * device.startup_s + op.bytes / device.copy_bytes_per_s
        if op.kind == "gather":
            return device.startup_s + op.bytes / device.gather_bytes_per_s
        return 0.0

    def links(self, one: Collective) -> list[tuple[Tier, float, float]]:
        """(tier, seconds, bytes of a device) on each link that a collective uses."""
        group = self.group(one.axes)
        if group is None:
            return []
        seconds = self.topology.seconds(one.kind, one.bytes, *group)
        shares = self.topology.shares(one.kind, one.bytes, *group)
        found = zip(self.topology.tiers, seconds, shares, strict=True)
        return [(tier, cost, size) for tier, cost, size in found if cost > 0]

    def group(self, axes: tuple[str, ...]) -> tuple[int, ...] | None:
        """Devices of a collective's group inside a node, and nodes on each tier above."""
        inside = self.layout.size(self.layout.inside_node(axes))
        across = self.layout.size(self.layout.between_nodes(axes))
        return None if inside * across == 1 else self.topology.group(inside, across)


def play(schedule: Schedule, costs: Costs, filled: float | None = None) -> Played:
    """Prices every operation and plays the schedule.

    Args:
      filled: of buckets here; the work's unless in rounds.
    """
    filled = costs.work.filled if filled is None else filled
    tasks: list[Task] = []
    ends: list[tuple[int, ...]] = []  # the tasks that finish each operation
    found = Played(0.0, None, tasks)  # type: ignore[arg-type]
    before: tuple[int, ...] = ()
    for place, op in enumerate(schedule.ops):
        after = tuple(sorted({task for maker in op.after for task in ends[maker]}))
        if op.collective is not None:
            after = tuple(sorted({*after, *before})) if costs.in_order else after
            own = _send(op, costs, after, tasks, found)
            before = own or before
        elif op.body is not None:
            own = _loop(op, place, costs, after, tasks, found, filled)
        else:
            seconds = costs.compute(op, filled)
            own = (len(tasks),)
            tasks.append(Task(op.scope, COMPUTE, seconds, after))
            found.computed[op.scope] += seconds
        ends.append(own or after)
    found.timeline = simulate(tasks)
    found.seconds = found.timeline.seconds
    for name, seconds in found.timeline.exposed(by="name").items():
        found.exposed[name] += seconds
    return found


def _send(
    op: Op, costs: Costs, after: tuple[int, ...], tasks: list[Task], found: Played
) -> tuple[int, ...]:
    """Adds a collective: one task on each link that it uses."""
    assert op.collective is not None
    own = []
    name = op.collective.traffic or op.scope
    for tier, seconds, size in costs.links(op.collective):
        own.append(len(tasks))
        tasks.append(Task(name, tier.name, seconds, after, occupies=tier.occupies))
        found.sent[tier.name, name] += seconds
        found.bytes_sent[tier.name, name] += size
    return tuple(own)


def _loop(
    op: Op,
    place: int,
    costs: Costs,
    after: tuple[int, ...],
    tasks: list[Task],
    found: Played,
    filled: float,
) -> tuple[int, ...]:
    """Adds a loop as one task; what happens inside counts as often as it turns."""
    assert op.body is not None
    rounds = op.scope == "rounds"
    inner_filled = costs.work.filled_in_rounds if rounds else filled
    body = _unrolled(op) if op.unrolled > 1 else op.body
    inner = play(body, costs, inner_filled)
    found.inside[place] = (inner, op.turns)
    for total, part in (
        (found.computed, inner.computed),
        (found.sent, inner.sent),
        (found.bytes_sent, inner.bytes_sent),
        (found.exposed, inner.exposed),
    ):
        for key, value in part.items():
            total[key] += value * op.turns
    tasks.append(Task(f"{op.turns} x loop", COMPUTE, inner.seconds * op.turns, after))
    return (len(tasks) - 1,)


def _unrolled(op: Op) -> Schedule:
    """A loop's turns that follow each other: each waits for what the one before carries on."""
    assert op.body is not None
    ops: list[Op] = []
    ready: dict[int, int] = {}  # carried buffer -> the operation of the last turn that wrote it
    for _ in range(op.unrolled):
        first, writer = len(ops), {}
        for one in op.body.ops:
            waits = {ready[b] for b in one.reads if b in ready}
            after = tuple(sorted({first + place for place in one.after} | waits))
            ops.append(replace(one, after=after))
            writer |= dict.fromkeys(one.writes, len(ops) - 1)
        ready = {read: writer[left] for read, left in op.carried if left in writer}
    return replace(op.body, ops=tuple(ops))
