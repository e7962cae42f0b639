"""How the axes of a mesh lie over nodes."""

import math


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
