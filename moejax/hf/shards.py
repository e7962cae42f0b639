"""Parts of arrays that are on devices here, copied to the host shard by shard."""

from typing import Any

import jax
import numpy as np

from moejax.hf.rules import Index
from moejax.hf.views import copy


def part_of(array: jax.Array, index: Index = ()) -> np.ndarray:
    """Returns the numbers at `index`, as NumPy's array[index] would.

    Nothing is computed on the devices: a compiled gather may add up zeros, and lose the sign of -0.

    Args:
      array: with all shards on devices of this process, or copies of all of it.
      index: positions and whole dimensions (`slice(None)`); dimensions without an entry are whole.
    """
    wanted = (*index, *[slice(None)] * (array.ndim - len(index)))
    kept = [dim for dim, at in enumerate(wanted) if isinstance(at, slice)]
    out = np.empty([array.shape[dim] for dim in kept], array.dtype)
    copied = set()
    for shard in array.addressable_shards:
        parts = zip(shard.index, array.shape, strict=True)
        bounds = tuple(part.indices(size)[:2] for part, size in parts)
        own = _within(bounds, wanted)
        if own is None or bounds in copied:
            continue
        copied.add(bounds)
        part = _to_host(shard.data, own)
        if part.shape == out.shape:
            return part
        copy(out[tuple(slice(*bounds[dim]) for dim in kept)], part)
    return out


def _within(bounds: tuple[tuple[int, int], ...], wanted: Index) -> Index | None:
    """Returns the index in a shard; None if the shard has nothing of what is wanted."""
    own: list[int | slice] = []
    for (start, stop), at in zip(bounds, wanted, strict=True):
        if isinstance(at, slice):
            own.append(at)
        elif start <= at < stop:
            own.append(at - start)
        else:
            return None
    return tuple(own)


def _to_host(data: Any, index: Index) -> np.ndarray:
    """Copies a part of one shard; a shard in this machine's memory is looked at in place."""
    if next(iter(data.devices())).platform == "cpu":
        return np.asarray(data)[index]
    return np.asarray(data[index])
