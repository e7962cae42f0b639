"""Bytes that the kernels of a compiled program read from memory and write to it.

A kernel reads each operand and writes each result once; caches are ignored. Of an array that it
slices, gathers from or updates in place, it touches only the slice, the gathered rows or the
update. A fused kernel computes only the elements that its results need.
"""

from collections.abc import Mapping, Sequence

from moejax.aot.hlo import ArrayType, Instruction

SLICES = ("slice", "dynamic-slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand with the new elements
SPREADS = ("broadcast", "pad", "concatenate")
VIEWS = ("bitcast", "reshape", "get-tuple-element")


def body_bytes(body: Sequence[Instruction], outside: Mapping[str, ArrayType]) -> int:
    """Returns the bytes read and written by a kernel with these instructions, in order.

    Args:
      outside: by name, arrays that it reads besides its parameters and its own values.
    """
    inside = {line.name: line for line in body}
    sizes = {name: array.size for name, array in outside.items()}
    sizes |= {line.name: line.arrays[0].size for line in body if line.arrays}
    written, wanted, in_place = 0, dict.fromkeys(sizes, 0), set()
    for name in _results(body):
        origin = _origin(name, inside)
        update = UPDATES.get(origin.op)
        if update is not None:
            in_place.add(origin.name)
            part = (
                sizes[origin.operands[update]]
                * origin.arrays[0].memory_bytes
                // origin.arrays[0].size
            )
            written += part * (2 if origin.op == "scatter" else 1)
        else:
            written += sum(array.memory_bytes for array in inside[name].arrays)
        wanted[origin.name] = sizes[origin.name]
    for line in reversed(body):
        for index, name in enumerate(line.operands):
            if name in sizes:
                more = _needed(line, index, sizes, wanted, in_place)
                wanted[name] = min(sizes[name], wanted[name] + more)
    arrays = dict(outside) | {
        line.name: line.arrays[0] for line in body if line.op == "parameter" and line.arrays
    }
    read = sum(
        wanted[name] * array.memory_bytes // max(array.size, 1) for name, array in arrays.items()
    )
    return written + read


def _results(body: Sequence[Instruction]) -> list[str]:
    """Names of the values that a kernel writes."""
    root = next((line for line in body if line.root), body[-1])
    return list(root.operands) if root.op == "tuple" else [root.name]


def _origin(name: str, inside: Mapping[str, Instruction]) -> Instruction:
    """Returns the instruction that computes a value, skipping mere changes of shape."""
    line = inside[name]
    while line.op in VIEWS and line.operands[:1] and line.operands[0] in inside:
        line = inside[line.operands[0]]
    return line


def _needed(
    line: Instruction,
    index: int,
    sizes: Mapping[str, int],
    wanted: Mapping[str, int],
    in_place: set[str],
) -> int:
    """Returns how many elements of an operand the wanted elements of a result need."""
    own = wanted.get(line.name, 0)
    size, total = sizes[line.operands[index]], sizes.get(line.name, 0)
    if not own:
        return 0
    if line.op in SLICES:
        return own if index == 0 else size
    if line.name in in_place and index == 0:
        return 0
    if line.op in SPREADS:
        return min(size, own)
    if line.op == "reduce" and total:
        return -(-size * own // total)
    # Element by element, or else all of it.
    return own if size == total else size
