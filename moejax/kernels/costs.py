"""FLOPs of the operations whose inner loops depend on data, from the shapes of what they are given.

The planner reads everything else from the program. Such an operation is jitted under a name that
says its sizes (`name_of`), so that a reader of the traced program can tell it, also where
recomputation has left only a part of what it is given.
"""

import math
import re
from typing import Any

Cost = dict[str, Any]  # flops, dtype, and work: whether buckets filled in part cost in part

# Products of a row with each of an expert's weights, forward and backward.
PASSES = {"forward": 1, "backward": 2}


def name_of(which: str, rows: int, width: int, hidden: int) -> str:
    """The name of `kernels.expert_mlp` in the program: forward or backward, M, D, F."""
    return f"experts_{which}_{rows}x{width}x{hidden}"


def experts_cost(name: str, arrays: list[Any]) -> Cost | None:
    """6 M D F, backward twice that; None if it is no name of `name_of`."""
    found = re.fullmatch(r"experts_(forward|backward)_(\d+)x(\d+)x(\d+)", name)
    if found is None:
        return None
    flops = 6.0 * PASSES[found[1]] * math.prod(map(int, found.groups()[1:]))
    floats = [str(x.dtype) for x in arrays if "float" in str(x.dtype)]
    return {"flops": flops, "dtype": (floats or ["float32"])[0], "work": True}


def attention_cost(primitive: str, eqn: Any) -> Cost | None:
    """CuDNN's fused attention of q [B, T, H, C], k [B, S, G, C]: 4 B T S H C, backward 10."""
    if not primitive.startswith("dot_product_attention"):
        return None
    q, k = eqn.invars[0].aval, eqn.invars[1].aval
    products = 10 if "bwd" in primitive else 4
    flops = float(products * math.prod(q.shape) * k.shape[1])
    return {"flops": flops, "dtype": str(q.dtype)}


def dot_flops(eqn: Any) -> float:
    """2 M N K of a matrix product, over its batch; of a ragged one, every row once."""
    left = eqn.invars[0].aval.shape
    if eqn.primitive.name != "dot_general":
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * _ragged_depth(eqn, left)
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(left[dim] for dim in contracted)
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth


def _ragged_depth(eqn: Any, left: tuple[int, ...]) -> float:
    """The contracted length of a ragged product: where it is the ragged one, each group's share."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    depth = math.prod(left[dim] for dim in contracted)
    groups = eqn.invars[2].aval.shape[-1]
    ragged = numbers.lhs_ragged_dimensions[0]
    return depth / groups if ragged in contracted else depth
