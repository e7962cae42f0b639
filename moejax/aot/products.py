"""FLOPs of the matrix products in a compiled program, read from shapes and attributes.

Knows dot instructions and the calls of cuBLAS, of cuDNN's attention, and of Mosaic kernels that
multiply rows, sorted by group, by the matrix of their group, or sum their outer products. For TPUs
XLA writes every product as a convolution, and the text of a Pallas call does not show what it
computes: its FLOPs come from its name, its shapes and its tiles. A multiply-add counts as two.
"""

import math
import re
from collections.abc import Sequence

from moejax.aot.hlo import ArrayType, Instruction
from moejax.kernels.costs import causal_pairs, splash_flops

# Dtypes that matrix units multiply.
FACTORS = ("bf16", "f16", "f8e4m3fn", "f8e5m2", "f32")
# Kernels for TPUs that come with JAX.
SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")


def product_flops(line: Instruction, operands: Sequence[ArrayType]) -> tuple[float, bool]:
    """Returns the FLOPs of an instruction that is a product, and whether its rows have groups.

    (0, False) for others. A product of groups counts all rows of its buffer, filled or not; on TPUs
    also whole tiles of columns, and a tile of rows that two groups share once.

    Args:
      operands: the arrays that it reads, in order.
    """
    if line.op == "dot":
        return _dot(line, operands, _numbers("lhs_contracting_dims", line.rest)), False
    if line.op == "convolution":
        return _convolution(line, *operands[:2]), False
    if line.op != "custom-call":
        return 0.0, False
    if line.target.startswith("__cublas"):
        return _dot(line, operands, _numbers("lhs_contracting_dimensions", line.rest)), False
    if line.target.startswith("__cudnn$fmha"):
        return _attention(line, operands[0]), False
    if line.target.startswith("mosaic_gpu"):
        return grouped_flops(operands, line.arrays), True
    if line.target != "tpu_custom_call":
        return 0.0, False
    if (kernel := SPLASH.search(f"{line.name} {line.label}")) is not None:
        return _splash(kernel[1], line, operands), False
    flops = grouped_flops(operands, line.arrays)
    return flops * _whole_tiles(line, operands), flops > 0


def _dot(line: Instruction, operands: Sequence[ArrayType], contracted: list[int]) -> float:
    depth = math.prod(operands[0].shape[dim] for dim in contracted)
    return 2.0 * line.arrays[0].size * depth


def _attention(line: Instruction, q: ArrayType) -> float:
    """FLOPs of cuDNN's attention: two products forward, five backward, of the pairs it visits."""
    _, _, T, S = shape = _numbers('"intermediate_tensor_shape":.*?"dimensions"', line.rest)
    window = re.search(r'"sliding_window_length": ?"?([1-9]\d*)', line.rest)
    pairs = T * S
    if re.search(r'"mask_type": ?"CAUSAL"', line.rest) and T == S:
        pairs = causal_pairs(T, int(window[1]) if window else None)
    products = 5 if line.target.endswith("Backward") else 2
    channels = q.size // T  # of all sequences and heads
    if channels % (shape[0] * shape[1]):
        raise ValueError(f"{line.name} has {channels} channels of {shape[:2]} sequences and heads")
    return 2.0 * products * channels * pairs


def grouped_flops(operands: Sequence[ArrayType], results: Sequence[ArrayType]) -> float:
    """2 M K N, for rows [M, K] and matrices [G, K, N] among the operands or the results.

    Kernels that sum outer products may have their first rows transposed, [K, M].
    """
    arrays = [array for array in (*operands, *results) if array.dtype in FACTORS]
    flat = [array.shape for array in arrays if len(array.shape) == 2]
    rows = flat[0][0] if flat else 0
    matrices = [a.shape for a in arrays if len(a.shape) > 2 and a.shape[0] != rows]
    if not rows or not matrices:
        return 0.0
    if matrices[0] in [array.shape for array in results] and flat[0][1] == flat[1][0]:
        rows = flat[0][1]
    return 2.0 * rows * math.prod(matrices[0][1:])


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
    """FLOPs of the blocks that a kernel visits: its part of those in the name of its pass.

    The text does not show which it visits; see `kernels.costs.jitted`.
    """
    named = re.search(r"attention_(?:forward|backward)_(\d+)", line.rest)
    assert named is not None, line.name
    q, _, v = [array for array in operands if array.dtype in ("bf16", "f32")][:3]
    if kernel == "fwd" or (kernel == "dkv" and len(line.arrays) == 3):
        return float(named[1])
    one, both = (
        sum(splash_flops(name, 1, q.shape[-1], v.shape[-1]) for name in names)
        for names in ((kernel,), ("dq", "dkv"))
    )
    return float(named[1]) * one / both


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


def _numbers(name: str, text: str) -> list[int]:
    """The numbers listed behind a name, in braces or in brackets of quoted ones."""
    found = re.search(name + r'"?[=:] ?[{\[]([\d," ]*)[}\]]', text)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []
