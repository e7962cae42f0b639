"""Digests of a state's numbers: one per layer, and for experts' weights one per expert.

They are computed on the devices, from the arrays themselves. If a restored state has other digests,
something between memory and disk went wrong. A digest is two sums modulo 2^32 over a cell's
numbers, of a mix of each number's bits and its position in the cell. So it does not depend on how a
mesh cuts the array, and a cell has the same digest wherever it lies: a swapped expert is known by
the digest of the other. Each device sums its own shard, and of several copies of a shard only the
first counts; nothing is sent between devices.

They find accidents and do not withstand an attacker (`manifest.sha256` does).

Legend: C the dimensions of cells (layers, experts), R the dimensions inside a cell.
"""

import base64
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.comm.host import is_on_host, pieces, to_device

# Factors of MurmurHash3's and xxHash's finalizers, and 2^32 over the golden ratio. All are odd.
SPREAD, FIRST, SECOND, THIRD = (
    np.uint32(n) for n in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
)
EXPERTS = (".moe.w_in", ".moe.w_out", ".moe.b_in", ".moe.b_out")
SITES = ("sites", "sites_optimizer", "sites_error")  # items whose arrays begin with the sites
ZERO = np.uint32(0)
BLOCK = 1 << 20  # numbers that are mixed at once on the host


class ArrayDigests(NamedTuple):
    """The digests of one array.

    Attributes:
      shape: shape of the array.
      dtype: name of its dtype.
      cells: 64 bits a cell as hexadecimal digits, in the shape of the dimensions of cells.
    """

    shape: tuple[int, ...]
    dtype: str
    cells: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's entry: a text for each layer, with all its experts in a row."""
        rows = self.cells if self.cells.ndim == 2 else self.cells.reshape(-1, 1)
        texts = ["".join(row) for row in rows]
        return {"shape": list(self.shape), "dtype": self.dtype, "digests": texts}


def from_json(key: str, facts: Mapping[str, Any]) -> ArrayDigests:
    """Returns the digests of the array `key` from the result of `to_json`."""
    shape = tuple(facts["shape"])
    digits = [[text[at : at + 16] for at in range(0, len(text), 16)] for text in facts["digests"]]
    return ArrayDigests(
        shape, facts["dtype"], np.array(digits, "<U16").reshape(shape[: cell_dims(key, len(shape))])
    )


def cell_dims(key: str, ndim: int) -> int:
    """Returns how many leading dimensions of an array number its cells: layers, and experts.

    Of what each site of an outer loop trains the sites come first.

    Args:
      key: the array's path, or its path in the optimizer.
    """
    item, _, path = key.partition("/")
    if item in SITES:
        return 1 + cell_dims(path, ndim - 1)
    if ".blocks." not in f".{key}" or ndim == 0:
        return 0
    return 2 if ndim > 2 and any(name in key for name in EXPERTS) else 1


def mixed(bits: Any, position: Any) -> tuple[Any, Any]:
    """Returns two mixes of a number's bits and its position; uint32, of NumPy or JAX.

    For each position the first maps no two numbers to one, so a single changed number always shows.
    """
    x = (bits ^ (position * SPREAD)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    x = x ^ (x >> 13)
    return x, (x * THIRD) ^ (x >> 16)


class ShardPositions(NamedTuple):
    """Positions of an array's shards.

    Attributes:
      facts: a row for each device of the mesh, sharded over all axes: whether its shard is the
        first copy, then the shard's start along each dimension.
      starts: the same on the host; None where the shard is not the first copy.
      shard: the shape of a shard.
    """

    facts: jax.Array
    starts: tuple[tuple[int, ...] | None, ...]
    shard: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _place(sharding: NamedSharding, shape: tuple[int, ...]) -> ShardPositions:
    mesh, indices = sharding.mesh, sharding.devices_indices_map(shape)
    assert isinstance(mesh, Mesh), "a state lies on devices"
    seen: set[tuple[int, ...]] = set()
    starts: list[tuple[int, ...] | None] = []
    rows = np.zeros((mesh.size, 1 + len(shape)), np.uint32)
    for row, device in zip(rows, mesh.devices.flat, strict=True):
        start = tuple(part.start or 0 for part in indices[device])
        starts.append(None if start in seen else start)
        row[:] = (start not in seen, *start)
        seen.add(start)
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    facts = jax.make_array_from_callback(rows.shape, spread, lambda index: rows[index])
    return ShardPositions(facts, tuple(starts), sharding.shard_shape(shape))


def forget_places() -> None:
    """Clears the cache: its arrays live on devices that may be gone."""
    _place.cache_clear()


def _on_a_mesh(sharding: Any) -> NamedSharding:
    """Returns the sharding of an array as one on a mesh; an array of one device has a mesh too."""
    if isinstance(sharding, NamedSharding):
        return sharding
    (device,) = sharding.device_set
    return NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())


