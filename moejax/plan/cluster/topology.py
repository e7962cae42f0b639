"""A cluster as the planner sees it: tiers of links, and the rates of a device.

Devices of a node are joined by the first tier, nodes by the second, groups of nodes by a third, and
so on, fastest first. Rates are bytes a second of one device, one way, with all devices busy at
once, as they are in a train step. Nothing here imports JAX. Files: docs/formats/topology.md.

A collective that spans tiers sends on all of them at the same time, so it takes as long as the
slowest tier needs for its share of the bytes.
"""

import bisect
import dataclasses
import itertools
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moejax.errors import InputError
from moejax.plan.cluster.device import Device
from moejax.plan.cluster.pairs import Groups, Matrix, groupings, links_of

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
# Other kinds of collective are priced like one of `KINDS`.
SAME = {"all_max": "all_reduce", "all_min": "all_reduce"}
LINKS = SAME | {"ppermute": "all_to_all"}
RINGS = ("all_gather", "reduce_scatter", "all_reduce")
SLOW_BELOW = 0.75  # of the usual rate between nodes; below it a node is called slow
SIZES = tuple(2**power for power in range(10, 31))  # bytes that `crossover` looks at


@dataclass(frozen=True)
class Link:
    """One kind of collective on one tier.

    Attributes:
      startup_s: time of an empty call among the devices that the tier joins.
      bytes_per_s: rate of one device, one way, while all devices of the node send.
      error: median of |predicted / measured - 1| over the fit; 0 if nothing was measured.
      points: the measurements: (bytes a device sends, seconds).
      bends: (bytes a device sends, time of such a call over the line's), smallest first, because
        calls larger than caches and buffers are slower; interpolated, and kept beyond.
    """

    startup_s: float
    bytes_per_s: float
    error: float = 0.0
    points: tuple[tuple[int, float], ...] = ()
    bends: tuple[tuple[int, float], ...] = ()

    def seconds(self, wire_bytes: float, starts: float = 1.0) -> float:
        """Returns the time of a call with `starts` start-ups; each device sends `wire_bytes`."""
        return (starts * self.startup_s + wire_bytes / self.bytes_per_s) * self._bend(wire_bytes)

    def times(self, startup: float, bytes_time: float) -> "Link":
        """Returns the link with so many times its start-up, and times its time for each byte."""
        if startup == bytes_time == 1.0:
            return self
        slower = self.startup_s * startup, self.bytes_per_s / bytes_time
        return dataclasses.replace(self, startup_s=slower[0], bytes_per_s=slower[1])

    def _bend(self, wire_bytes: float) -> float:
        """Returns the ratio of a call's time to the line's, linear in the logarithm of bytes."""
        index = bisect.bisect_right(self.bends, wire_bytes, key=operator.itemgetter(0))
        if index in (0, len(self.bends)):
            return self.bends[max(0, index - 1)][1] if self.bends else 1.0
        (low, before), (high, after) = self.bends[index - 1 : index + 1]
        fraction = math.log(wire_bytes / low) / math.log(high / low)
        return before + (after - before) * fraction


@dataclass(frozen=True)
class Tier:
    """One kind of link.

    Attributes:
      name: nvlink, ib, ici, dcn, host, network, ...; for display only.
      size: for the first tier, devices of a node; for others, units of the tier below.
      links: one for each of `KINDS`.
      contention: time of two collectives at once over one after the other; 1: no gain.
      compute_share: share of a device's compute that a collective takes while it runs.
      sync_delay_s: least time of a collective that stands between computations.
    """

    name: str
    size: int
    links: dict[str, Link]
    contention: float = 1.0
    compute_share: float = 0.0
    sync_delay_s: float = 0.0


@dataclass(frozen=True)
class Host:
    """The memory of a node's host, where devices may keep arrays.

    Attributes:
      to_device, from_device: bytes a second of a copy between the two memories, of one device while
        all devices of the node copy.
      memory_bytes: of a node.
    """

    to_device: float
    from_device: float
    memory_bytes: int


@dataclass(frozen=True)
class SlowNode:
    """A node whose links are slower than the other nodes'."""

    node: int
    name: str
    bytes_per_s: float  # rate of a device in the node's slower direction
    times_slower: float  # the usual rate over the node's


