"""KARMA's rule: recompute what backward needs, or keep it in the host's memory.

A byte that is kept crosses to the host and back, so where compute does not hide that, keeping pays
above `crossover` FLOPs a byte. A value of bfloat16 has two bytes. One of a product's result costs
2 D FLOPs, D being the width that it sums over: D a byte. One of causal attention's, with two
products over half of S positions, costs 2 S: S a byte. Where copies hide, keeping always pays.

Source: Wahib et al., Scaling Distributed Deep Learning Workloads beyond the Memory Capacity with
KARMA (2020).
"""


def saved_by_product(width: int) -> float:
    """Returns the FLOPs that a kept byte of a product's result saves."""
    return float(width)


def saved_by_attention(positions: int) -> float:
    """Returns the FLOPs that a kept byte of causal attention's result saves."""
    return float(positions)


def crossover(flops_per_s: float, to_device: float, from_device: float) -> float:
    """Returns the FLOPs a byte from which keeping beats recomputing, if nothing hides copies.

    Args:
      to_device, from_device: bytes a second each way.
    """
    return flops_per_s * (1 / to_device + 1 / from_device)