@functools.partial(jax.jit, static_argnames=("sharding", "dims"))
def _sums(x: jax.Array, facts: jax.Array, *, sharding: NamedSharding, dims: int) -> jax.Array:
    """Returns the two sums of every cell over each device's shard: uint32 [devices, C..., 2]."""
    shape, mesh = x.shape, sharding.mesh
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def sums_of(x: jax.Array, first: jax.Array, facts: jax.Array) -> jax.Array:
        inside = range(dims, x.ndim)
        position_R = jnp.full(x.shape[dims:], first, jnp.uint32)
        for axis in inside:
            place = jax.lax.broadcasted_iota(jnp.uint32, position_R.shape, axis - dims)
            # Modulo 2^32, like the sums.
            stride = np.uint32(strides[axis] & 0xFFFFFFFF)
            position_R += (place + facts[0, 1 + axis]) * stride
        words = mixed(_bits(x), position_R)
        sums = jax.lax.reduce(
            words, (ZERO, ZERO), lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(inside)
        )
        return jnp.stack(sums, axis=-1)

    def by_rows(x: jax.Array, facts: jax.Array) -> jax.Array:
        """The same for an array on the host, of which some rows at a time are on the device."""
        rows = 1 if dims else len(x) // pieces(len(x), x.size)
        split = x.reshape(-1, rows, *x.shape[1:])

        def of_rows(index: jax.Array) -> jax.Array:
            own = to_device(jax.lax.dynamic_index_in_dim(split, index, keepdims=False))
            behind = 0 if dims else strides[0] * rows & 0xFFFFFFFF
            return sums_of(own, index.astype(jnp.uint32) * np.uint32(behind), facts)

        sums = jax.lax.map(of_rows, jnp.arange(len(split)))
        return sums.reshape(*x.shape[:dims], 2) if dims else jnp.sum(sums, axis=0, dtype=jnp.uint32)

    def of_device(x: jax.Array, facts: jax.Array) -> jax.Array:
        def add_up() -> jax.Array:
            return by_rows(x, facts) if is_on_host(x) else sums_of(x, jnp.uint32(0), facts)

        none = jnp.zeros((*x.shape[:dims], 2), jnp.uint32)
        return jax.lax.cond(facts[0, 0] > 0, add_up, lambda: none)[None]

    each = PartitionSpec(mesh.axis_names)
    in_specs = (sharding.spec, each)
    mapped = jax.shard_map(of_device, mesh=mesh, in_specs=in_specs, out_specs=each, check_vma=False)
    return mapped(x, facts)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of numbers of four bytes at most, as uint32."""
    if x.dtype.itemsize == 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    narrow = {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, narrow).astype(jnp.uint32)


class ArraySums(NamedTuple):
    """Sums of one array under way on the devices (`_sums`)."""

    shape: tuple[int, ...]
    dtype: str
    place: ShardPositions
    sums: jax.Array

    def here(self, dims: int) -> dict[str, Any]:
        """Waits for this process's part of the sums, and returns it as JSON values.

        Its parts have for each shard: start and shape of its cells, numbers per cell, sums.
        """
        parts, shard = [], self.place.shard
        for piece in self.sums.addressable_shards:
            start = self.place.starts[piece.index[0].start or 0]
            if start is not None:
                numbers = math.prod(shard[dims:])
                parts.append([start[:dims], shard[:dims], numbers, _base64(piece.data)])
        return {"shape": list(self.shape), "dtype": self.dtype, "parts": parts}


class DeviceSums(NamedTuple):
    """Sums under way on the devices, by array."""

    arrays: dict[str, ArraySums]

    def here(self) -> dict[str, Any]:
        """Waits for this process's part of the sums, and returns it as JSON values."""
        return {key: x.here(cell_dims(key, len(x.shape))) for key, x in self.arrays.items()}


