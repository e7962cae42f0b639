"""Reads parts of a checkpoint's weights from its files: no device, and not the rest of them.

Orbax stores an item as one key-value store in the format OCDBT, and in it an array in the format
Zarr under each key. Both formats are TensorStore's (docs/formats/checkpoint.md).
"""

import functools
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from moejax.hf.rules import Index

CACHE_BYTES = 4 << 30  # of pieces that many tensors share, as older checkpoints have
INDEX_BYTES = 100 << 20  # of the store's index: Orbax's own limit


class StoredWeights:
    """The parameters and selection biases of one checkpoint. Several threads may read.

    What is read of one parameter after the other should follow each other: two arrays stay open.
    """

    def __init__(self, step: Path):
        """Takes a verified checkpoint's directory."""
        base = {"driver": "file", "path": f"{step.absolute() / 'weights'}/"}
        self._store: dict[str, Any] = {
            "driver": "ocdbt",
            "base": base,
            "cache_pool": "cache_pool#ocdbt",
        }
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

    def _open(self, path: str, whole: tuple[bool, ...]) -> ts.TensorStore:
        """Opens an array, with a cache for pieces that its parts share.

        Args:
          whole: which dimensions each part has whole.
        """
        spec = {
            "driver": "zarr",
            "kvstore": {**self._store, "path": self._key_of(path)},
            "fill_missing_data_reads": False,
            "recheck_cached_data": False,
        }
        array = ts.open(spec, read=True, context=self._context).result()
        limit = min(CACHE_BYTES, _shared_bytes(array, whole))
        context = ts.Context({"cache_pool": {"total_bytes_limit": limit}}, parent=self._context)
        return ts.open(spec, read=True, context=context).result()

    def _key_of(self, path: str) -> str:
        """Returns the key of a parameter or selection bias in the item."""
        for key in (f"params.{path}/", f"balance.{path}/"):
            if self._keys.read(f"{key}.zarray").result().state == "value":
                return key
        raise KeyError(f"the checkpoint has no weights {path}")


def _shared_bytes(array: ts.TensorStore, whole: tuple[bool, ...]) -> int:
    """Returns the bytes of two rows of pieces, if parts share them; 0 if each has its own.

    A row is what one part is read from.
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
