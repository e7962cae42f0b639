"""Groups elementwise operations into regions, as a compiler fuses them, and orders everything.

A value's depth is the number of non-fusible operations on its longest path. Connected elementwise
operations of equal depth become one region. Equal depth excludes cycles: no operation between them
can be non-fusible. Values read only inside a region are never stored.
A value computed from inputs alone is computed at its first use, since its inputs stay alive anyway.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moejax.plan.trace.schedule import Collective, Kind, Op, Schedule


@dataclass
class Node:
    """An operation before fusion.

    Attributes:
      reads: (value, bytes of it that are read; None: all).
      writes: values.
      exponentials, reduced: as in `Op`.
      unread: share of its FLOPs and bytes that remains if nothing reads its first result.
    """

    kind: Kind
    scope: str
    backward: bool
    reads: tuple[tuple[int, float | None], ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = ""
    exponentials: float = 0.0
    reduced: float = 0.0
    scales_with_fill: bool = False
    blocks: tuple[int, int] | None = None
    unread: float = 1.0
    collective: Collective | None = None
    body: Schedule | None = None
    trip_count: int = 1
    unrolled: int = 1
    carried: tuple[tuple[int, int], ...] = ()


class Storage:
    """Maps values to buffers, and buffers to sizes."""

    def __init__(self) -> None:
        self.buffer: list[int] = []  # buffer of each value
        self.sizes: list[int] = []  # bytes of each buffer

    def new(self, size: int) -> int:
        """Returns a new value in a new buffer."""
        self.sizes.append(size)
        self.buffer.append(len(self.sizes) - 1)
        return len(self.buffer) - 1

    def alias(self, value: int) -> int:
        """Returns a new value in the buffer of `value`."""
        self.buffer.append(self.buffer[value])
        return len(self.buffer) - 1

    def resize(self, value: int, size: int) -> None:
        """Sets the size of the value's buffer."""
        self.sizes[self.buffer[value]] = size

    def bytes(self, value: int) -> int:
        """Size of the value's buffer."""
        return self.sizes[self.buffer[value]]


def fuse(
    nodes: Sequence[Node],
    storage: Storage,
    inputs: Iterable[int | None],
    outputs: Iterable[int | None],
) -> Schedule:
    """Returns the schedule of the nodes that the outputs need. Takes nodes in program order."""
    outputs = list(outputs)
    results = [value for value in outputs if value is not None]
    nodes = _needed(nodes, results)
    maker = {value: number for number, node in enumerate(nodes) for value in node.writes}
    groups = _groups(nodes, maker)
    order = _order(nodes, maker, groups, results)
    position = {group: number for number, group in enumerate(order)}
    members: dict[int, list[int]] = {group: [] for group in order}
    for number, group in enumerate(groups):
        if group in members:
            members[group].append(number)
    used = _used_outside(nodes, groups, maker, results)
    ops = []
    for group in order:
        own = [nodes[number] for number in members[group]]
        op = _op(own, storage, maker, groups, group, used)
        after = {
            position[groups[maker[value]]]
            for node in own
            for value, _ in node.reads
            if value in maker and groups[maker[value]] != group
        }
        ops.append(Op(after=tuple(sorted(after)), **op))
    return Schedule(
        ops=tuple(ops),
        buffers=tuple(storage.sizes),
        inputs=tuple(storage.buffer[value] for value in inputs if value is not None),
        outputs=tuple(None if v is None else storage.buffer[v] for v in outputs),
    )


def _needed(nodes: Sequence[Node], results: Sequence[int]) -> list[Node]:
    """Drops nodes whose values are never read, as a compiler does."""
    read, live = set(results), []
    for node in reversed(nodes):
        if not read.isdisjoint(node.writes):
            live.append(node)
            read.update(value for value, _ in node.reads)
    return live[::-1]


