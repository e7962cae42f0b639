"""The step as a schedule: what one device computes and sends, and what each of these waits for.

`plan.trace.reader` makes it from the traced program. Everything that is priced, counted or drawn is
read from here, so that no formula can drift from the code.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

# How an operation spends its time.
#   product     matrix products: FLOPs
#   region      elementwise work that a compiler fuses: bytes read and written once
#   gather      rows by index, sorts, writes in place: bytes, slower than a copy
#   collective  bytes on a link
#   loop        its body, so many times
#   join        nothing: it waits for all its operands
Kind = Literal["product", "region", "gather", "collective", "loop", "join"]

# Classes of traffic, as the program names them; what is in none of them is small.
TRAFFIC = (
    "dense_gradient",
    "expert_gradient",
    "dispatch",
    "combine",
    "dispatch_backward",
    "combine_backward",
    "weights",
    "activations",
    "routing",
    "loss",
    "update",
)


@dataclass(frozen=True)
class Collective:
    """A collective of the program.

    Attributes:
      kind: as in `comm.wire`.
      axes: mesh axes.
      dtype: of what is sent.
      bytes: of one device's operand (all_gather: of its result), one call.
      calls: how often a step issues it.
      traffic: its class, of `TRAFFIC`; empty for none.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    calls: int
    traffic: str = ""


@dataclass(frozen=True)
class Op:
    """One operation of a device.

    Attributes:
      scope: where in the program it stands ("attention", "experts").
      backward: whether it belongs to the backward pass.
      after: operations that must be done, by their place in the schedule.
      reads, writes: buffers, by number.
      flops: of a product.
      bytes: read and written in memory.
      dtype: of a product's operands.
      passes: of a region: arrays it writes, each of which is a loop over memory to start.
      work: whether its FLOPs and bytes are those of full buckets of rows; what is filled counts.
      blocks: (rows, groups) of such a buffer, where each group's rows are computed in whole blocks.
      body: of a loop: one iteration, or `unrolled` iterations that may overlap.
      trip_count: of a loop: how often its body runs, one run after the other.
      carried: of a loop: (buffer that an iteration reads, buffer of the value for the next one).
    """

    kind: Kind
    scope: str = ""
    backward: bool = False
    after: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = ""
    passes: int = 1
    work: bool = False
    blocks: tuple[int, int] | None = None
    collective: Collective | None = None
    body: "Schedule | None" = None
    trip_count: int = 1
    unrolled: int = 1
    carried: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Operations in an order in which a device can run them.

    Attributes:
      buffers: bytes of each; several values can share one.
      inputs, outputs: buffers; None where a result is a constant.
    """

    ops: tuple[Op, ...]
    buffers: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int | None, ...] = ()


def walk(schedule: Schedule, times: int = 1) -> Iterator[tuple[Op, int]]:
    """Every operation but loops, with how often a step runs it."""
    for op in schedule.ops:
        if op.body is None:
            yield op, times
        else:
            yield from walk(op.body, times * op.trip_count * op.unrolled)


def collectives_of(schedule: Schedule) -> list[Collective]:
    """Every collective, in order, with its calls a step."""
    return [
        replace(op.collective, calls=times)
        for op, times in walk(schedule)
        if op.collective is not None
    ]
