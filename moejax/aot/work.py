"""A device's work in a step, read from the compiled program.

Products and their FLOPs, kernels launched, memory traffic, loops. The walk follows
`compiled.CompiledText`: a loop's body counts once a trip, and of a conditional only the first
branch is read. Only the table of classes depends on moejax, so programs of other trainers are read
alike.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from moejax.aot.compiled import CompiledText
from moejax.aot.hlo import ArrayType, Instruction, kind_of
from moejax.aot.products import product_flops
from moejax.aot.traffic import body_bytes

# Class of a product -> pattern for the target of its call, or else for the names of its scopes. The
# first match counts; a product without a match is of the class "rest".
Classes = Mapping[str, str]
CLASSES: Classes = {
    "attention": r"^__cudnn\$fmha|\bsplash_m",
    "experts": r"^mosaic_gpu|\bexperts\b",
    "projections": r"\battention\b",
    "logits": r"\bloss\b|\blogits\b",
}

# Instructions without a kernel: they name, bundle or order values, or run other computations.
WITHOUT_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
WITHOUT_KERNEL |= {"while", "conditional", "call", "opt-barrier", "add-dependency"}
FUSIONS = ("fusion", "fusion-start")
# Custom calls that mark or reserve, and run nothing.
MARKS = ("AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
MARKS += ("AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked")


@dataclass(frozen=True)
class Kernel:
    """A kernel of the program, or a call of a library, which may launch several.

    Attributes:
      calls: launches in a step.
      bytes: bytes read from memory and written to it in one call; 0 for collectives.
      flops: FLOPs of its products in one call: (class, whether rows have groups) -> FLOPs over
        whole buffers.
      collective: whether it moves data between devices.
      label: names of the source's scopes and of the operation.
    """

    name: str
    calls: int
    bytes: int
    flops: Mapping[tuple[str, bool], float]
    collective: bool
    label: str


@dataclass(frozen=True)
class Work:
    """A device's work in a step.

    Attributes:
      flops: FLOPs by class; products of groups count the filled share of their buffers.
      most_flops: FLOPs by class; products of groups count whole buffers.
      launches: kernels, library calls and collectives started.
      loops: loops entered; iterations: runs of their bodies.
      uncounted: loops entered whose trip count is unknown, and taken as one.
      other_bytes: bytes read and written by kernels that are neither products nor collectives.
    """

    flops: dict[str, float] = field(default_factory=dict)
    most_flops: dict[str, float] = field(default_factory=dict)
    launches: int = 0
    loops: int = 0
    iterations: int = 0
    uncounted: int = 0
    conditionals: int = 0
    other_bytes: int = 0


def measure_work(text: CompiledText, *, filled: float = 1.0, classes: Classes = CLASSES) -> Work:
    """Returns a device's work in a step.

    Args:
      filled: share of the rows in the buffers of grouped products that are filled.
    """
    reader = KernelReader(text, classes)
    kernels = reader.kernels()
    flops: dict[str, float] = {}
    most: dict[str, float] = {}
    for kernel in kernels:
        for (name, grouped), number in kernel.flops.items():
            total = kernel.calls * number
            most[name] = most.get(name, 0) + total
            flops[name] = flops.get(name, 0) + total * (filled if grouped else 1)
    others = (k for k in kernels if not k.flops and not k.collective)
    return Work(
        flops=flops,
        most_flops=most,
        launches=sum(kernel.calls for kernel in kernels),
        other_bytes=sum(kernel.calls * kernel.bytes for kernel in others),
        **reader.control(),
    )


class KernelReader:
    """Walks the computations that run as sequences of kernels."""

    def __init__(self, text: CompiledText, classes: Classes = CLASSES):
        self.text = text
        self.classes = {name: re.compile(pattern) for name, pattern in classes.items()}

    @cached_property
    def runs(self) -> dict[str, int]:
        """Number of runs in a step of each computation whose instructions are kernels."""
        flow = ("while", "conditional", "call")
        return self.text.runs(lambda line: line.op in flow or self._starts_others(line))

    def _starts_others(self, line: Instruction) -> bool:
        return line.op in ("async-start", "call-start") and self.text.issued(line) is None

    def control(self) -> dict[str, int]:
        """Loops and conditionals of a step."""
        found: Counter[str] = Counter(loops=0, iterations=0, uncounted=0, conditionals=0)
        for name, times in self.runs.items():
            for line in self.text.computations.get(name, []):
                if line.op == "while":
                    found["loops"] += times
                    found["iterations"] += times * line.trips
                    found["uncounted"] += times * ("known_trip_count" not in line.rest)
                found["conditionals"] += times * (line.op == "conditional")
        return dict(found)

    def kernels(self) -> list[Kernel]:
        """Every kernel that a step launches, in the order of the text."""
        result = []
        for name, lines in self.text.computations.items():
            if name in self.runs:
                arrays = _arrays(lines)
                result += [
                    self._kernel(line, arrays, self.runs[name])
                    for line in lines
                    if self._launches(line)
                ]
        return result

    def _launches(self, line: Instruction) -> bool:
        silent = line.op in WITHOUT_KERNEL or line.op.endswith(("-done", "-update"))
        marks = line.op == "custom-call" and line.target in MARKS
        return not (silent or marks or self._starts_others(line))

    def _kernel(self, line: Instruction, arrays: Mapping[str, ArrayType], calls: int) -> Kernel:
        collective = kind_of(line.op) is not None or self.text.issued(line) is not None
        flops: dict[tuple[str, bool], float] = {}
        size = 0
        if not collective:
            for label, number, grouped in self._products(line, arrays):
                key = self._class_of(label), grouped
                flops[key] = flops.get(key, 0) + number
            size = self._bytes(line, arrays)
        return Kernel(line.name, calls, size, flops, collective, line.label)

    def _products(
        self, line: Instruction, arrays: Mapping[str, ArrayType]
    ) -> Iterator[tuple[str, float, bool]]:
        """Yields target or label, FLOPs, and whether rows have groups, of each product inside."""
        operands = [arrays[name] for name in line.operands if name in arrays]
        flops, grouped = product_flops(line, operands)
        if flops:
            yield f"{line.target} {line.label}", flops, grouped
        if line.op in FUSIONS:
            for name in line.called:
                lines = self.text.computations.get(name, [])
                inside = _arrays(lines)
                for inner in lines:
                    yield from self._products(inner, inside)

    def _class_of(self, label: str) -> str:
        found = (name for name, pattern in self.classes.items() if pattern.search(label))
        return next(found, "rest")

    def _bytes(self, line: Instruction, arrays: Mapping[str, ArrayType]) -> int:
        if line.op == "copy-start":
            return sum(array.memory_bytes for array in line.arrays[:2])
        if line.op == "slice-start":  # reads as much as it writes
            whole, part = line.arrays[:2]
            return part.memory_bytes + (0 if whole.local else part.bytes)
        if line.op in FUSIONS:
            return body_bytes(self.text.computations[line.called[0]], {})
        return body_bytes([line], {name: arrays[name] for name in line.operands if name in arrays})


def _arrays(lines: Sequence[Instruction]) -> dict[str, ArrayType]:
    return {line.name: line.arrays[0] for line in lines if line.arrays}