@dataclass(frozen=True)
class Topology:
    """A cluster: tiers of links, and the device that all nodes have.

    Attributes:
      version: version of the file format.
      source: where the numbers come from.
      tiers: fastest first.
      pairs: bytes a second of a device from node (row) to node (column), the diagonal 0; or empty.
      pair_startup_s: seconds of a smallest message from node to node, the diagonal 0; or empty.
      node_names: names of the rows of `pairs`; or empty.
      asymmetric: whether pairs may differ by direction.
      host: the memory of a node's host; None in files that do not have it.
    """

    version: int
    name: str
    source: str
    device: Device
    tiers: tuple[Tier, ...]
    pairs: Matrix = ()
    pair_startup_s: Matrix = ()
    node_names: tuple[str, ...] = ()
    asymmetric: bool = False
    host: Host | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the tiers."""
        return tuple(tier.size for tier in self.tiers)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.prod(self.sizes[1:])

    def known_host(self) -> Host:
        """Returns `host`.

        Raises:
          InputError: if the file does not have it.
        """
        if self.host is None:
            raise InputError(
                f"no plan with arrays in the host's memory. Topology {self.name} has no `host`. "
                'Run moejax plan probe again, or add "host": {"to_device": BYTES_PER_S, '
                '"from_device": BYTES_PER_S, "memory_bytes": BYTES_OF_A_NODE} to its file.'
            )
        return self.host

    def shares(self, kind: str, operand_bytes: float, *group: int) -> tuple[float, ...]:
        """Returns the bytes that a device of the group sends on each tier.

        all_to_all: (n - 1) / n of the operand leaves a device, split over the tiers as its peers
        are. all_gather and reduce_scatter are one ring, all_reduce is two: (n - 1) / n of the
        operand (all_gather: of the result) passes once between neighbouring blocks, shared by the
        block's devices. ppermute: the whole operand, on the slowest tier.

        Args:
          operand_bytes: bytes of one device's operand; for an all_gather, of its result.
          group: devices of the group in each node, nodes, ...; tiers left out count 1.
        """
        count, peers = math.prod(group), self._peers(group)
        kind = SAME.get(kind, kind)
        if kind == "ppermute":
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

    def seconds(
        self, kind: str, operand_bytes: float, *group: int, nodes: Groups = ()
    ) -> tuple[float, ...]:
        """Returns the seconds of each tier in one collective; the longest is the collective's time.

        Start-up is charged once for each message step: an all-to-all needs one step per peer, a
        ring one per device. A link's start-up was measured with `size - 1` steps. Between nodes
        with `pairs` the slowest link that a group uses counts: see `ratios`.

        Arguments as in `shares`. `seconds("all_to_all", n, 4, 2)`: four devices of each of two
        nodes.

        Args:
          nodes: the nodes of each group that does the same at the same time.
        """
        result, peers = [], self._peers(group)
        shares = self.shares(kind, operand_bytes, *group)
        ring = SAME.get(kind, kind) in RINGS
        ratios = self.ratios(SAME.get(kind, kind), nodes)
        for t, (number, wire_bytes) in enumerate(zip(peers, shares, strict=True)):
            tier = self.tiers[t]
            link = tier.links[LINKS.get(kind, kind)].times(*ratios[t])
            steps = math.prod(group) - 1 if ring else number
            starts = max(1.0, steps / max(1, tier.size - 1))
            result.append(link.seconds(wire_bytes, starts) if number else 0.0)
        return tuple(result)

    def ratios(self, kind: str, nodes: Groups) -> tuple[tuple[float, float], ...]:
        """Returns for each tier how a collective's start-up and time for bytes compare with it.

        A tier's links are those of a collective over all nodes, as slow as the slowest pair that
        it uses. A collective of other groups of nodes is as slow as the slowest that they use.
        1, 1 without a matrix, and where no group uses a tier.

        Args:
          nodes: groups of nodes; empty: all nodes.
        """
        if not nodes or not (self.pairs or self.pair_startup_s):
            return ((1.0, 1.0),) * len(self.tiers)
        if (kind, nodes) not in self._known_ratios:
            every = (tuple(range(self.nodes)),)
            usual = self._slowest(LINKS.get(kind, kind), every)
            own = self._slowest(kind, nodes)
            self._known_ratios[kind, nodes] = tuple(
                (late / late_usual, rate_usual / rate) if rate < math.inf else (1.0, 1.0)
                for (late_usual, rate_usual), (late, rate) in zip(usual, own, strict=True)
            )
        return self._known_ratios[kind, nodes]

    @cached_property
    def _known_ratios(self) -> dict[tuple[str, Groups], tuple[tuple[float, float], ...]]:
        return {}

    def _slowest(self, kind: str, nodes: Groups) -> list[tuple[float, float]]:
        """Returns the longest start-up and the lowest rate of the pairs used on each tier.

        A matrix that is missing counts as ones. The rate is infinite if no pair is used.
        """
        found = [(0.0, math.inf)] * len(self.tiers)
        for a, b in {link for group in nodes for link in links_of(kind, group)}:
            late = self.pair_startup_s[a][b] if self.pair_startup_s else 1.0
            rate = self.pairs[a][b] if self.pairs else 1.0
            t = self._tier_between(a, b)
            found[t] = max(found[t][0], late), min(found[t][1], rate)
        return found

    def _tier_between(self, a: int, b: int) -> int:
        """Returns the tier that joins two nodes: the fastest whose units hold both."""
        for t, size in enumerate(self.sizes[1:], 1):
            a, b = a // size, b // size
            if a == b:
                return t
        raise ValueError(f"no tier joins nodes of {self.name}")

    def groupings(self) -> list[Groups]:
        """Returns the ways to join nodes by fast links, all apart first: see `pairs.groupings`.

        Without a matrix the units of the tiers.
        """
        if self.pairs:
            return groupings(self.pairs)
        found = []
        for t in range(1, len(self.tiers) + 1):
            size = math.prod(self.sizes[1:t])
            starts = range(0, self.nodes, size)
            found.append(tuple(tuple(range(start, start + size)) for start in starts))
        return found

    def reordered(self, order: Sequence[int]) -> "Topology":
        """Returns the cluster with its nodes in another order. Tiers must not tell nodes apart."""

        def moved(matrix: Matrix) -> Matrix:
            return tuple(tuple(matrix[a][b] for b in order) for a in order) if matrix else ()

        return dataclasses.replace(
            self,
            pairs=moved(self.pairs),
            pair_startup_s=moved(self.pair_startup_s),
            node_names=tuple(self.node_names[node] for node in order) if self.node_names else (),
        )

    def name_of(self, node: int) -> str:
        """Returns a node's name, or its number."""
        return self.node_names[node] if self.node_names else str(node)

    def crossover(self) -> dict[str, tuple[tuple[int, str], ...]]:
        """Returns whether one flat collective, or one collective per tier, is faster.

        For an all-to-all and an all-reduce over the whole cluster: (bytes of a device's operand,
        the fastest method from there on), the first at the smallest size. flat: each device sends
        to every other. ring: one step per device, with as many rings as a node has devices.
        two_level: one collective per tier, so that fewer and larger messages cross slow links. A
        two-level all-reduce sums inside the node first.
        """
        found = {}
        for kind, flat in (("all_to_all", "flat"), ("all_reduce", "ring")):
            changes: list[tuple[int, str]] = []
            for size in SIZES:
                one_level = max(self.seconds(kind, size, *self.sizes))
                best = flat if one_level <= self._two_level(kind, size) else "two_level"
                if not changes or best != changes[-1][1]:
                    changes.append((size, best))
            found[kind] = tuple(changes)
        return found

    def slow_nodes(self) -> tuple[SlowNode, ...]:
        """Returns the nodes with less than `SLOW_BELOW` of the usual rate to or from most others.

        With two nodes it is the one that sends slower; if both are slow, none is reported.
        """
        count = len(self.pairs)
        rates = []
        for node in range(count):
            peers = [peer for peer in range(count) if peer != node]
            out = statistics.median_high([self.pairs[node][peer] for peer in peers])
            back = statistics.median_high([self.pairs[peer][node] for peer in peers])
            rates.append(min(out, back) if count > 2 else out)
        usual = statistics.median_high(rates) if rates else 0.0
        return tuple(
            SlowNode(node, self.name_of(node), rate, usual / rate)
            for node, rate in enumerate(rates)
            if rate < SLOW_BELOW * usual
        )

    def of_nodes(self, nodes: int) -> "Topology":
        """Returns the cluster with another number of nodes, without `pairs`.

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
        none: tuple = ()
        return dataclasses.replace(
            self, tiers=tiers, pairs=none, pair_startup_s=none, node_names=none, asymmetric=False
        )

    def group(self, inside: int, across: int) -> tuple[int, ...]:
        """Returns the group of `inside` devices on each of `across` nodes, for `seconds`."""
        if len(self.tiers) == 1:
            return (inside * across,)
        sizes = [inside]
        for tier in self.tiers[1:-1]:
            sizes.append(math.gcd(across, tier.size))
            across //= sizes[-1]
        return (*sizes, across)

    def _peers(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how many peers of the group a device reaches over each tier."""
        if not 0 < len(group) <= len(self.tiers):
            raise ValueError(f"a group {group} on {len(self.tiers)} tiers")
        group = (*group, *(1,) * (len(self.tiers) - len(group)))
        reached = [math.prod(group[:t]) for t in range(len(group) + 1)]
        return tuple(after - before for before, after in itertools.pairwise(reached))

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
    """Returns the same link for every kind of collective."""
    return dict.fromkeys(KINDS, link)


def names_of(nodes: Sequence[int], topology: Topology) -> str:
    """Returns the names of nodes as text."""
    return " ".join(map(topology.name_of, nodes))
