"""Arrays in the memory of the host, and their way to the device and back.

Per device, inside shard_map. A program knows of each array where it lies (its memory space), and
operations take arrays of one space only. What travels is explicit here, as it is between devices.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

# The memory from which devices copy without the processor's help: its pages cannot be swapped out.
MEMORY_KIND = "pinned_host"
# Numbers of an array that are on the way at a time: 64 MiB, which a link carries at its full rate.
PIECE = 2**24


def is_on_host(x: Any) -> bool:
    """Returns whether a traced array, or the shape of an array, lies in the host's memory."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return getattr(x.sharding, "memory_kind", None) == MEMORY_KIND
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(x: jax.Array) -> jax.Array:
    """Returns an array in the device's memory; itself if it is there."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def to_host(x: jax.Array) -> jax.Array:
    """Returns an array in the host's memory; itself if it is there."""
    return x if is_on_host(x) else jax.device_put(x, jax.memory.Space.Host)


def pieces(rows: int, size: int) -> int:
    """Returns the least number of equal parts of rows that hold at most PIECE numbers each.

    Args:
      size: numbers of all rows. If one row has more than PIECE, a part is a row.
    """
    least = min(-(-size // PIECE), rows)
    return next(n for n in range(least, rows + 1) if rows % n == 0)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of an array that lies in the hosts' memory instead."""
    return sharding.with_memory_kind(MEMORY_KIND)


def zeros_on_host(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros in the hosts' memory, made there."""
    assert shape.sharding is not None, "where they lie is part of the shape"
    own = np.zeros(shape.sharding.shard_shape(shape.shape), shape.dtype)
    return jax.make_array_from_callback(shape.shape, shape.sharding, lambda _: own)
