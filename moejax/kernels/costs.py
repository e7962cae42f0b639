"""Costs of operations that a traced program does not show.

Their inner loops depend on data, or their kernels fetch rows by index. The planner reads everything
else from the program. Such an operation is jitted under a name with its sizes (`jitted`), which a
reader of the traced program recognizes, even if recomputation drops some of its operands.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any

import jax

# Keys of a product's cost:
#   flops, dtype
#   scales_with_fill  whether half-filled buckets cost half
#   blocks            (rows, groups), where each group is computed in blocks
#   bytes             moved besides the operands
#   unread            share of the cost that is left where nothing reads the first result
# Key of a gather's cost: bytes moved.
Cost = dict[str, Any]

# Matrix products: gate, up and down forward; backward each for rows and for weights, or for rows
# alone if weights are frozen.
PRODUCTS = {"experts_forward": 3, "experts_backward": 6, "experts_frozen": 3, "products": 1}
# Extra passes over all weights for experts in blocks: slicing the weights; in backward also their
# gradients.
PASSES = {"experts_forward": 2, "experts_backward": 6, "experts_frozen": 2}
# Products with a factor of an adapter, for each product of `experts_forward` with a weight: two
# forward; backward by rows, of both factors, and the first one again.
ADAPTED = {"experts_forward": 1, "experts_frozen": 2.5}
# Products of each kernel of splash attention with the width of keys, and with that of values.
SPLASH = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2), "dkv_fused": (3, 2)}


def jitted(function: Callable, which: str, *sizes: int, **options: Hashable) -> Callable:
    """Returns the function, jitted under a name that `named_cost` reads.

    Args:
      which: name and meaning of the sizes: experts_forward, experts_backward, and experts_frozen,
        which is backward by rows and adapters (M, D, F, groups that have rows, ranks of the two
        adapters if there are any), products (M, K, N), rows (number of rows, bytes moved per row),
        attention_forward and attention_backward (FLOPs).
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


def trips_of(trips: float) -> AbstractContextManager[Any]:
    """Returns the scope of a loop whose trips depend on data, with their mean for `named_trips`."""
    return jax.named_scope(f"trips_{round(1000 * trips)}")


def named_trips(scope: Iterable[str]) -> float | None:
    """Returns the mean trips of a loop in a scope of `trips_of`; else None."""
    found = (re.fullmatch(r"trips_(\d+)", name) for name in scope)
    return next((int(match[1]) / 1000 for match in found if match), None)


def named_cost(name: str, arrays: list[Any]) -> Cost | None:
    """Returns the cost of an operation named by `jitted`; else None.

    A product has 2 M K N FLOPs, an expert MLP three such. Rows move as many bytes as the name says.
    """
    if (match := re.fullmatch(r"rows_(\d+)x(\d+)", name)) is not None:
        return {"kind": "gather", "bytes": float(math.prod(map(int, match.groups())))}
    if (match := re.fullmatch(r"attention_(?:forward|backward)_(\d+)", name)) is not None:
        dtype = next(str(x.dtype) for x in arrays if "float" in str(x.dtype))
        return {"kind": "product", "flops": float(match[1]), "dtype": dtype}
    match = re.fullmatch(r"(experts_\w+?|products)_([0-9x]+)", name)
    if match is None:
        return None
    M, K, N, *groups = map(int, match[2].split("x"))
    groups, ranks = groups[:1], groups[1:]
    floats = [x.dtype for x in arrays if "float" in str(x.dtype)]
    cost = {
        "kind": "product",
        "flops": 2.0 * PRODUCTS[match[1]] * M * K * N,
        "dtype": str(floats[0]) if floats else "float32",
        "scales_with_fill": True,
    }
    if groups:
        weights = 3 * groups[0] * K * N * (floats[0].itemsize if floats else 4)
        cost |= {"blocks": (M, groups[0]), "bytes": float(PASSES[match[1]] * weights)}
    if ranks:
        factors = ranks[0] * (K + 2 * N) + ranks[1] * (N + K)
        cost["flops"] += 2.0 * ADAPTED[match[1]] * M * factors
    if match[1] == "experts_forward":
        cost["unread"] = 2 / 3  # gate and up: the hidden layer's input is another result
    return cost


def attention_cost(primitive: str, eqn: Any) -> Cost | None:
    """Returns the FLOPs of cuDNN's attention: 4 C for each pair of positions, backward 10 C.

    Counts the pairs that causality and the window leave, since it skips none for a mask.
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
    """Returns the number of (query, key) pairs that causality and the window leave."""
    W = min(T, window or T)
    return T * W - W * (W - 1) // 2  # a query sees W keys, the first W - 1 of them fewer


def splash_flops(kernel: str, pairs: int, C: int, V: int) -> int:
    """Returns the FLOPs of a kernel of splash attention, a key of `SPLASH`.

    Args:
      pairs: (query, key) pairs of all heads that it visits.
      C, V: widths of keys and of values.
    """
    of_keys, of_values = SPLASH[kernel]
    return 2 * pairs * (of_keys * C + of_values * V)


def dot_flops(eqn: Any) -> float:
    """Returns the FLOPs of a matrix product, 2 M N K; a ragged one counts every row once."""
    left = eqn.invars[0].aval.shape
    if eqn.primitive.name != "dot_general":
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * _ragged_depth(eqn, left)
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(left[dim] for dim in contracted)
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth


def _ragged_depth(eqn: Any, left: tuple[int, ...]) -> float:
    """Returns a ragged product's contracted length; a ragged dimension counts per group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    depth = math.prod(left[dim] for dim in contracted)
    groups = eqn.invars[2].aval.shape[-1]
    ragged = numbers.lhs_ragged_dimensions[0]
    return depth / groups if ragged in contracted else depth
