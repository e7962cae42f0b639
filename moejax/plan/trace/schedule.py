"""The step as a schedule: operations of one device, and their dependencies.

`plan.trace.reader` makes it from the traced program. All prices, counts and
drawings come from it, so no formula can drift from the code.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

# How an operation spends its time.
#   product     matrix products: FLOPs
#   region      elementwise work that a compiler fuses: bytes read and written once
#   gather      rows by index, sorts: bytes, slower than a copy
#   write       a part of an array, in place: bytes, like a copy
#   collective  bytes on a link
#   to_device, from_device  bytes between the memory of the host and the device's
#   loop        its body, `trip_count` times
#   join        no time: it waits for all its operands
Kind = Literal[
    "product",
    "region",
    "gather",
    "write",
    "collective",
    "to_device",
    "from_device",
    "loop",
    "join",
]
COPIES = ("to_device", "from_device")

# Classes of traffic, as the program's scopes name them; traffic outside of them is small.
TRAFFIC = (
    "dense_gradient",
    "expert_gradient",
    "dispatch",
    "combine",
    "dispatch_backward",
    "combine_backward",
    "weights",
    "stage",
    "stage_gradient",
    "activations",
    "context",
    "routing",
    "loss",
    "update",
    "outer",
)


@dataclass(frozen=True)
class Collective:
    """A collective of the program.

    Attributes:
      kind: a name from `comm.wire`.
      bytes: size of one device's operand (all_gather: of its result) in one call.
      traffic: its class, one of `TRAFFIC`; or empty.
      senders: of a ppermute, the places along the axes that send; else empty: all do.
      beside: whether it is an all-gather that a program on CPU waits for where it uses the result,
        as it does for every ppermute.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    calls: int
    traffic: str = ""
    senders: tuple[int, ...] = ()
    beside: bool = False


@dataclass(frozen=True)
class Op:
    """One operation of a device.

    Attributes:
      scope: innermost named scope ("attention", "experts").
      backward: whether it belongs to the backward pass.
      after: indices of the operations that it waits for.
      reads, writes: indices of buffers.
      flops: FLOPs of a product.
      bytes: bytes read and written in memory; of a copy between memories, each counted once.
      dtype: dtype of a product's operands.
      passes: arrays that a region writes; each is one loop over memory.
      exponentials: values of exponentials and the like that a region computes.
      reduced: values that its sums and maxima go over.
      scales_with_fill: whether FLOPs and bytes are for full buckets; the filled share scales them.
      blocks: (rows, groups) of a bucket buffer whose groups are computed in whole blocks.
      body: one iteration of a loop, or `unrolled` iterations that may overlap.
      trip_count: how often a loop's body runs; a mean, where data decide.
      carried: pairs (buffer that an iteration reads, buffer with the next iteration's value).
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
    exponentials: float = 0.0
    reduced: float = 0.0
    scales_with_fill: bool = False
    blocks: tuple[int, int] | None = None
    collective: Collective | None = None
    body: "Schedule | None" = None
    trip_count: float = 1
    unrolled: int = 1
    carried: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Operations in an order in which a device can run them.

    Attributes:
      buffers: bytes of each buffer; several values can share one.
      inputs, outputs: indices of buffers; None for a constant output.
      on_host: indices of the buffers that lie in the host's memory.
    """

    ops: tuple[Op, ...]
    buffers: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int | None, ...] = ()
    on_host: frozenset[int] = frozenset()


def walk(schedule: Schedule, times: float = 1) -> Iterator[tuple[Op, float]]:
    """Yields every operation but loops, with how often a step runs it."""
    for op in schedule.ops:
        if op.body is None:
            yield op, times
        else:
            yield from walk(op.body, times * op.trip_count * op.unrolled)


def collectives_of(schedule: Schedule) -> list[Collective]:
    """Returns every collective, in order, with its calls a step."""
    return [
        replace(op.collective, calls=round(times))
        for op, times in walk(schedule)
        if op.collective is not None
    ]
