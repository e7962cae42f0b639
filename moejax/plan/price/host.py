"""The memory of a node's host: what devices keep there, and copies of the state beside it.

KARMA's rule: recompute what backward needs, or keep it in the host's memory.

A byte that is kept crosses to the host and back, so where compute does not hide that, keeping pays
above `crossover` FLOPs a byte. A value of bfloat16 has two bytes. One of a product's result costs
2 D FLOPs, D being the width that it sums over: D a byte. One of causal attention's, with two
products over half of S positions, costs 2 S: S a byte. Where copies hide, keeping always pays.

Source: Wahib et al., Scaling Distributed Deep Learning Workloads beyond the Memory Capacity with
KARMA (2020).
"""

import math
from typing import Any

import jax

from moejax.layout.layout import Layout
from moejax.step.train_step import TrainStep

SLOTS = 2  # copies of a state that a host keeps: `train.memory` writes one while the other stays


def node_bytes(train_step: TrainStep, on_device: int, on_host: int) -> int:
    """Returns the bytes of a node's host that a run takes.

    Args:
      on_device: bytes of one device's memory, which for a CPU is the host's.
      on_host: bytes of one device's arrays in the host's memory.
    """
    shared = on_device if train_step.platform == "cpu" else 0
    devices = train_step.mesh.size // (train_step.cfg.mesh.nodes or 1)
    return devices * (on_host + shared) + copies_bytes(train_step)


def copies_bytes(train_step: TrainStep) -> int:
    """Returns the bytes of a node's copies of the state by `checkpoint.memory_every`.

    A host keeps each shard of its devices once, and those that no other host has also for the host
    before it: see `train.memory.placement`.
    """
    cfg, layout = train_step.cfg, train_step.layout
    if cfg.checkpoint.memory_every is None:
        return 0
    arrays = jax.tree.leaves(train_step.abstract._replace(frozen=None))
    return SLOTS * sum(_kept(x, layout) for x in arrays)


def _kept(x: Any, layout: Layout) -> int:
    """Returns the bytes of an array's shards that a node keeps: its own, and its neighbour's."""
    axes = tuple(axis for part in x.sharding.spec for axis in _axes(part))
    own = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    own *= layout.size(layout.inside_node(axes))
    across = layout.size(layout.between_nodes(layout.mesh_axes))
    alone = across > 1 and layout.size(layout.between_nodes(axes)) == across
    return own * (1 + alone)


def _axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part or ()


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
