"""One tensor's numbers from a sharded parameter, in the memory of this process.

Where this process holds all shards they are copied together. Among several processes each sends
its part to all, one tensor at a time, so that no process holds more than its shards and one tensor.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm import gloo, wire
from moejax.hf.rules import Tensor
from moejax.hf.views import copy
from moejax.layout.layout import Axes
from moejax.runtime.processes import Processes

Positions = Mapping[int, int]  # dimension of an array -> the one position that is wanted


def assemble(array: jax.Array, tensor: Tensor, dtype: Any, processes: Processes) -> np.ndarray:
    """Returns the values of one tensor, [free letters of its view].

    All processes call it, for the same tensors in the same order.

    Args:
      dtype: of values that are copied; a part of an array in this process's memory keeps its own.
    """
    positions = _positions(array, tensor)
    if not is_shared(array):
        return _copy_shards(array, positions, np.dtype(dtype))
    values = _gather(array, positions, jnp.dtype(dtype), processes)
    return np.asarray(values.addressable_data(0))


def is_shared(array: jax.Array) -> bool:
    """Whether no process alone holds all of an array."""
    return not (array.is_fully_addressable or array.is_fully_replicated)


def _positions(array: jax.Array, tensor: Tensor) -> Positions:
    """Returns where along which dimensions the tensor is."""
    dims, stacked = tensor.view.dims, array.ndim - len(tensor.view.dims)
    found = {stacked + dims.index(letter): at for letter, at in tensor.view.at}
    if tensor.repeat is not None:
        found[0] = tensor.repeat
    return found


def _copy_shards(array: jax.Array, positions: Positions, dtype: np.dtype) -> np.ndarray:
    shape = [size for dim, size in enumerate(array.shape) if dim not in positions]
    on_cpu = next(iter(array.sharding.device_set)).platform == "cpu"
    if on_cpu and array.is_fully_replicated:
        whole = np.asarray(array.addressable_shards[0].data)
        return whole[tuple(positions.get(dim, slice(None)) for dim in range(array.ndim))]
    out = np.empty(shape, dtype)
    copied = set()
    for shard in array.addressable_shards:
        parts = zip(shard.index, array.shape, strict=True)
        bounds = tuple(part.indices(size)[:2] for part, size in parts)
        inside = all(bounds[dim][0] <= at < bounds[dim][1] for dim, at in positions.items())
        if bounds in copied or not inside:
            continue
        copied.add(bounds)
        index = tuple(
            positions[dim] - start if dim in positions else slice(None)
            for dim, (start, _) in enumerate(bounds)
        )
        # On the CPU a view of all costs nothing; elsewhere only the part leaves the device.
        part = np.asarray(shard.data)[index] if on_cpu else np.asarray(shard.data[index])
        place = [slice(*b) for dim, b in enumerate(bounds) if dim not in positions]
        copy(out[tuple(place)], part)
    return out


def _gather(
    array: jax.Array, positions: Positions, dtype: jnp.dtype, processes: Processes
) -> jax.Array:
    """Returns one tensor's values on every device of every process."""
    dims = tuple(sorted(positions))
    assert isinstance(array.sharding, NamedSharding)
    function = _gatherer(array.sharding, array.shape, array.dtype, dims, dtype)
    at = jnp.array([positions[dim] for dim in dims], jnp.int32)
    key = (array.sharding, array.shape, dims, dtype)
    if key not in _COMPILED:
        processes.compile(function, array, at)
        _COMPILED.add(key)
    # Waits, because programs of several processes must follow each other in one order.
    return jax.block_until_ready(function(array, at))


_COMPILED: set[Any] = set()


@functools.cache
def _gatherer(
    sharding: NamedSharding,
    shape: tuple[int, ...],
    held: jnp.dtype,
    dims: tuple[int, ...],
    dtype: jnp.dtype,
) -> Any:
    """Returns the jitted (array, positions) -> values, the same on all devices.

    Wire: the values to every device that lacks them.
    """
    axes = tuple(_axes_of(sharding.spec, dim) for dim in range(len(shape)))

    def body(x: jax.Array, at: jax.Array) -> jax.Array:
        """Per device."""
        owns = jnp.bool_(True)
        for dim, position in zip(reversed(dims), reversed(range(len(dims))), strict=True):
            first = wire.index(axes[dim]) * x.shape[dim] if axes[dim] else 0
            local = at[position] - first
            owns &= (local >= 0) & (local < x.shape[dim])
            x = jax.lax.dynamic_index_in_dim(x, local, dim, keepdims=False)
        x = x.astype(dtype)
        owners = tuple(axis for dim in dims for axis in axes[dim])
        if owners:
            x = _from_owner(x, owns, owners)
        kept = [dim for dim in range(len(shape)) if dim not in dims]
        for index, dim in enumerate(kept):
            if axes[dim]:
                x = wire.all_gather(x, axes[dim], dim=index, tag=None)
        return x

    return jax.jit(gloo.shard_map(body, sharding.mesh, (sharding.spec, P()), P()))


def _from_owner(x: jax.Array, owns: jax.Array, axes: Axes) -> jax.Array:
    """Returns the x of the only device along `axes` that owns it.

    A sum of bits with zeros, because a sum of floats would lose the sign of -0.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    wide = jnp.where(owns, bits.astype(jnp.uint32), 0)
    summed = wire.all_reduce(wide, axes, tag=None)
    return jax.lax.bitcast_convert_type(summed.astype(bits.dtype), x.dtype)


def _axes_of(spec: P, dim: int) -> Axes:
    entry = spec[dim] if dim < len(spec) else None
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
