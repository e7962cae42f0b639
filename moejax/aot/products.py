"""FLOPs of the matrix products in a compiled program, read from shapes and attributes.

Knows dot instructions and the calls of cuBLAS, of cuDNN's attention, and of Mosaic kernels that
multiply rows, sorted by group, by the matrix of their group, or sum their outer products. A
multiply-add counts as two.
"""

import math
import re
from collections.abc import Sequence

from moejax.aot.hlo import ArrayType, Instruction
from moejax.kernels.costs import causal_pairs

# Dtypes that matrix units multiply.
FACTORS = ("bf16", "f16", "f8e4m3fn", "f8e5m2", "f32")


def product_flops(line: Instruction, operands: Sequence[ArrayType]) -> tuple[float, bool]:
    """Returns the FLOPs of an instruction that is a product, and whether its rows have groups.

    (0, False) for others. A product of groups counts all rows of its buffer, filled or not.

    Args:
      operands: the arrays that it reads, in order.
    """
    if line.op == "dot":
        return _dot(line, operands, _numbers("lhs_contracting_dims", line.rest)), False
    if line.op != "custom-call":
        return 0.0, False
    if line.target.startswith("__cublas"):
        return _dot(line, operands, _numbers("lhs_contracting_dimensions", line.rest)), False
    if line.target.startswith("__cudnn$fmha"):
        return _attention(line, operands[0]), False
    if line.target.startswith("mosaic_gpu"):
        return grouped_flops(operands, line.arrays), True
    return 0.0, False


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
    assert channels % (shape[0] * shape[1]) == 0, line.name
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


def _numbers(name: str, text: str) -> list[int]:
    """The numbers listed behind a name, in braces or in brackets of quoted ones."""
    found = re.search(name + r'"?[=:] ?[{\[]([\d," ]*)[}\]]', text)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []
