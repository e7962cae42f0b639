"""What operations cost whose programs do not show it.

Their inner loops depend on data, or their kernels fetch rows by number. The planner reads all else
from the program. Such an operation is jitted under a name that says its sizes (`jitted`), so that a
reader of the traced program can tell it, also where recomputation has left only a part of what it
is given.
"""

import math
import re
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import Any

import jax

# Keys of a product's cost:
#   flops, dtype
#   work    whether half-filled buckets cost half
#   blocks  (rows, groups), where each group is computed in blocks
#   bytes   moved besides the operands
#   unread  share of the cost that is left where nothing reads the first result
# Key of a gather's cost: bytes, those that move.
Cost = dict[str, Any]

# Matrix products: gate, up and down forward; backward each by rows and by weights.
PRODUCTS = {"experts_forward": 3, "experts_backward": 6, "products": 1}
# Of experts computed in blocks, how often all weights cross memory besides what the call itself
# reads and writes: cut out and put down; backward their gradients too, from the products and out of
# the branch.
PASSES = {"experts_forward": 2, "experts_backward": 6}


def jitted(function: Callable, which: str, *sizes: int, **options: Hashable) -> Callable:
    """The function, jitted under a name that `named_cost` reads.

    Args:
      which: "experts_forward" or "experts_backward", of M, D, F, G; "products" of M, K, N; "rows"
        of how many are made, and the bytes that are read and written for each.
      options: more arguments of the function, static.
    """
    return _jitted(function, f"{which}_{'x'.join(map(str, sizes))}", tuple(options.items()))


@cache
def _jitted(function: Callable, name: str, options: tuple[tuple[str, Any], ...]) -> Callable:
    @wraps(function)
    def named(*arguments):
        return function(*arguments, **dict(options))

    named.__name__ = name
    return jax.jit(named)


def named_cost(name: str, arrays: list[Any]) -> Cost | None:
    """The cost of what `jitted` has named; else None.

    A product has 2 M K N FLOPs, an expert MLP three such. Rows move as many bytes as the name says.
    """
    if (match := re.fullmatch(r"rows_(\d+)x(\d+)", name)) is not None:
        return {"kind": "gather", "bytes": float(math.prod(map(int, match.groups())))}
    match = re.fullmatch(r"(experts_forward|experts_backward|products)_([0-9x]+)", name)
    if match is None:
        return None
    M, K, N, *groups = map(int, match[2].split("x"))
    floats = [x.dtype for x in arrays if "float" in str(x.dtype)]
    cost = {
        "kind": "product",
        "flops": 2.0 * PRODUCTS[match[1]] * M * K * N,
        "dtype": str(floats[0]) if floats else "float32",
        "work": True,
    }
    if groups:
        weights = 3 * groups[0] * K * N * (floats[0].itemsize if floats else 4)
        cost |= {"blocks": (M, groups[0]), "bytes": float(PASSES[match[1]] * weights)}
    if match[1] == "experts_forward":
        cost["unread"] = 2 / 3  # gate and up: what the hidden layer saw is another result
    return cost


def attention_cost(primitive: str, eqn: Any) -> Cost | None:
    """CuDNN's fused attention of q [B, T, H, C]: 4 C for each pair of positions, backward 10.

    Of the pairs that it is told to visit: by causality and the window, not by a mask.
    """
    if not primitive.startswith("dot_product_attention"):
        return None
    q, k = eqn.invars[0].aval, eqn.invars[1].aval
    B, T, H, C = q.shape
    pairs = T * k.shape[1]
    if eqn.params["mask_type"].name == "CAUSAL":
        pairs = causal_pairs(T, eqn.params["sliding_window_length"])
    products = 10 if "bwd" in primitive else 4
    return {"kind": "product", "flops": float(products * B * H * C * pairs), "dtype": str(q.dtype)}


def causal_pairs(T: int, window: int | None) -> int:
    """How many pairs of a query and a key causality and the window let through."""
    W = min(T, window or T)
    return T * W - W * (W - 1) // 2  # a query sees W keys, the first W - 1 of them fewer


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
