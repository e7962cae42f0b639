"""Reads parts of a folder's tensors, of any dtype, without reading whole files.

Quantised tensors appear dequantised under the name of the weight: 8-bit floats with a scale a block
(DeepSeek-V3, MiniMax-M2), and MXFP4 (gpt-oss: 4-bit floats, 32 with a scale). Letters: R rows,
C columns, G blocks of a row, E experts.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.files import CONFIG, ITEM_BYTES, Stored, find_tensors
from moejax.hf.text import by_own_names, read_text_config
from moejax.hf.views import Range

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
PLAIN = ("F32", "BF16", "F16")
E4M3 = ("e4m3", "float8_e4m3fn")  # names in `quantization_config`
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
# A piece of a row below this is read with its neighbours, a block of rows at a time.
PIECE_BYTES, BLOCK_BYTES = 1 << 14, 1 << 23
SAMPLE_BYTES = 4096  # of a tensor, which tells models apart
# Values of the 16 codes of e2m1, OCP Microscaling Formats (2023), section 5.3.3.
POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([POSITIVE, -POSITIVE])


@dataclass(frozen=True)
class Weight:
    """A tensor under the name that models give it.

    Attributes:
      stored: its bytes in a file.
      scales: its scales, if it is quantised.
      block: rows and columns that share a scale.
    """

    shape: tuple[int, ...]
    stored: Stored
    scales: Stored | None = None
    block: tuple[int, int] = (1, 1)


class Folder:
    """A folder of weights, opened for reading. A context manager."""

    def __init__(self, path: Path):
        """Reads the config and all headers.

        Raises:
          InputError: see `hf.files`, and for weights quantised in another way.
        """
        if not path.is_dir():
            raise InputError(
                f"no folder of weights. {path} is no directory. It must hold config.json and "
                "safetensors files. Check the path."
            )
        self.path = path
        self.config: dict[str, Any] = read_text_config(path / CONFIG)
        found = find_tensors(path)
        # The key is left behind where weights were dequantised.
        plain = all(stored.dtype in PLAIN for stored in found.values())
        block = (1, 1) if plain else _block_of(self.config.get("quantization_config"))
        self.weights = by_own_names(_join_quantised(found, block), self.config)
        self._open = ExitStack()
        self._files: dict[Path, int] = {}
        self._opening = Lock()

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        parts = (p for w in self.weights.values() for p in (w.stored, w.scales) if p is not None)
        return sum(math.prod(p.shape) * ITEM_BYTES[p.dtype] for p in parts)

    @property
    def narrow(self) -> bool:
        """True if less than half of the numbers are stored in float32."""
        wide = sum(math.prod(w.shape) for w in self.weights.values() if w.stored.dtype == "F32")
        return 2 * wide < sum(math.prod(w.shape) for w in self.weights.values())

    def read(self, name: str, ranges: tuple[Range, ...]) -> np.ndarray:
        """Returns a part of a tensor; a quantised one as float32."""
        weight = self.weights[name]
        if weight.scales is None:
            return self._read(weight.stored, ranges)
        if weight.stored.dtype == "U8":
            return self._read_mxfp4(weight, ranges)
        return self._read_blocked(weight, ranges)

    def _read_blocked(self, weight: Weight, ranges: tuple[Range, ...]) -> np.ndarray:
        """Multiplies 8-bit floats by the scale of their block."""
        assert weight.scales is not None
        values = self._read(weight.stored, ranges).astype(np.float32)
        covering, repeats = [], []
        for (start, stop), size in zip(ranges, weight.block, strict=True):
            covering.append((start // size, -(-stop // size) if stop > start else start // size))
            repeats.append(np.arange(start, stop) // size - start // size)
        scale_RC = self._read(weight.scales, tuple(covering)).astype(np.float32)
        return values * scale_RC[np.ix_(*repeats)]

    def _read_mxfp4(self, weight: Weight, ranges: tuple[Range, ...]) -> np.ndarray:
        """Dequantises [E, R, G, 16] bytes of two numbers each to [E, columns, R]."""
        assert weight.scales is not None
        experts, (start, stop), rows = ranges
        blocks = (start // 32, -(-stop // 32) if stop > start else start // 32)
        byte_ERG = self._read(weight.stored, (experts, rows, blocks, (0, 16)))
        scale_ERG = self._read(weight.scales, (experts, rows, blocks)).astype(np.int32) - 127
        # The lower half of a byte comes first.
        code = np.stack([byte_ERG & 15, byte_ERG >> 4], axis=-1)
        value = np.ldexp(E2M1[code], scale_ERG[..., None, None])
        value_ERC = value.reshape(*scale_ERG.shape[:2], -1)
        first = start - 32 * blocks[0]
        return value_ERC[..., first : first + stop - start].transpose(0, 2, 1)

    def _read(self, stored: Stored, ranges: tuple[Range, ...]) -> np.ndarray:
        """Returns a part of a tensor as its file holds it."""
        dtype, file = DTYPES[stored.dtype], self._file(stored.file)
        wanted = [stop - start for start, stop in ranges]
        out = np.empty(wanted, dtype)
        if not out.size:
            return out
        if not stored.shape:
            raise ValueError("no parameter is a scalar")
        for place, run in _runs(stored.shape, ranges, dtype.itemsize):
            shape = [stop - start for start, stop in run]
            target = out[tuple(place)]
            whole = list(target.shape) == shape and target.flags.c_contiguous
            buffer = target if whole else np.empty(shape, dtype)
            first = int(np.ravel_multi_index([start for start, _ in run], stored.shape))
            _read_exactly(file, buffer, stored.start + first * dtype.itemsize, stored.file)
            if not whole:
                # Dimensions that were not walked were read whole.
                inner = [slice(*wanted) for wanted in ranges[len(place) :]]
                target[...] = buffer[tuple([slice(None)] * len(place) + inner)]
        return out

    def _file(self, path: Path) -> int:
        with self._opening:  # two threads would open it twice, and close one of them twice
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
                self._open.callback(os.close, self._files[path])
            return self._files[path]


def _runs(
    shape: tuple[int, ...], ranges: tuple[Range, ...], itemsize: int
) -> Iterator[tuple[list[slice], list[Range]]]:
    """Yields contiguous runs of bytes, of `BLOCK_BYTES` or a row, that hold a part of a tensor.

    Each is given as slices of the result along the first dimensions, and as the ranges of the
    tensor that are read. Small pieces of rows are read together with the bytes between them.
    """
    # Dimensions after `split` are whole; those before it are walked.
    split = len(shape)
    while split > 0 and ranges[split - 1] == (0, shape[split - 1]):
        split -= 1
    split = max(split - 1, 0)
    piece = math.prod(stop - start for start, stop in ranges[split:]) * itemsize
    if piece < PIECE_BYTES and split > 0:
        split -= 1
    whole = [(0, size) for size in shape[split + 1 :]]
    step = max(1, BLOCK_BYTES // max(1, math.prod(shape[split + 1 :]) * itemsize))
    start, stop = ranges[split]
    for outer in product(*(range(*r) for r in ranges[:split])):
        place = [slice(at - r[0], at - r[0] + 1) for at, r in zip(outer, ranges, strict=False)]
        for at in range(start, stop, step):
            last = min(at + step, stop)
            walked = [(x, x + 1) for x in outer]
            yield [*place, slice(at - start, last - start)], [*walked, (at, last), *whole]


def _read_exactly(file: int, buffer: np.ndarray, offset: int, path: Path) -> None:
    """Fills a buffer; large reads come in parts."""
    view = memoryview(buffer.reshape(-1).view(np.uint8))
    while view:
        count = os.preadv(file, [view], offset)
        if count <= 0:
            raise InputError(f"{path} ended while it was read. Was it changed? Copy it again.")
        view, offset = view[count:], offset + count


def digest_of_samples(folder: Folder) -> str:
    """Returns a digest of a model: its config, and each tensor's name, shape and first bytes.

    It tells models apart without reading all of them; it does not find damage.
    """
    digest = hashlib.sha256(json.dumps(folder.config, sort_keys=True).encode())
    for name, weight in sorted(folder.weights.items()):
        stored = weight.stored
        digest.update(json.dumps([name, stored.dtype, stored.shape]).encode())
        with stored.file.open("rb") as opened:
            opened.seek(stored.start)
            size = math.prod(stored.shape) * ITEM_BYTES[stored.dtype]
            digest.update(opened.read(min(size, SAMPLE_BYTES)))
    return digest.hexdigest()


def _block_of(quantised: Any) -> tuple[int, int]:
    """Returns rows and columns that share a scale, as `quantization_config` says.

    Raises:
      InputError: for another way to quantise.
    """
    if quantised is None:
        return (128, 128)
    facts = quantised if isinstance(quantised, dict) else {}
    if facts.get("quant_method") == "mxfp4":
        return (1, 1)
    known = facts.get("quant_method") == "fp8" and facts.get("fmt", "e4m3") in E4M3
    match facts.get("weight_block_size"):
        case [int(rows), int(columns)] if known and rows > 0 and columns > 0:
            return (rows, columns)
    raise InputError(
        f"weights are quantised in a way that is not read: `quantization_config` is "
        f"{short(quantised)}. Known are fp8 (e4m3) with a weight_block_size, and mxfp4. Choose a "
        "copy of the model in bfloat16."
    )


def _join_quantised(found: dict[str, Stored], block: tuple[int, int]) -> dict[str, Weight]:
    """Returns tensors under the names that models have, scales joined to their weights."""
    weights: dict[str, Weight] = {}
    for name, stored in found.items():
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in found:
            continue
        scaled = found.get(name.removesuffix(SCALE)) if name.endswith(SCALE) else None
        if scaled is not None and scaled.dtype == "F8_E4M3":
            continue
        if name.endswith(BLOCKS) and stored.dtype == "U8":
            own = name.removesuffix(BLOCKS)
            weights[own] = _mxfp4(name, stored, found.get(own + SCALES))
        elif stored.dtype == "F8_E4M3":
            weights[name] = _blocked(name, stored, found.get(name + SCALE), block)
        elif stored.dtype in PLAIN:
            weights[name] = Weight(stored.shape, stored)
        else:
            raise InputError(
                f"tensor {short(name)} has dtype {stored.dtype}, which no weight has by itself. "
                "Copy the folder again."
            )
    return weights


def _mxfp4(name: str, stored: Stored, scales: Stored | None) -> Weight:
    shape = stored.shape
    fits = (
        len(shape) == 4
        and shape[3] == 16
        and scales is not None
        and (scales.shape, scales.dtype) == (shape[:3], "U8")
    )
    if not fits:
        seen = "no scales" if scales is None else f"scales {scales.dtype} of {scales.shape}"
        raise InputError(
            f"tensor {short(name)} has shape {shape} and {seen}. MXFP4 blocks are of shape "
            "(experts, rows, blocks, 16), with a U8 scale each. Copy the folder again."
        )
    return Weight((shape[0], 32 * shape[2], shape[1]), stored, scales)


def _blocked(name: str, stored: Stored, scales: Stored | None, block: tuple[int, int]) -> Weight:
    wanted = tuple(-(-size // along) for size, along in zip(stored.shape, block, strict=False))
    fits = len(stored.shape) == 2 and scales is not None and scales.shape == wanted
    if not fits or scales is None or scales.dtype not in PLAIN:
        seen = "no scales" if scales is None else f"scales {scales.dtype} of {scales.shape}"
        raise InputError(
            f"tensor {short(name)} of shape {stored.shape} has {seen}. A matrix of 8-bit floats "
            f"has a scale for each block of {block[0]} x {block[1]}, here {wanted}. Copy the "
            "folder again."
        )
    return Weight(stored.shape, stored, scales, block)
