"""Arrays in the memory of the host, and their way to the device and back.

Per device, inside shard_map. A program knows of each array where it lies (its memory space), and
operations take arrays of one space only. What travels is explicit here, as it is between devices.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from moejax.errors import InputError

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


def to_memory_of(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns y in the memory of x."""
    return to_host(y) if is_on_host(x) else to_device(y)


def fetch_after(x: jax.Array, tree: Any) -> tuple[jax.Array, Any]:
    """Returns both. What of the tree is on the host comes to the device after `x` is there.

    Else a compiler may fetch the weights of all layers at a program's start.
    """
    leaves, structure = jax.tree.flatten(tree)
    away = {index: leaf for index, leaf in enumerate(leaves) if is_on_host(leaf)}
    if not away:
        return x, tree
    x, away = jax.lax.optimization_barrier((x, away))
    return x, jax.tree.unflatten(structure, [away.get(i, leaf) for i, leaf in enumerate(leaves)])


def pieces(rows: int, size: int) -> int:
    """Returns the least number of equal parts of rows that hold at most PIECE numbers each.

    Args:
      size: numbers of all rows. If one row has more than PIECE, a part is a row.
    """
    least = min(-(-size // PIECE), rows)
    return next(n for n in range(least, rows + 1) if rows % n == 0)


def empty(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns an array in the host's memory that holds anything until it is written."""
    return to_host(jax.lax.empty(shape, dtype))


def zeros_by_layer(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns stacked zeros in the host's memory; one layer of them is on the device at a time."""
    return jax.lax.map(lambda _: to_host(jnp.zeros(shape[1:], dtype)), jnp.arange(shape[0]))


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the sum of two arrays; of two on the host layer by layer, in place of the first."""
    if not is_on_host(x):
        return x + y

    def one(layer: jax.Array, x: jax.Array) -> jax.Array:
        total = _layer(x, layer) + _layer(y, layer)
        return jax.lax.dynamic_update_index_in_dim(x, to_host(total), layer, 0)

    return jax.lax.fori_loop(0, len(x), one, x)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Returns the sum of an array's squares in float32; of one on the host layer by layer."""

    def squares(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    if not is_on_host(x):
        return squares(x)
    return jnp.sum(jax.lax.map(lambda layer: squares(_layer(x, layer)), jnp.arange(len(x))))


def _layer(x: jax.Array, layer: jax.Array) -> jax.Array:
    return to_device(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False))


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of an array that lies in the hosts' memory instead.

    Raises:
      InputError: if the devices cannot reach their host's memory by themselves.
    """
    try:
        found = sharding.with_memory_kind(MEMORY_KIND)
    except ValueError as error:
        raise InputError(
            f"no memory of the host to use. These devices know no {MEMORY_KIND}. Set "
            "memory.optimizer, memory.experts and memory.residuals to device."
        ) from error
    if found.memory_kind == MEMORY_KIND:
        return found
    # Devices that are only described know no memories.
    mesh = sharding.mesh.abstract_mesh
    return NamedSharding(mesh, sharding.spec, memory_kind=MEMORY_KIND)


def zeros_on_host(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros in the hosts' memory, made there."""
    assert shape.sharding is not None, "where they lie is part of the shape"
    own = np.zeros(shape.sharding.shard_shape(shape.shape), shape.dtype)
    return jax.make_array_from_callback(shape.shape, shape.sharding, lambda _: own)
