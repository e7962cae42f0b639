"""How the axes of a mesh lie over nodes."""

import itertools
import math
import operator


def node_parts(sizes: dict[str, int], nodes: int) -> dict[str, tuple[int, int]]:
    """Returns each axis's devices (across nodes, inside a node), fastest axis first.

    Devices fill nodes in mesh order, so an axis may lie inside a node, cross nodes, or do both.

    Args:
      sizes: devices along each axis, slowest axis first.
    """
    left, parts = math.prod(sizes.values()) // nodes, {}
    for axis in reversed(sizes):
        inside = math.gcd(sizes[axis], left)
        left //= inside
        parts[axis] = sizes[axis] // inside, inside
    return parts


def sharing_counts(sizes: dict[str, int], nodes: int) -> list[int]:
    """Returns how many devices may share a sequence: products of the last parts of fsdp and expert.

    Arguments as of `node_parts`.
    """
    parts = node_parts(sizes, nodes)
    last = [size for axis in ("expert", "fsdp") for size in reversed(parts[axis])]
    return sorted(set(itertools.accumulate(last, operator.mul, initial=1)))
