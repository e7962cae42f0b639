"""What the planner knows of a cluster: its tiers of links and its devices, measured or described.

Devices of a node are joined by the first tier, nodes by the second, groups of nodes by a third, and
so on, fastest first. Rates are bytes a second of one device, one way, with all devices busy at
once, as they are in a train step. Nothing here imports JAX. Files: docs/formats/topology.md.

Where one collective spans tiers it sends to peers on all of them at the same time, so it takes as
long as the slowest tier takes for its share of the bytes.
"""

import bisect
import dataclasses
import itertools
import math
import operator
import statistics
from dataclasses import dataclass

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
# Other kinds that `plan.trace.reader` finds travel as one of these do.
SAME = {"all_max": "all_reduce", "all_min": "all_reduce"}
LINKS = SAME | {"permute": "all_to_all"}
RINGS = ("all_gather", "reduce_scatter", "all_reduce")
SLOW_BELOW = 0.75  # of the usual rate between nodes; below it a node is called slow
SIZES = tuple(2**power for power in range(10, 31))  # bytes that `crossover` looks at


@dataclass(frozen=True)
class Link:
    """One kind of collective on one tier.

    Attributes:
      startup_s: of one call among the devices that the tier joins.
      bytes_per_s: of a device, one way, when all devices of the node send at once.
      error: of the fit, the median of |predicted / measured - 1|; 0 where nothing was measured.
      points: what was measured: (bytes on the wire of a device, seconds).
    """

    startup_s: float
    bytes_per_s: float
    error: float = 0.0
    points: tuple[tuple[int, float], ...] = ()

    def seconds(self, wire_bytes: float) -> float:
        """One call that sends so many bytes from each device."""
        return self.startup_s + wire_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Tier:
    """One kind of link.

    Attributes:
      name: for people: nvlink, ib, ici, dcn, host, network.
      size: devices of a node for the first tier; then how many of the tier below it joins.
      links: of each of `KINDS`.
      contention: two collectives on the link at once, over one after the other; 1: nothing gained.
      compute_share: share of a device's compute that a collective takes while it runs.
      sync_delay_s: that a collective between computations takes longer than one after another.
    """

    name: str
    size: int
    links: dict[str, Link]
    contention: float = 1.0
    compute_share: float = 0.0
    sync_delay_s: float = 0.0


@dataclass(frozen=True)
class CodecRates:
    """Bytes of float32 that a codec encodes and decodes a second, whatever it makes of them."""

    encode: float
    decode: float


@dataclass(frozen=True)
class Device:
    """One device, with its neighbours as busy as itself.

    Attributes:
      name: as JAX calls its kind.
      platform: "cpu", "gpu" or "tpu".
      products: dtype -> (FLOPs of a matrix product, FLOP/s), smallest product first.
      copy_bytes_per_s: bytes read and written by an operation that only moves memory.
      gather_bytes_per_s: the same where rows are gathered by index.
      startup_s: of one small operation.
      codecs: rates of each codec, by name.
      program_overhead: seconds that a whole program computes, over those of its operations alone.
      oversubscription: devices of a node that take turns on the same cores; 1: none waits.
    """

    name: str
    platform: str
    memory_bytes: int
    products: dict[str, tuple[tuple[float, float], ...]]
    copy_bytes_per_s: float
    gather_bytes_per_s: float
    startup_s: float
    codecs: dict[str, CodecRates] = dataclasses.field(default_factory=dict)
    program_overhead: float = 1.0
    oversubscription: float = 1.0

    def product_rate(self, dtype: str, flops: float) -> float:
        """FLOP/s of a matrix product of so many FLOPs.

        Between measured sizes along a straight line of logarithms; above the largest as fast as it;
        below the smallest as long as it takes. A dtype that is not there counts as float32, one of
        eight bits as bfloat16; where that is not there either, as the slowest that is.
        """
        near = "bfloat16" if dtype.startswith("float8") else "float32"
        curve = self.products.get(dtype) or self.products.get(near)
        if curve is None:
            curve = min(self.products.values(), key=lambda points: points[-1][1])
        place = bisect.bisect_right([size for size, _ in curve], flops)
        if place == 0:
            size, rate = curve[0]
            return rate * flops / size
        if place == len(curve):
            return curve[-1][1]
        (low, low_rate), (high, high_rate) = curve[place - 1 : place + 1]
        along = math.log(flops / low) / math.log(high / low)
        return low_rate * (high_rate / low_rate) ** along


