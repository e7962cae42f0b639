"""Parses the text of a compiled program into instructions and their attributes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

ON_HOST = "S(5)"  # the memory space of pinned memory of the host, in a layout

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "ppermute",
}


class ArrayType(NamedTuple):
    """XLA's dtype and shape of an array, and where it lies if not in the device's main memory.

    Attributes:
      local: in a TPU core's own memory.
      on_host: in the host's memory.
    """

    dtype: str
    shape: tuple[int, ...]
    local: bool = False
    on_host: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.size * _bits(self.dtype) // 8

    @property
    def memory_bytes(self) -> int:
        """Bytes in the device's main memory; 0 for an array that lies elsewhere."""
        return 0 if self.local or self.on_host else self.bytes


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    op: str
    result: str  # its type
    rest: str  # operands and attributes
    root: bool = False  # whether it is the computation's result

    @property
    def first_operand(self) -> str:
        """Name of the first operand."""
        match = re.search(r"%([\w.\-]+)", self.rest)
        return match[1] if match else ""

    @cached_property
    def operands(self) -> list[str]:
        """Names of all operands."""
        depth = 1
        for place in re.finditer(r"[()]", self.rest):
            depth += 1 if place[0] == "(" else -1
            if depth == 0:
                return re.findall(r"%([\w.\-]+)", self.rest[: place.start()])
        return []

    @cached_property
    def arrays(self) -> list["ArrayType"]:
        """The arrays of its result, with the members of nested tuples."""
        result = re.sub(r"/\*.*?\*/", "", self.result)
        found = re.findall(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?", result)
        # Layouts for TPUs have tiles; there memory space 1 is a core's own.
        return [
            ArrayType(
                dtype,
                tuple(_numbers(dims)),
                local="T(" in layout and "S(1)" in layout,
                on_host=ON_HOST in layout,
            )
            for dtype, dims, layout in found
        ]

    @property
    def label(self) -> str:
        """Names of the source's scopes and of the operation, outermost first."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """The kernel or library function that a custom call runs."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else ""

    @cached_property
    def called(self) -> list[str]:
        """Computations that it calls; for a conditional, the branch of an ordinary step."""
        if self.op == "conditional":
            first = r"(?:branch_computations=\{|false_computation=)%([\w.\-]+)"
            return re.findall(first, self.rest)
        return re.findall(r"(?:calls|body|to_apply)=%([\w.\-]+)", self.rest)

    @property
    def trips(self) -> int:
        """Trip count of a loop; 1 if unknown."""
        count = re.search(r'known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(count[1]) if count else 1


def replica_groups(attributes: str, devices: int) -> frozenset[frozenset[int]]:
    """The groups of devices of a collective.

    Reads `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)` and `source_target_pairs`.
    """
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", attributes)
    if pairs:
        return _joined([set(map(int, pair.split(","))) for pair in _braced(pairs[1])])
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape, source, order = (_numbers(part) for part in iota.groups())
        ids = np.arange(devices).reshape(source)
        ids = ids.transpose(order or range(len(source))).reshape(shape[0], -1)
        return frozenset(frozenset(group) for group in ids.tolist())
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes)
    groups = [_numbers(group) for group in _braced(listed[1])] if listed else [range(devices)]
    return frozenset(frozenset(group) for group in groups)


def _braced(text: str) -> list[str]:
    return re.findall(r"\{([\d,]+)\}", text)


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _joined(sets: list[set[int]]) -> frozenset[frozenset[int]]:
    """Unites sets that share a member."""
    groups: list[set[int]] = []
    for members in sets:
        touching = [group for group in groups if group & members]
        groups = [group for group in groups if not group & members] + [members.union(*touching)]
    return frozenset(frozenset(group) for group in groups)


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, and the name of the first one to run."""
    by_name: dict[str, list[Instruction]] = {}
    entry, current = "", None
    # The metadata of a Pallas call stands on separate lines.
    text = re.sub(r"kernel_metadata=\{\n(.*)\n\}", r"kernel_metadata={\1}", text)
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%(\S+) \(.*\{$", line)
        if head:
            current = by_name.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line == "}":
            current = None
        elif current is not None:
            parsed = re.match(r"\s+(ROOT )?%(\S+) = (.*?) ([a-z][a-z\-]*)\((.*)", line)
            if parsed:
                root, name, result, op, rest = parsed.groups()
                current.append(Instruction(name, op, result, rest, bool(root)))
    return {
        name: [_counted(line, by_name) for line in lines] for name, lines in by_name.items()
    }, entry


def _counted(line: Instruction, by_name: Mapping[str, list[Instruction]]) -> Instruction:
    """Adds the trip count to a loop whose text does not name it.

    Programs for TPUs state it only as a constant: the loop's condition compares its counter, which
    starts at 0, with it.
    """
    if line.op != "while":
        return line
    called = re.findall(r"(?:condition|body)=%([\w.\-]+)", line.rest)
    if "known_trip_count" in line.rest or len(called) != 2:
        return line
    condition, body = ({one.name: one for one in by_name.get(name, [])} for name in called)
    compared = next((one for one in condition.values() if one.root), None)
    if compared is None or "direction=LT" not in compared.rest:
        return line
    counter, limit = (condition.get(name) for name in compared.operands)
    if counter is None or limit is None or (most := _constant(limit)) is None:
        return line
    place = re.search(r"index=(\d+)", counter.rest)
    step = _step(body, int(place[1])) if place else 0
    trips = f', known_trip_count":{{"n":"{-(-most // step)}"}}' if step else ""
    return replace(line, rest=line.rest + trips)


def _constant(line: Instruction) -> int | None:
    found = re.match(r"(\d+)\)", line.rest) if line.op == "constant" else None
    return int(found[1]) if found else None


def _step(body: Mapping[str, Instruction], place: int) -> int:
    """Returns the constant that a loop's body adds to carry element `place`; 0 if unclear."""
    root = next((one for one in body.values() if one.root), None)
    if root is None or root.op != "tuple":
        return 0
    line, step = body.get(root.operands[place]), 0
    while line is not None and line.op in ("add", "copy"):
        parts = [body[name] for name in line.operands if name in body]
        step += sum(_constant(part) or 0 for part in parts)
        line = next((part for part in parts if part.op != "constant"), None)
    if line is None or line.op != "get-tuple-element":
        return 0
    return step if re.search(rf"index={place}\b", line.rest) else 0


def kind_of(op: str) -> str | None:
    """Returns the key of `KINDS` for an operation."""
    op = op.removesuffix("-start")
    return op if op in KINDS else None


def origin_of(line: Instruction, starts: Mapping[str, Instruction]) -> str:
    """The name of the start instruction that a done instruction ends."""
    name = line.first_operand
    while name in starts and starts[name].op.endswith("-update"):
        name = starts[name].first_operand
    return name


def arrays_of(line: Instruction, kind: str, group: int) -> list[tuple[str, int]]:
    """Dtype and bytes of each array that a collective moves, as `CompiledCollective` counts them.

    Args:
      group: number of devices in a group.
    """
    sizes = [(array.dtype, array.bytes) for array in line.arrays]
    nested = line.result.startswith("((")
    if line.op.endswith("-start") and (nested or line.op != "all-reduce-start"):
        # The type of a start lists operands, then results; u32[] values are XLA's own.
        sizes = [(dtype, size) for dtype, size in sizes if (dtype, size) != ("u32", 4)]
        half = len(sizes) // 2
        sizes = sizes[:half] if kind == "reduce-scatter" else sizes[half:]
    elif kind == "reduce-scatter":
        sizes = [(dtype, size * group) for dtype, size in sizes]
    if kind == "all-to-all" and len(sizes) == group > 1:
        sizes = [(sizes[0][0], sum(size for _, size in sizes))]  # an operand for each peer
    return sizes


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
