"""Groups elementwise operations into regions, as a compiler fuses them, and orders everything.

A value's depth is the number of non-fusible operations on its longest path. Connected elementwise
operations of equal depth become one region. Equal depth excludes cycles: no operation between them
can be non-fusible. Values read only inside a region are never stored.
A value computed from inputs alone is computed at its first use, since its inputs stay alive anyway.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moejax.plan.trace.schedule import Op, Schedule


@dataclass(frozen=True)
class Node:
    """An operation before fusion.

    Attributes:
      op: the operation, without what it waits for, reads and writes.
      reads: (value, bytes of it that are read; None: all).
      writes: values.
      unread: share of its FLOPs and bytes that remains if nothing reads its first result.
    """

    op: Op
    reads: tuple[tuple[int, float | None], ...]
    writes: tuple[int, ...]
    unread: float = 1.0


class Storage:
    """Maps values to buffers, and buffers to sizes."""

    def __init__(self) -> None:
        self.buffer: list[int] = []  # buffer of each value
        self.sizes: list[int] = []  # bytes of each buffer
        self.on_host: set[int] = set()  # buffers in the host's memory

    def new(self, size: int, *, on_host: bool = False) -> int:
        """Returns a new value in a new buffer."""
        if on_host:
            self.on_host.add(len(self.sizes))
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
    inputs: Iterable[int],
    outputs: Sequence[int | None],
) -> Schedule:
    """Returns the schedule of the nodes that the outputs need. Takes nodes in program order."""
    results = [value for value in outputs if value is not None]
    nodes = _needed(nodes, results)
    maker = {value: number for number, node in enumerate(nodes) for value in node.writes}
    groups = _groups(nodes, maker)
    members: dict[int, list[Node]] = {}
    for node, group in zip(nodes, groups, strict=True):
        members.setdefault(group, []).append(node)
    read = {
        group: {value for node in own for value, _ in node.reads} for group, own in members.items()
    }
    needs = {
        group: sorted({groups[maker[value]] for value in values if value in maker} - {group})
        for group, values in read.items()
    }
    anchors = [group for group, node in zip(groups, nodes, strict=True) if node.op.kind != "region"]
    order = _order(
        needs, [*anchors, *(groups[maker[value]] for value in results if value in maker)]
    )
    position = {group: number for number, group in enumerate(order)}
    used = set(results)
    used |= {
        value
        for group, values in read.items()
        for value in values
        if value in maker and groups[maker[value]] != group
    }
    ops = []
    for group in order:
        after = tuple(sorted(position[need] for need in needs[group]))
        ops.append(replace(_joined(members[group], storage, used), after=after))
    return Schedule(
        ops=tuple(ops),
        buffers=tuple(storage.sizes),
        inputs=tuple(storage.buffer[value] for value in inputs),
        outputs=tuple(None if v is None else storage.buffer[v] for v in outputs),
        on_host=frozenset(storage.on_host),
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
        for value, _ in node.reads if node.op.kind == "region" else ():
            m = maker.get(value)
            if m is not None and nodes[m].op.kind == "region" and depth[m] == depth[number]:
                parent[root(m)] = root(number)
    return [root(number) for number in range(len(nodes))]


def _depths(nodes: Sequence[Node], maker: dict[int, int]) -> list[int]:
    """Returns the depth of each node, as the module's docstring defines it."""
    depth: list[int] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        makers = {maker[value] for value, _ in node.reads if value in maker}
        deepest = max((depth[m] for m in makers), default=0)
        depth.append(deepest + (node.op.kind != "region"))
        for m in makers:
            readers[m].append(number)
    for number in reversed(range(len(nodes))):
        if depth[number] == 0:
            least = (depth[r] - (nodes[r].op.kind != "region") for r in readers[number])
            depth[number] = min(least, default=0)
    return depth


def _order(needs: dict[int, list[int]], wanted: Sequence[int]) -> list[int]:
    """Returns the wanted groups and those that they need, each as late as its readers allow."""
    done: set[int] = set()
    order: list[int] = []
    for target in wanted:
        waiting = [target]
        while waiting:
            group = waiting[-1]
            missing = [need for need in needs[group] if need not in done]
            if group not in done and missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if group not in done:
                done.add(group)
                order.append(group)
    return order


def _joined(own: list[Node], storage: Storage, used: set[int]) -> Op:
    inside = {value for node in own for value in node.writes}
    taken: dict[int, float] = {}
    for node in own:
        for value, size in node.reads:
            if value not in inside:
                whole = float(storage.bytes(value))
                read = whole if size is None else size
                taken[value] = min(whole, taken.get(value, 0.0) + read)
    written = [value for node in own for value in node.writes if value in used]
    last, moved = own[-1], sum(taken.values()) + sum(map(storage.bytes, written))
    op = replace(
        last.op,
        reads=tuple(sorted({storage.buffer[value] for value in taken})),
        writes=tuple(sorted({storage.buffer[value] for value in written})),
        bytes=(last.op.bytes + moved) if last.op.blocks else (last.op.bytes or moved),
    )
    if op.kind == "region":
        return replace(
            op,
            passes=max(1, len(written)),
            exponentials=sum(node.op.exponentials for node in own),
            reduced=sum(node.op.reduced for node in own),
        )
    if last.unread != 1 and last.writes[0] not in used:
        return replace(op, flops=last.unread * op.flops, bytes=last.unread * op.bytes)
    return op