@dataclass(frozen=True)
class SlowNode:
    """A node whose links are slower than the other nodes'."""

    node: int
    name: str
    bytes_per_s: float  # of a device, in its slower direction
    usual_bytes_per_s: float

    @property
    def times_slower(self) -> float:
        """How many times slower than usual."""
        return self.usual_bytes_per_s / self.bytes_per_s


@dataclass(frozen=True)
class Crossover:
    """Which way of doing one collective over the whole cluster wins at which size.

    Attributes:
      kind: "all_to_all" or "all_reduce".
      seconds: way -> seconds at each of `SIZES` (bytes of a device's operand).
      changes: (bytes, way that wins from there on), the first at the smallest size.
    """

    kind: str
    seconds: dict[str, tuple[float, ...]]
    changes: tuple[tuple[int, str], ...]

    def best(self, operand_bytes: float) -> str:
        """The way that wins at a size."""
        sizes = [size for size, _ in self.changes]
        return self.changes[max(0, bisect.bisect_right(sizes, operand_bytes) - 1)][1]


@dataclass(frozen=True)
class Topology:
    """A cluster.

    Attributes:
      version: of the file format.
      source: where the numbers come from.
      tiers: fastest first.
      pairs: bytes a second of a device from node (row) to node (column), the diagonal 0; or empty.
      node_names: of the rows; or empty.
      asymmetric: the pairs differ by direction, and that is no mistake.
    """

    version: int
    name: str
    source: str
    device: Device
    tiers: tuple[Tier, ...]
    pairs: tuple[tuple[float, ...], ...] = ()
    node_names: tuple[str, ...] = ()
    asymmetric: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the tiers."""
        return tuple(tier.size for tier in self.tiers)

    @property
    def devices(self) -> int:
        """In the cluster."""
        return math.prod(self.sizes)

    @property
    def nodes(self) -> int:
        """Groups that the fastest tier joins."""
        return math.prod(self.sizes[1:])

    def shares(self, kind: str, operand_bytes: float, *group: int) -> tuple[float, ...]:
        """Bytes that a device of the group puts on each tier.

        all_to_all: every device sends a part to every other, so (n - 1) / n of the operand leaves
        it, in the proportion of its peers. all_gather and reduce_scatter are rings, all_reduce is
        two: (n - 1) / n of the operand (all_gather: of its result) passes between any two blocks
        of devices, once, and the block's devices share the sending. permute: all of it, on the
        slowest tier.

        Args:
          operand_bytes: of one device; of an all_gather, its result's. As in `plan.trace.reader`.
          group: devices of the group in each node, nodes, ...; tiers left out count 1.
        """
        count, peers = math.prod(group), self._peers(group)
        kind = SAME.get(kind, kind)
        if kind == "permute":
            slowest = max((t for t, number in enumerate(peers) if number), default=-1)
            return tuple(operand_bytes * (t == slowest) for t in range(len(peers)))
        if kind == "all_to_all":
            return tuple(operand_bytes * number / count for number in peers)
        passing = (2 if kind == "all_reduce" else 1) * operand_bytes * (count - 1) / count
        sizes = (1, *group, *(1,) * (len(peers) - len(group)))
        blocks = itertools.accumulate(sizes, operator.mul)
        return tuple(
            passing / block if number else 0.0 for number, block in zip(peers, blocks, strict=False)
        )

    def seconds(self, kind: str, operand_bytes: float, *group: int) -> tuple[float, ...]:
        """Seconds of each tier in one collective over a group; it takes as long as the longest.

        Start-up is charged once for each message step: an all-to-all needs one step per peer, a
        ring one per device. A link's start-up was measured with `size - 1` steps.

        Args: as of `shares`. `seconds("all_to_all", n, 4, 2)`: four devices of each of two nodes.
        """
        found, peers = [], self._peers(group)
        shares = self.shares(kind, operand_bytes, *group)
        ring = SAME.get(kind, kind) in RINGS
        for tier, number, wire_bytes in zip(self.tiers, peers, shares, strict=True):
            link = tier.links[LINKS.get(kind, kind)]
            steps = math.prod(group) - 1 if ring else number
            starts = max(1.0, steps / max(1, tier.size - 1))
            cost = starts * link.startup_s + wire_bytes / link.bytes_per_s
            found.append(cost if number else 0.0)
        return tuple(found)

    def crossover(self) -> tuple[Crossover, ...]:
        """Whether one collective or one a tier wins over the whole cluster, by size.

        flat: every device sends to every other. ring: one step a device, each after the last, as
        many rings at once as a node has devices. two_level: tier by tier, so that fewer and larger
        messages cross the slow links; an all-reduce sums inside first, so that each device sends
        only its share across.
        """
        ways = {
            "all_to_all": (("flat", self._flat), ("two_level", self._two_level)),
            "all_reduce": (("ring", self._flat), ("two_level", self._two_level)),
        }
        found = []
        for kind, by_name in ways.items():
            seconds = {name: tuple(way(kind, size) for size in SIZES) for name, way in by_name}
            changes: list[tuple[int, str]] = []
            for place, size in enumerate(SIZES):
                best = min(seconds, key=lambda name, place=place: seconds[name][place])
                if not changes or best != changes[-1][1]:
                    changes.append((size, best))
            found.append(Crossover(kind, seconds, tuple(changes)))
        return tuple(found)

    def slow_nodes(self) -> tuple[SlowNode, ...]:
        """The nodes that most others reach, or that reach most others, at less than usual rates.

        Of two nodes, the one that sends slower; if both do, nothing can tell.
        """
        count = len(self.pairs)
        rates = []
        for node in range(count):
            others = [other for other in range(count) if other != node]
            out = statistics.median_high([self.pairs[node][other] for other in others])
            back = statistics.median_high([self.pairs[other][node] for other in others])
            rates.append(min(out, back) if count > 2 else out)
        usual = statistics.median_high(rates) if rates else 0.0
        return tuple(
            SlowNode(node, self.node_names[node] if self.node_names else str(node), rate, usual)
            for node, rate in enumerate(rates)
            if rate < SLOW_BELOW * usual
        )

    def of_nodes(self, nodes: int) -> "Topology":
        """The same cluster with fewer or more nodes. Pairs are left out: they were of these nodes.

        Raises:
          ValueError: if the nodes do not fill the tiers below the slowest.
        """
        if len(self.tiers) == 1:
            if nodes == 1:
                return self
            raise ValueError(f"{self.name} cannot have {nodes} nodes. It has one tier: one node.")
        fixed = math.prod(self.sizes[1:-1])
        if nodes < 1 or nodes % fixed:
            rule = f"a multiple of {fixed}" if fixed > 1 else "at least 1"
            raise ValueError(f"{self.name} cannot have {nodes} nodes. They must be {rule}.")
        last = dataclasses.replace(self.tiers[-1], size=nodes // fixed)
        tiers = (*self.tiers[:-1], last)
        return dataclasses.replace(self, tiers=tiers, pairs=(), node_names=(), asymmetric=False)

    def group(self, inside: int, across: int) -> tuple[int, ...]:
        """What `seconds` calls a group: devices of each of so many nodes, neighbours first."""
        if len(self.tiers) == 1:
            return (inside * across,)
        sizes = [inside]
        for tier in self.tiers[1:-1]:
            sizes.append(math.gcd(across, tier.size))
            across //= sizes[-1]
        return (*sizes, across)

    def _peers(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """How many others of the group a device reaches over each tier."""
        assert 0 < len(group) <= len(self.tiers), f"a group {group} on {len(self.tiers)} tiers"
        group = (*group, *(1,) * (len(self.tiers) - len(group)))
        reached = [math.prod(group[:t]) for t in range(len(group) + 1)]
        return tuple(after - before for before, after in itertools.pairwise(reached))

    def _flat(self, kind: str, operand_bytes: float) -> float:
        return max(self.seconds(kind, operand_bytes, *self.sizes))

    def _two_level(self, kind: str, operand_bytes: float) -> float:
        alone = [(*(1,) * t, size) for t, size in enumerate(self.sizes)]
        if kind == "all_to_all":
            return sum(max(self.seconds(kind, operand_bytes, *group)) for group in alone)
        total, left = 0.0, operand_bytes
        for group in alone[:-1]:
            for half in ("reduce_scatter", "all_gather"):
                total += max(self.seconds(half, left, *group))
            left /= group[-1]
        return total + max(self.seconds(kind, left, *alone[-1]))


def same_links(link: Link) -> dict[str, Link]:
    """One link for collectives of every kind."""
    return dict.fromkeys(KINDS, link)
