"""The peak memory of a schedule: of one device, and of its part of the host.

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
      arguments: bytes of the program's arguments in the device's memory.
      temporary: all other bytes there.
      by_scope: the temporary bytes, by the scope that wrote them.
      host_arguments, host_temporary: the same of the device's arrays in the host's memory.
    """

    arguments: int
    temporary: int
    by_scope: dict[str, int] = field(default_factory=dict)
    host_arguments: int = 0
    host_temporary: int = 0

    @property
    def bytes(self) -> int:
        """Arguments and temporaries in the device's memory."""
        return self.arguments + self.temporary

    @property
    def host_bytes(self) -> int:
        """Arguments and temporaries in the host's memory."""
        return self.host_arguments + self.host_temporary


def peak(schedule: Schedule, gradients: int = 0, *, replaces: bool = True) -> Peak:
    """Returns the peak memory of a program.

    Args:
      gradients: bytes of gradients on a device, which XLA holds a second time.
      replaces: whether the results take the place of the arguments, as in a step.
    """
    arguments = set(schedule.inputs)
    elsewhere = arguments | {b for b in schedule.outputs if b is not None and replaces}
    temporary, by_scope = _fullest(schedule, elsewhere)
    by_scope |= {AGAIN: gradients} if gradients else {}
    host_temporary = _fullest(schedule, elsewhere, on_host=True)[0]
    given, on_host = (
        sum(schedule.buffers[b] for b in arguments if (b in schedule.on_host) == here)
        for here in (False, True)
    )
    return Peak(given, temporary + gradients, by_scope, on_host, host_temporary)


def _fullest(
    schedule: Schedule, elsewhere: set[int], *, on_host: bool = False
) -> tuple[int, dict[str, int]]:
    """Returns the peak of one memory without the buffers `elsewhere`, in total and by scope."""
    sizes = [
        size if (b in schedule.on_host) == on_host else 0 for b, size in enumerate(schedule.buffers)
    ]
    last = _last_uses(schedule)
    alive: dict[int, str] = {}
    now = highest = 0
    by_scope: dict[str, int] = {}
    for index, op in enumerate(schedule.ops):
        new = {b for b in op.writes if b not in alive and b not in elsewhere}
        dying = {b for b in (*op.reads, *op.writes) if b in alive and last[b] == index}
        size = sum(sizes[b] for b in new)
        if op.kind == "region":
            size = max(0, size - sum(sizes[b] for b in dying))
        inside, scopes = _inside(op, on_host=on_host)
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


def _inside(op: Op, *, on_host: bool) -> tuple[int, dict[str, int]]:
    """Returns the peak of one trip of a loop, without its inputs."""
    if op.body is None:
        return 0, {}
    highest, scopes = _fullest(op.body, set(op.body.inputs), on_host=on_host)
    return highest * op.unrolled, {name: size * op.unrolled for name, size in scopes.items()}


def _last_uses(schedule: Schedule) -> dict[int, int]:
    """Returns the index of the last operation that uses each buffer; outputs last to the end."""
    last: dict[int, int] = {}
    for index, op in enumerate(schedule.ops):
        last |= dict.fromkeys((*op.reads, *op.writes), index)
    results = (b for b in schedule.outputs if b is not None)
    return last | dict.fromkeys(results, len(schedule.ops))
