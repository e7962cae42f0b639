"""Reads and writes parts of a checkpoint's weights in its files, without a device.

Orbax stores an item as one key-value store in the format OCDBT, and in it an array in the format
Zarr under each key. Both formats are TensorStore's (docs/formats/checkpoint.md).
"""

import functools
import hashlib
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from moejax.errors import RunError
from moejax.hf.rules import Index
from moejax.hf.views import Bounds

CACHE_BYTES = 4 << 30  # for pieces that many tensors share, as in older checkpoints
INDEX_BYTES = 100 << 20  # for the store's index; Orbax's own limit
FILE_BYTES = 128 << 20  # about; digests of several files are computed in parallel
PIECE_BYTES = 64 << 20  # at most, of one array
# Settings of Orbax's stores, which are merged into an item's store.
CONFIG = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}


def apart(key: str, ndim: int, *, sites: bool = False) -> tuple[int, ...]:
    """Returns the dimensions that are cut at every position: layers, and experts.

    So a restore onto smaller shards reads little, and an export reads each tensor alone.

    Args:
      sites: whether a dimension of sites comes first. It is cut too.
    """
    if sites:
        return (0, *(1 + axis for axis in apart(key, ndim - 1)))
    if ".blocks." not in key or ndim < 3:
        return ()
    return (0, 1) if ".moe." in key and ndim > 3 else (0,)