def add_up(arrays: Mapping[str, jax.Array]) -> DeviceSums:
    """Starts to add up arrays on their devices. Does not wait; the arrays may be donated after it.

    All processes call it.
    """
    found = {}
    for key, x in arrays.items():
        sharding = _on_a_mesh(x.sharding)
        place = _place(sharding, x.shape)
        sums = _sums(x, place.facts, sharding=sharding, dims=cell_dims(key, x.ndim))
        found[key] = ArraySums(x.shape, x.dtype.name, place, sums)
    return DeviceSums(found)


def device_sums(x: jax.Array) -> list[tuple[tuple[int, ...], int, str]]:
    """Returns where each shard of this process starts, its device, and a digest of the shard.

    Copies of a shard have the same digest. All processes call it.
    """
    sharding = _on_a_mesh(x.sharding)
    facts, dims = _place(sharding, x.shape).facts, cell_dims("", x.ndim)
    every = facts.at[:, 0].set(1)  # each copy, not the first alone
    sums = _sums(x, every, sharding=sharding, dims=dims)
    digests = {piece.device.id: _base64(piece.data) for piece in sums.addressable_shards}
    return [
        (tuple(part.start or 0 for part in shard.index), shard.device.id, digests[shard.device.id])
        for shard in x.addressable_shards
    ]


def _base64(sums: jax.Array) -> str:
    return base64.b64encode(np.asarray(sums).astype("<u4").tobytes()).decode()


def together(everywhere: Iterable[Mapping[str, Any]]) -> dict[str, ArrayDigests]:
    """Returns the digests of whole arrays from the sums of all processes (`DeviceSums.here`)."""
    sums: dict[str, np.ndarray] = {}
    seen: dict[str, int] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for here in everywhere:
        for key, facts in here.items():
            shape = tuple(facts["shape"])
            kinds[key] = (shape, facts["dtype"])
            cells = shape[: cell_dims(key, len(shape))]
            total = sums.setdefault(key, np.zeros((*cells, 2), np.uint32))
            for start, size, numbers, text in facts["parts"]:
                part = np.frombuffer(base64.b64decode(text), "<u4").reshape(*size, 2)
                total[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += part
                seen[key] = seen.get(key, 0) + math.prod(size) * numbers
    for key, (shape, _) in kinds.items():
        if (added := seen.get(key, 0)) != math.prod(shape):
            raise ValueError(f"of {key} {added:,} of {math.prod(shape):,} numbers were added up")
    return {key: ArrayDigests(*kinds[key], _hexadecimal(total)) for key, total in sums.items()}


def _hexadecimal(sums: np.ndarray) -> np.ndarray:
    pairs = sums.reshape(-1, 2).tolist()
    digits = np.array([f"{one:08x}{other:08x}" for one, other in pairs], "<U16")
    return digits.reshape(sums.shape[:-1])


def digest_of_zeros(numbers: int) -> str:
    """Returns the digest of a cell of `numbers` zeros."""
    sums = np.zeros(2, np.uint32)
    for at in range(0, numbers, BLOCK):
        position = np.arange(at, min(at + BLOCK, numbers), dtype=np.uint64).astype(np.uint32)
        words = mixed(np.zeros_like(position), position)
        sums += np.array([word.sum(dtype=np.uint32) for word in words], np.uint32)
    return str(_hexadecimal(sums))
