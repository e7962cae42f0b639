"""Reads a compiled program: its collectives, and the computation that overlaps them.

The text of a compiled program lists each computation's instructions in the order in which the
device starts them. An asynchronous collective has a start and a done instruction and overlaps the
instructions between them; a synchronous one blocks. The walk enters loops (counted once per trip)
and calls; of a conditional it reads the first branch, as `plan.trace.reader` does.

A schedule is written in letters, in that order, and other instructions are left out:

    S D  start and done of an all-to-all    A  a synchronous all-to-all
    s d  of any other collective            a  any other synchronous collective
    G    a matrix product, or a kernel with products inside
    W C  a while loop, a conditional with products inside

So `SSGGDD` is two exchanges behind two products, and `GGASD` hides nothing.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from moejax.aot.hlo import (
    KINDS,
    ON_HOST,
    Instruction,
    arrays_of,
    computations,
    kind_of,
    origin_of,
    replica_groups,
)

DTYPES = {"f32": "float32", "bf16": "bfloat16", "s32": "int32", "u8": "uint8", "u16": "uint16"}
# Library calls and hand-written kernels that multiply matrices.
PRODUCT_TARGETS = re.compile(
    r'custom_call_target="(__cublas|__cudnn|mosaic_gpu|tpu_custom_call|__op\$triton)'
)


@dataclass(frozen=True)
class CompiledCollective:
    """One array in a collective of the compiled program. Several may share one launch.

    Attributes:
      kind: a name from `comm.wire`; a maximum counts as all_reduce.
      axes: mesh axes of more than one device; ("?",) for groups that are no axes of the mesh.
      dtype: dtype of the operand.
      bytes: size of one device's operand (all_gather: of its result) in one call.
      calls: calls in a step.
      asynchronous: whether it has a start and a done instruction.
      hides: whether it overlaps a matrix product.
      backward: whether it is in the backward pass.
      launch: name of the instruction that issues it.
      beside: launches of all-to-alls that are in flight at the same time, in any computation.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    calls: int
    asynchronous: bool
    hides: bool
    backward: bool
    launch: str
    beside: tuple[str, ...] = ()

    def wire_bytes(self, sizes: Mapping[str, int]) -> float:
        """Bytes that a device sends in a step, with collectives as rings.

        Args:
          sizes: sizes of the mesh axes. Groups that match no axes count as large.
        """
        passes = 2 if self.kind == "all_reduce" else 1
        if self.kind != "ppermute" and "?" not in self.axes:
            devices = math.prod(sizes[axis] for axis in self.axes)
            passes *= (devices - 1) / devices
        return self.calls * self.bytes * passes


@dataclass(frozen=True)
class HostCopy:
    """A copy between the memories of host and device.

    Attributes:
      to_device: its direction.
      bytes: of a call.
      calls: calls in a step.
      hides: whether it overlaps a matrix product.
    """

    to_device: bool
    bytes: int
    calls: int
    hides: bool


@dataclass(frozen=True)
class ScheduleText:
    """The letters of one computation; `calls` is how often a step runs it."""

    name: str
    calls: int
    letters: str


class CompiledText:
    """The text of a compiled program on a mesh.

    Args:
      text: the result of `Compiled.as_text()`.
      axes: name and size of each mesh axis, slowest first; devices are numbered in mesh order.
    """

    def __init__(self, text: str, axes: Mapping[str, int]):
        self.axes = dict(axes)
        self.computations, self.entry = computations(text)
        self._with_products: dict[str, bool] = {}

    @cached_property
    def calls(self) -> dict[str, int]:
        """Number of runs of each computation in a step."""
        return self.runs(lambda _: True)

    def runs(self, enters: Callable[[Instruction], bool]) -> dict[str, int]:
        """Returns the number of runs in a step of computations that such instructions call."""
        total: dict[str, int] = {}
        waiting = [(self.entry, 1)]
        while waiting:
            name, times = waiting.pop()
            total[name] = total.get(name, 0) + times
            for line in filter(enters, self.computations.get(name, [])):
                inner = times * (line.trips if line.op == "while" else 1)
                waiting += [(called, inner) for called in line.called]
        return total

    def exchanges(self) -> list[CompiledCollective]:
        """Every array that a collective moves."""
        return [
            exchange
            for name, lines in self._schedules.items()
            for index in range(len(lines))
            for exchange in self._exchanges(name, index)
        ]

    def copies(self) -> list[HostCopy]:
        """Every copy between host and device that has a start and a done instruction."""
        found = []
        for name, lines in self._schedules.items():
            for index, line in enumerate(lines):
                if line.op.endswith("-start") and ON_HOST in line.result:
                    arrays = [array for array in line.arrays if array.shape]
                    here = [array for array in arrays if not array.on_host]
                    # A copy's result comes first, that of a fusion last.
                    result = arrays[0 if line.op == "copy-start" else -1]
                    size = max(array.bytes for array in here)
                    between = lines[index + 1 : self._ends[name][index]]
                    hides = any(map(self.multiplies, between))
                    found.append(HostCopy(not result.on_host, size, self.calls[name], hides))
        return found

    def _beside(self, name: str, index: int) -> tuple[str, ...]:
        """Returns the all-to-alls in flight at the same time as an instruction's collective."""
        lines, ends = self._schedules[name], self._ends[name]
        names: list[str] = []
        for position, line in enumerate(lines):
            if position != index and position < ends[index] and ends[position] > index:
                names += self._launches(line)
        return tuple(names)

    def _launches(self, line: Instruction) -> list[str]:
        """Returns the all-to-alls that an instruction, or a computation it calls, starts."""
        if line.op.endswith(("-done", "-update")):
            return []
        if (issued := self.issued(line)) is not None:
            return [line.name] if kind_of(issued.op) == "all-to-all" else []
        inner = (one for name in line.called for one in self._schedules.get(name, []))
        return [launch for one in inner for launch in self._launches(one)]

    @cached_property
    def _ends(self) -> dict[str, list[int]]:
        """For each computation, the index of the done instruction of each instruction."""
        return {
            name: [self._end(lines, index) for index in range(len(lines))]
            for name, lines in self._schedules.items()
        }

    @cached_property
    def _outside(self) -> dict[str, tuple[str, ...]]:
        """For each computation, the all-to-alls of its callers that are in flight while it runs."""
        outside: dict[str, tuple[str, ...]] = {}
        waiting: list[tuple[str, tuple[str, ...]]] = [(self.entry, ())]
        while waiting:
            name, around = waiting.pop()
            outside[name] = outside.get(name, ()) + around
            for index, line in enumerate(self._schedules.get(name, [])):
                if line.op in ("while", "conditional", "call"):
                    beside = around + self._beside(name, index)
                    own = set(self._launches(line))
                    waiting += [
                        (called, tuple(neighbour for neighbour in beside if neighbour not in own))
                        for called in line.called
                    ]
        return outside

    def schedules(self) -> list[ScheduleText]:
        """The schedule of each computation that communicates, in the order of the text."""
        texts = [
            ScheduleText(name, self.calls[name], "".join(map(self._letter, lines)))
            for name, lines in self._schedules.items()
        ]
        return [schedule for schedule in texts if re.search("[SAsa]", schedule.letters)]

    @cached_property
    def _schedules(self) -> dict[str, list[Instruction]]:
        """The computations that a step runs, without those inside fusions."""
        return {
            name: lines
            for name, lines in self.computations.items()
            if name in self.calls and name not in self._wrapped
        }

    @cached_property
    def _wrapped(self) -> dict[str, Instruction]:
        """The collective inside each computation that a fusion or an asynchronous start runs."""
        wrapped = {}
        for line in itertools.chain.from_iterable(self.computations.values()):
            if line.op == "fusion" or line.op.endswith("-start"):
                for name in line.called:
                    lines = self.computations.get(name, [])
                    for inner in lines:
                        if kind_of(inner.op):
                            wrapped[name] = _scattered(inner, lines)
        return wrapped

    def issued(self, line: Instruction) -> Instruction | None:
        """Returns the collective that an instruction is or starts; None for others."""
        if kind_of(line.op):
            return line
        return next((self._wrapped[name] for name in line.called if name in self._wrapped), None)

    def multiplies(self, line: Instruction) -> bool:
        """Returns whether an instruction is or calls a matrix product, in any branch."""
        if line.op in ("dot", "ragged-dot", "convolution") or PRODUCT_TARGETS.search(line.rest):
            return True
        inner = line.called
        for branches in re.findall(r"(?:branch_computations=\{|_computation=)([^}]*)", line.rest):
            inner = inner + re.findall(r"%([\w.\-]+)", branches)
        return any(self._has_product(name) for name in inner)

    def _has_product(self, name: str) -> bool:
        if name not in self._with_products:
            lines = self.computations.get(name, [])
            self._with_products[name] = any(self.multiplies(line) for line in lines)
        return self._with_products[name]

    def _letter(self, line: Instruction) -> str:
        if line.op.endswith("-done"):
            line = self._starts.get(origin_of(line, self._starts), line)
            start, alone = "D", "d"
        else:
            start, alone = ("S", "s") if line.op.endswith("-start") else ("A", "a")
        issued = self.issued(line)
        if issued is not None:
            return start if kind_of(issued.op) == "all-to-all" else alone
        if start == "A" and self.multiplies(line):
            return {"while": "W", "conditional": "C"}.get(line.op, "G")
        return ""

    @cached_property
    def _starts(self) -> dict[str, Instruction]:
        """Returns the instructions that start a collective or pass on its handle, by name."""
        lines = itertools.chain.from_iterable(self.computations.values())
        return {line.name: line for line in lines if line.op.endswith(("-start", "-update"))}

    def _exchanges(self, name: str, index: int) -> Iterator[CompiledCollective]:
        """Yields an exchange for each array that an instruction of a computation moves."""
        lines = self._schedules[name]
        line, between = lines[index], lines[index + 1 : self._ends[name][index]]
        if (issued := self.issued(line)) is None:
            return
        axes, kind = self._axes_of(issued.rest), issued.op.removesuffix("-start")
        beside = self._beside(name, index) + self._outside.get(name, ())
        group = math.prod(self.axes.get(axis, 1) for axis in axes)
        for dtype, size in arrays_of(issued, kind, group):
            yield CompiledCollective(
                kind=KINDS[kind],
                axes=axes,
                dtype=DTYPES.get(dtype, dtype),
                bytes=size,
                calls=self.calls[name],
                asynchronous=line.op.endswith("-start"),
                hides=any(self.multiplies(instruction) for instruction in between),
                backward="transpose(" in line.rest,
                launch=line.name,
                beside=beside,
            )

    def _end(self, lines: list[Instruction], index: int) -> int:
        """Returns the index of an instruction's done; for a synchronous one the next index."""
        if not lines[index].op.endswith("-start"):
            return index + 1
        ends = (
            number
            for number, line in enumerate(lines[index + 1 :], index + 1)
            if line.op.endswith("-done") and origin_of(line, self._starts) == lines[index].name
        )
        return next(ends, len(lines))

    def _axes_of(self, attributes: str) -> tuple[str, ...]:
        named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
        if named:
            names = re.findall(r"'(\w+)'", named[2])
            if all(axis in self.axes for axis in names):
                return tuple(axis for axis in names if self.axes[axis] > 1)
            # Axes that the compiler made itself, such as one of all devices.
            made = re.findall(r"'(\w+)'=(\d+)", named[1])
            sizes = tuple((axis, int(size)) for axis, size in made)
            return self._axes_of_groups(_groups_along(tuple(names), sizes))
        return self._axes_of_groups(replica_groups(attributes, math.prod(self.axes.values())))

    def _axes_of_groups(self, groups: frozenset[frozenset[int]]) -> tuple[str, ...]:
        names = [axis for axis, size in self.axes.items() if size > 1]
        for count in range(len(names) + 1):
            for chosen in itertools.combinations(names, count):
                if _groups_along(chosen, tuple(self.axes.items())) == groups:
                    return chosen
        return ("?",)


def _scattered(line: Instruction, lines: list[Instruction]) -> Instruction:
    """Rewrites an all-reduce that is fused with a slice of its result as a reduce-scatter.

    TPUs have one kernel for both texts: the same emitter (SingleInputAllReduceScatterFusion) and
    ring stand in the backend's config of a reduce-scatter and of such a fusion.
    """
    slices = (other for other in lines if other.op == "dynamic-slice")
    part = next((other for other in slices if other.first_operand == line.name), None)
    if line.op != "all-reduce" or part is None:
        return line
    return replace(line, op="reduce-scatter", result=part.result)


@lru_cache
def _groups_along(
    chosen: tuple[str, ...], axes: tuple[tuple[str, int], ...]
) -> frozenset[frozenset[int]]:
    names, sizes = zip(*axes, strict=True)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    positions = [names.index(axis) for axis in chosen]
    count = math.prod(sizes[position] for position in positions)
    ids = np.moveaxis(ids, positions, range(-len(positions), 0)).reshape(-1, count)
    return frozenset(frozenset(group) for group in ids.tolist())