@dataclass(frozen=True)
class NewArray:
    """An array that is written in pieces: its key in the item, shape, and name of its dtype."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of its pieces, of `PIECE_BYTES` at most; the last ones may be smaller."""
        alone = apart(self.key, len(self.shape))
        sizes = [1 if axis in alone else size for axis, size in enumerate(self.shape)]
        while math.prod(sizes) * np.dtype(self.dtype).itemsize > PIECE_BYTES:
            largest = sizes.index(max(sizes))
            sizes[largest] = -(-sizes[largest] // 2)
        return tuple(sizes)

    def parts(self) -> Iterator[Bounds]:
        """Yields where each piece is: start and stop along each dimension."""
        ranges = [
            [(at, min(at + step, size)) for at in range(0, size, step)]
            for size, step in zip(self.shape, self.piece, strict=True)
        ]
        yield from product(*ranges)

    def digest(self, part: Bounds, values: np.ndarray) -> int:
        """Returns the SHA-256 of one piece: of its array, its place and its numbers."""
        place = json.dumps([self.key, self.shape, self.dtype, part], separators=(",", ":"))
        found = hashlib.sha256(place.encode())
        found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return int.from_bytes(found.digest())


def store_of(item: Path, process: int) -> Path:
    """Returns the directory of one process's part of an item; Orbax merges the parts."""
    return item / f"ocdbt.process_{process}"


class PieceWriter:
    """Writes this process's pieces of the arrays of one item. A context manager.

    Pieces are held until about `FILE_BYTES` of them are together; then they are written and synced
    as one file.
    """

    def __init__(self, store: Path):
        """Takes the directory of this process (`store_of`), and makes it when it writes."""
        self._store = _store_at(store) | {
            "cache_pool": "cache_pool#ocdbt",
            "target_data_file_size": FILE_BYTES,
            "config": CONFIG,
            "assume_config": True,
        }
        self._context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": INDEX_BYTES}})
        self._transaction, self._held = ts.Transaction(atomic=True), 0

    def __enter__(self) -> "PieceWriter":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self._transaction.commit_async().result()
        else:
            self._transaction.abort()

    def create(self, array: NewArray) -> None:
        """Writes an array's shape and dtype. Only one process calls it."""
        self._open(array, create=True)

    def write(self, array: NewArray, part: Bounds, values: np.ndarray) -> None:
        """Writes a piece, maybe later: its values must not change."""
        opened = self._open(array, open=True, assume_metadata=True)
        place = tuple(slice(*bounds) for bounds in part)
        opened[place].write(values, can_reference_source_data_indefinitely=True).copy.result()
        self._held += values.nbytes
        if self._held >= FILE_BYTES:
            self._transaction.commit_async().result()
            self._transaction, self._held = ts.Transaction(atomic=True), 0

    def _open(self, array: NewArray, **how: Any) -> ts.TensorStore:
        spec = {
            "driver": "zarr",
            "kvstore": {**self._store, "path": f"{array.key}/"},
            "metadata": {"shape": array.shape, "chunks": array.piece, "compressor": None},
            "dtype": array.dtype,
            "store_data_equal_to_fill_value": True,
        }
        return ts.open(
            ts.Spec(spec), context=self._context, transaction=self._transaction, **how
        ).result()


def check_written(step: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that a written step has all of its arrays, before it gets a manifest.

    Reads each item's index and the arrays' descriptions, not their numbers.

    Args:
      shapes: shape of each array that it must have, by ITEM/KEY.
    Raises:
      RunError: names an array that is missing, or lacks pieces.
    """
    for item in dict.fromkeys(name.partition("/")[0] for name in shapes):
        store = ts.KvStore.open(_store_at(step / item)).result()
        names = [name.decode().rpartition("/") for name in store.list().result()]
        pieces = Counter(key for key, _, last in names if last != ".zarray")
        of_item = [name for name in shapes if name.startswith(f"{item}/")]
        for name in of_item:
            key = name.removeprefix(f"{item}/")
            known = store.read(f"{key}/.zarray").result()
            if known.state != "value":
                raise _unreadable(step, f"{name} is not there")
            facts, shape = json.loads(known.value), shapes[name]
            cuts = zip(shape, facts["chunks"], strict=False)
            wanted = math.prod(-(-size // cut) for size, cut in cuts)
            if tuple(facts["shape"]) != tuple(shape) or pieces[key] != wanted:
                missing = f"{pieces[key]} of {wanted} pieces, and shape {facts['shape']}"
                raise _unreadable(step, f"{name} has {missing}")


def _unreadable(step: Path, missing: str) -> RunError:
    return RunError(
        f"a checkpoint was written and cannot be read back. {step}: {missing}. It gets no "
        f"manifest, so no start uses it; earlier checkpoints stay. Look at the file "
        f"system, and run the same command again."
    )


def _store_at(folder: Path) -> dict[str, Any]:
    """Returns TensorStore's description of an item's store, or one process's part of it."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}}


class StoredWeights:
    """The parameters and selection biases of one checkpoint. Several threads may read.

    Read all parts of one parameter before the next one's: only two arrays stay open.
    """

    def __init__(self, step: Path):
        """Takes a verified checkpoint's directory."""
        self._store = _store_at(step / "weights") | {"cache_pool": "cache_pool#ocdbt"}
        self._context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": INDEX_BYTES}})
        self._keys = ts.KvStore.open(self._store, context=self._context).result()
        self._lock = threading.Lock()
        self._array = functools.lru_cache(maxsize=2)(self._open)

    def read(self, path: str, index: Index = ()) -> np.ndarray:
        """Returns a part of a parameter or selection bias, as NumPy's array[index] would.

        Args:
          index: positions and whole dimensions (`slice(None)`), the same ones for each part of a
            parameter; dimensions without an entry are whole.
        """
        whole = tuple(isinstance(at, slice) for at in index)
        with self._lock:
            array = self._array(path, whole)
        return array[index].read().result()

    def names(self) -> tuple[str, ...]:
        """Returns the paths of all parameters and selection biases, in alphabetical order."""
        keys = [key.decode() for key in self._keys.list().result()]
        found = (key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray"))
        return tuple(sorted({path.partition(".")[2] for path in found}))

    def _open(self, path: str, whole: tuple[bool, ...]) -> ts.TensorStore:
        """Opens an array, with a cache for pieces that its parts share.

        Args:
          whole: for each dimension, whether every part has all of it.
        """
        keys = (f"params.{path}/", f"balance.{path}/")
        found = [key for key in keys if self._keys.read(f"{key}.zarray").result().state == "value"]
        if not found:
            raise KeyError(f"the checkpoint has no weights {path}")
        spec = {
            "driver": "zarr",
            "kvstore": {**self._store, "path": found[0]},
            "fill_missing_data_reads": False,
            "recheck_cached_data": False,
        }
        array = ts.open(spec, read=True, context=self._context).result()
        limit = min(CACHE_BYTES, _shared_bytes(array, whole))
        context = ts.Context({"cache_pool": {"total_bytes_limit": limit}}, parent=self._context)
        return ts.open(spec, read=True, context=context).result()


def _shared_bytes(array: ts.TensorStore, whole: tuple[bool, ...]) -> int:
    """Returns the bytes of two rows of pieces, if parts share them; 0 if each has its own.

    A row is the pieces from which one part is read.
    """
    pieces: tuple[int, ...] = array.spec().to_json()["metadata"]["chunks"]
    whole = (*whole, *[True] * (array.ndim - len(whole)))
    dims = list(zip(array.shape, pieces, whole, strict=True))
    if not any(piece > 1 for _, piece, is_whole in dims if not is_whole):
        return 0
    row = math.prod(
        -(-size // piece) * piece if is_whole else piece for size, piece, is_whole in dims
    )
    return 2 * row * array.dtype.numpy_dtype.itemsize
