"""How much memory a device needs: the most that lives at one time, read from the schedule.

Buffers live from the first operation that writes them to the last that reads them. What is given
to the step is given away, so that its results take its place; what is given to evaluation and to
sampling stays. A region may write over what it is the last to read.

XLA holds gradients twice: a loop over layers stacks them in the layout that its reductions leave,
and the update reads them in that of the parameters. Source: the buffers of steps compiled for
H200s, `benchmarks/aot.py`.
"""

from collections import Counter
from dataclasses import dataclass, field

from moejax.plan.trace.schedule import Op, Schedule

AGAIN = "gradients again"


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a schedule. Bytes of one device.

    Attributes:
      arguments: what is given.
      temporary: everything else.
      by_scope: the temporary bytes, by the scope that wrote them.
    """

    arguments: int
    temporary: int
    by_scope: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.arguments + self.temporary


def peak(schedule: Schedule, gradients: int = 0, *, replaces: bool = True) -> Peak:
    """Returns the fullest moment of a program.

    Args:
      gradients: bytes of them on a device, which are held a second time.
      replaces: whether its results take the place of what it is given, as those of a step do.
    """
    given = set(schedule.inputs)
    replacing = {b for b in schedule.outputs if b is not None and replaces}
    temporary, by_scope = _fullest(schedule, given | replacing)
    by_scope |= {AGAIN: gradients} if gradients else {}
    return Peak(sum(schedule.buffers[b] for b in given), temporary + gradients, by_scope)


def _fullest(schedule: Schedule, elsewhere: set[int]) -> tuple[int, dict[str, int]]:
    """The most bytes alive, and their scopes, not counting the buffers `elsewhere`."""
    sizes, last = schedule.buffers, _last_uses(schedule)
    alive: dict[int, str] = {}
    now = highest = 0
    found: dict[str, int] = {}
    for place, op in enumerate(schedule.ops):
        new = {b for b in op.writes if b not in alive and b not in elsewhere}
        dying = {b for b in (*op.reads, *op.writes) if b in alive and last[b] == place}
        size = sum(sizes[b] for b in new)
        if op.kind == "region":
            size = max(0, size - sum(sizes[b] for b in dying))
        inside, scopes = _inside(op)
        if now + size + inside > highest:
            highest = now + size + inside
            found = _by_scope(alive, sizes, scopes)
            found[op.scope] = found.get(op.scope, 0) + size
        for b in new:
            alive[b] = op.scope
            now += sizes[b]
        for b in dying | {b for b in new if last[b] == place}:
            now -= sizes[b]
            del alive[b]
    return highest, found


def _inside(op: Op) -> tuple[int, dict[str, int]]:
    """What a turn of a loop needs beside what it is given."""
    if op.body is None:
        return 0, {}
    highest, scopes = _fullest(op.body, set(op.body.inputs))
    return highest * op.unrolled, {name: size * op.unrolled for name, size in scopes.items()}


def _last_uses(schedule: Schedule) -> dict[int, int]:
    """The place of the last operation that uses each buffer; results are used at the end."""
    last: dict[int, int] = {}
    for place, op in enumerate(schedule.ops):
        last |= dict.fromkeys((*op.reads, *op.writes), place)
    kept = (b for b in schedule.outputs if b is not None)
    return last | dict.fromkeys(kept, len(schedule.ops))


def _by_scope(alive: dict[int, str], sizes: tuple[int, ...], more: dict[str, int]) -> dict:
    total: Counter[str] = Counter(more)
    for b, scope in alive.items():
        total[scope] += sizes[b]
    return dict(total)