def _groups(nodes: Sequence[Node], maker: dict[int, int]) -> list[int]:
    """Returns the group of each node, named by a member; only region nodes share groups."""
    parent = list(range(len(nodes)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    depth = _depths(nodes, maker)
    for number, node in enumerate(nodes):
        for value, _ in node.reads if node.kind == "region" else ():
            m = maker.get(value)
            if m is not None and nodes[m].kind == "region" and depth[m] == depth[number]:
                parent[root(m)] = root(number)
    return [root(number) for number in range(len(nodes))]


def _depths(nodes: Sequence[Node], maker: dict[int, int]) -> list[int]:
    """Returns the depth of each node, as the module's docstring defines it."""
    depth: list[int] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        makers = {maker[value] for value, _ in node.reads if value in maker}
        deepest = max((depth[m] for m in makers), default=0)
        depth.append(deepest + (node.kind != "region"))
        for m in makers:
            readers[m].append(number)
    for number in reversed(range(len(nodes))):
        if depth[number] == 0:
            least = (depth[r] - (nodes[r].kind != "region") for r in readers[number])
            depth[number] = min(least, default=0)
    return depth


def _order(
    nodes: Sequence[Node], maker: dict[int, int], groups: list[int], results: Sequence[int]
) -> list[int]:
    """Returns the groups in a valid order, regions as late as their readers allow."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    needs = {
        group: sorted(
            {
                groups[maker[value]]
                for number in own
                for value, _ in nodes[number].reads
                if value in maker
            }
            - {group}
        )
        for group, own in members.items()
    }
    done: set[int] = set()
    order: list[int] = []
    anchors = [groups[n] for n, node in enumerate(nodes) if node.kind != "region"]
    wanted = anchors + [groups[maker[value]] for value in results if value in maker]
    for target in wanted:
        waiting = [target]
        while waiting:
            group = waiting[-1]
            if group in done:
                waiting.pop()
                continue
            missing = [need for need in needs[group] if need not in done]
            if missing:
                waiting += reversed(missing)
            else:
                done.add(group)
                order.append(group)
                waiting.pop()
    return order


def _used_outside(
    nodes: Sequence[Node], groups: list[int], maker: dict[int, int], results: Sequence[int]
) -> set[int]:
    """Returns the values that are outputs or that another group reads."""
    used = set(results)
    for number, node in enumerate(nodes):
        for value, _ in node.reads:
            if value in maker and groups[maker[value]] != groups[number]:
                used.add(value)
    return used


def _op(
    own: list[Node],
    storage: Storage,
    maker: dict[int, int],
    groups: list[int],
    group: int,
    used: set[int],
) -> dict[str, Any]:
    """Returns the fields of the operation that a group's nodes become."""
    taken: dict[int, float] = {}
    for node in own:
        for value, size in node.reads:
            if value in maker and groups[maker[value]] == group:
                continue
            whole = float(storage.bytes(value))
            taken[value] = min(whole, taken.get(value, 0.0) + (whole if size is None else size))
    written = [value for node in own for value in node.writes if value in used]
    last = own[-1]
    moved = sum(taken.values()) + sum(map(storage.bytes, written))
    fields: dict[str, Any] = {
        "kind": last.kind,
        "scope": last.scope,
        "backward": last.backward,
        "reads": tuple(sorted({storage.buffer[value] for value in taken})),
        "writes": tuple(sorted({storage.buffer[value] for value in written})),
        "bytes": (last.bytes + moved) if last.blocks else (last.bytes or moved),
    }
    if last.kind == "region":
        return fields | {
            "passes": max(1, len(written)),
            "exponentials": sum(node.exponentials for node in own),
            "reduced": sum(node.reduced for node in own),
        }
    if last.unread != 1 and last.writes[0] not in used:
        last = replace(last, flops=last.unread * last.flops)
        fields["bytes"] *= last.unread
    names = ("flops", "dtype", "scales_with_fill", "blocks", "collective")
    names += ("body", "trip_count", "unrolled", "carried")
    return fields | {name: getattr(last, name) for name in names}
