"""FLOPs of the operations whose inner loops depend on data, from the shapes of what they are given.

The planner reads everything else from the program. Such an operation is jitted under a name that
says its sizes (`jitted`), so that a reader of the traced program can tell it, also where
recomputation has left only a part of what it is given.
"""

import math
import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax

Cost = dict[str, Any]  # flops, dtype, and work: whether buckets filled in part cost in part

# Matrix products: gate, up and down forward; backward each by rows and by weights.
PRODUCTS = {"experts_forward": 3, "experts_backward": 6, "products": 1}


def jitted(function: Callable, which: str, *sizes: int) -> Callable:
    """The function, jitted under a name that `named_cost` reads.

    Args:
      which: "experts_forward" or "experts_backward", of M, D, F; "products" of M, K, N.
    """
    return _jitted(function, f"{which}_{'x'.join(map(str, sizes))}")


@cache
def _jitted(function: Callable, name: str) -> Callable:
    @wraps(function)
    def named(*arguments):
        return function(*arguments)

    named.__name__ = name
    return jax.jit(named)


def named_cost(name: str, arrays: list[Any]) -> Cost | None:
    """FLOPs of what `jitted` has named: 2 M K N, of an expert MLP three such; else None."""
    found = re.fullmatch(r"(experts_forward|experts_backward|products)_(\d+)x(\d+)x(\d+)", name)
    if found is None:
        return None
    flops = 2.0 * PRODUCTS[found[1]] * math.prod(map(int, found.groups()[1:]))
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
