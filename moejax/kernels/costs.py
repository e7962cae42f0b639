"""FLOPs of the operations whose inner loops depend on data, from the shapes of what they are given.

The planner reads everything else from the program. A function listed in `COSTS` is jitted under
that name, so that a reader of the traced program can tell it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

Cost = dict[str, Any]  # flops, dtype, and work: whether buckets filled in part cost in part


def experts_forward(arrays: Sequence[Any]) -> Cost:
    """`kernels.expert_mlp` of x [M, D], w_in [G, D, 2 F], w_out [G, F, D]: 6 M D F."""
    x, w_in, w_out = arrays[:3]
    flops = 2.0 * x.shape[0] * (math.prod(w_in.shape[1:]) + math.prod(w_out.shape[1:]))
    return {"flops": flops, "dtype": str(x.dtype), "work": True}


def experts_backward(arrays: Sequence[Any]) -> Cost:
    """Its transpose, of rows and of weights: twice the products. Last comes dy [M, D]."""
    cost = experts_forward((arrays[-1], *arrays[1:]))
    return cost | {"flops": 2 * cost["flops"]}


COSTS: dict[str, Callable[[Sequence[Any]], Cost]] = {
    "experts_forward": experts_forward,
    "experts_backward": experts_backward,
}


def attention_cost(primitive: str, eqn: Any) -> Cost | None:
    """cuDNN's fused attention of q [B, T, H, C], k [B, S, G, C]: 4 B T S H C, backward 10."""
    if not primitive.startswith("dot_product_attention"):
        return None
    q, k = eqn.invars[0].aval, eqn.invars[1].aval
    products = 10 if "bwd" in primitive else 4
    flops = float(products * math.prod(q.shape) * k.shape[1])
    return {"flops": flops, "dtype": str(q.dtype)}


def dot_flops(eqn: Any) -> float:
    """2 M N K of a matrix product, over its batch; of a ragged one, every row once."""
    left, right = (var.aval.shape for var in eqn.invars[:2])
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
