"""The peak memory of a schedule on one device.

A buffer is alive from the first operation that writes it to the last that reads it. The step's
arguments are donated, so its results take their place; evaluation and sampling keep theirs. A
region may overwrite a buffer that it reads last.

XLA holds gradients twice. A loop over layers stacks them in the layout of its reductions, and the
update reads them in the layout of the parameters. Source: the buffers of steps compiled for
H200s, `benchmarks/aot.py`.
"""

from collections import Counter
from dataclasses import dataclass, field

from moejax.plan.trace.schedule import Op, Schedule

AGAIN = "second copy of gradients"


@dataclass(frozen=True)
class Peak:
    """Peak memory of a schedule, in bytes of one device.

    Attributes:
      arguments: bytes of the program's arguments.
      temporary: all other bytes.
      by_scope: the temporary bytes, by the scope that wrote them.
    """

    arguments: int
    temporary: int
    by_scope: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Arguments and temporaries."""
        return self.arguments + self.temporary


def peak(schedule: Schedule, gradients: int = 0, *, replaces: bool = True) -> Peak:
    """Returns the peak memory of a program.

    Args:
      gradients: bytes of gradients on a device, which XLA holds a second time.
      replaces: whether the results take the place of the arguments, as in a step.
    """
    arguments = set(schedule.inputs)
    replacing = {b for b in schedule.outputs if b is not None and replaces}
    temporary, by_scope = _fullest(schedule, arguments | replacing)
    by_scope |= {AGAIN: gradients} if gradients else {}
    return Peak(sum(schedule.buffers[b] for b in arguments), temporary + gradients, by_scope)


def _fullest(schedule: Schedule, elsewhere: set[int]) -> tuple[int, dict[str, int]]:
    """Returns the peak without the buffers `elsewhere`, in total and by scope."""
    sizes, last = schedule.buffers, _last_uses(schedule)
    alive: dict[int, str] = {}
    now = highest = 0
    by_scope: dict[str, int] = {}
    for index, op in enumerate(schedule.ops):
        new = {b for b in op.writes if b not in alive and b not in elsewhere}
        dying = {b for b in (*op.reads, *op.writes) if b in alive and last[b] == index}
        size = sum(sizes[b] for b in new)
        if op.kind == "region":
            size = max(0, size - sum(sizes[b] for b in dying))
        inside, scopes = _inside(op)
        if now + size + inside > highest:
            highest, total = now + size + inside, Counter(scopes)
            for b, scope in alive.items():
                total[scope] += sizes[b]
            total[op.scope] += size
            by_scope = dict(total)
        for b in new:
            alive[b] = op.scope
            now += sizes[b]
        for b in dying | {b for b in new if last[b] == index}:
            now -= sizes[b]
            del alive[b]
    return highest, by_scope


def _inside(op: Op) -> tuple[int, dict[str, int]]:
    """Returns the peak of one trip of a loop, without its inputs."""
    if op.body is None:
        return 0, {}
    highest, scopes = _fullest(op.body, set(op.body.inputs))
    return highest * op.unrolled, {name: size * op.unrolled for name, size in scopes.items()}


def _last_uses(schedule: Schedule) -> dict[int, int]:
    """Returns the index of the last operation that uses each buffer; outputs last to the end."""
    last: dict[int, int] = {}
    for index, op in enumerate(schedule.ops):
        last |= dict.fromkeys((*op.reads, *op.writes), index)
    results = (b for b in schedule.outputs if b is not None)
    return last | dict.fromkeys(results, len(schedule.ops))
