"""FLOPs of products on TPUs: convolutions, and Pallas kernels that come with JAX or XLA.

XLA writes every matrix product for TPUs as a convolution. The text of a Pallas call does not show
what it computes, so its FLOPs come from its name, its shapes and its tiles.
"""

import math
import re
from collections.abc import Sequence

from moejax.aot.hlo import ArrayType, Instruction
from moejax.aot.products import grouped_flops
from moejax.kernels.costs import splash_flops

CALL = "tpu_custom_call"
SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")


def tpu_flops(line: Instruction, operands: Sequence[ArrayType]) -> tuple[float, bool]:
    """Returns the FLOPs of an instruction that multiplies, and whether its rows have groups.

    As `products.product_flops`, but a product of groups counts whole tiles of columns. A tile of
    rows that two groups share counts once.
    """
    if line.op == "convolution":
        return _convolution(line, *operands[:2]), False
    if line.op != "custom-call" or line.target != CALL:
        return 0.0, False
    if (kernel := SPLASH.search(f"{line.name} {line.label}")) is not None:
        return _splash(kernel[1], line, operands), False
    flops = grouped_flops(operands, line.arrays)
    return flops * _whole_tiles(line, operands), flops > 0


def _convolution(line: Instruction, left: ArrayType, right: ArrayType) -> float:
    """FLOPs of a convolution: two for each pair of kernel and input element, for each feature."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
    assert labels is not None, line.name
    inputs, kernel, output = (
        dict(zip(names, array.shape, strict=True))
        for names, array in zip(labels.groups(), (left, right, line.arrays[0]), strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", line.rest)
    pairs = 1
    for number in sorted(set(output) - {"b", "f"}):
        form = _dimension(window[1] if window else "", int(number))
        pairs *= _meetings(inputs[number], kernel[number], output[number], form)
    return 2.0 * output["b"] * output["f"] * kernel["i"] * pairs


def _dimension(window: str, number: int) -> dict[str, int]:
    """Stride, padding before the first element, and dilations of one dimension of a window."""

    def read(name: str, default: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", window)
        return found[1].split("x")[number] if found else default

    names = ("stride", "lhs_dilate", "rhs_dilate")
    return {name: int(read(name, "1")) for name in names} | {
        "pad": int(read("pad", "0").split("_")[0])
    }


def _meetings(size: int, kernel: int, output: int, form: dict[str, int]) -> int:
    """Counts the pairs of kernel and input element, without padding and dilation holes."""
    found = 0
    for place in range(output):
        for element in range(kernel):
            at = place * form["stride"] + element * form["rhs_dilate"] - form["pad"]
            found += at % form["lhs_dilate"] == 0 and 0 <= at < size * form["lhs_dilate"]
    return found


def _splash(kernel: str, line: Instruction, operands: Sequence[ArrayType]) -> float:
    """FLOPs of the blocks that causality leaves and the kernel's grid holds."""
    grid = operands[0].shape
    q, _, v = [array for array in operands if array.dtype in ("bf16", "f32")][:3]
    T, C = q.shape[-2:]
    suffix = "" if kernel == "fwd" else f"_{kernel}"
    rows, keys = (_block(line, f"block_{name}{suffix}") for name in ("q", "kv"))
    if kernel == "dkv":
        # Blocks of queries that see one of keys, at most as many as the grid has.
        counts = [T // rows - start // rows for start in range(0, T, keys)]
        blocks = sum(min(count, grid[-2]) for count in counts)
    else:
        counts = [-(-(start + rows) // keys) for start in range(0, T, rows)]
        blocks = sum(min(count, grid[-1]) for count in counts)
    fused = "_fused" if kernel == "dkv" and len(line.arrays) == 3 else ""
    pairs = math.prod(q.shape[:-2]) * blocks * rows * keys
    return float(splash_flops(kernel + fused, pairs, C, v.shape[-1]))


def _block(line: Instruction, name: str) -> int:
    found = re.search(rf'{name}\\*": (\d+)', line.rest)
    assert found is not None, (line.name, name)
    return int(found[1])


def _whole_tiles(line: Instruction, operands: Sequence[ArrayType]) -> float:
    """Returns executed over needed FLOPs of XLA's ragged_dot kernel, whose last tiles are whole."""
    found = re.search(r'ragged_dot_tiling="\d+,(\d+),(\d+)"', line.rest)
    if found is None:
        return 1.0
    rows = next(array for array in operands if array.dtype[0] in "bf" and len(array.shape) == 2)
    sizes = rows.shape[1], line.arrays[0].shape[-1]
    tiles = [int(number) for number in found.groups()]
    return math.prod(
        -(-size // tile) * tile / size for size, tile in zip(sizes, tiles, strict=True)
    )
