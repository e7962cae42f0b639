"""Writes a model's arrays as a folder of safetensors files.

The header of every file is known before the first tensor is read, so tensors stream: one is
assembled, written at its place and forgotten. Each process writes the files that are its own.
Everything is written beside and renamed at the end.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moejax.errors import InputError, writing
from moejax.hf.assemble import assemble
from moejax.hf.families.family import Family
from moejax.hf.files import INDEX, SINGLE
from moejax.hf.load import flat, parameters_of, without_rule
from moejax.hf.rules import Tensor, tensors_of
from moejax.runtime.processes import Processes
from moejax.step.model import ModelDef
from moejax.step.state import Tree

FILE_BYTES = 5 * 10**9  # of a file at most, as transformers cuts
DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}


@dataclass(frozen=True)
class Placed:
    """A tensor at its place in a file."""

    tensor: Tensor
    dtype: str  # of DTYPES
    start: int  # offset in the file's data

    @property
    def stop(self) -> int:
        """The end of its bytes in the file's data."""
        return self.start + bytes_of(self.tensor, self.dtype)


@dataclass(frozen=True)
class OutFile:
    """A file and its tensors in order."""

    name: str
    placed: tuple[Placed, ...]

    def header(self) -> bytes:
        """Returns the bytes before the data."""
        facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for place in self.placed:
            facts[place.tensor.name] = {
                "dtype": DTYPES[place.dtype][0],
                "shape": list(place.tensor.view.shape),
                "data_offsets": [place.start, place.stop],
            }
        text = json.dumps(facts, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor, dtype: str) -> int:
    """Returns a tensor's bytes."""
    return tensor.view.elements * DTYPES[dtype][1].itemsize


def plan_files(
    family: Family,
    model: ModelDef,
    params: Tree,
    router_bias: Tree,
    dtype: str,
    file_bytes: int = FILE_BYTES,
) -> list[OutFile]:
    """Returns the files of a model.

    Args:
      params, router_bias: arrays or shapes.
      dtype: of the weights; selection biases stay in float32.
    Raises:
      InputError: if the family has no tensor for a parameter.
    """
    parameters = parameters_of(model, params, router_bias)
    zeros = without_rule(family, parameters)
    held = {path: p for path, p in parameters.items() if path not in zeros}
    tensors = tensors_of((*family.rules, *family.experts[0]), held, model.cfg.model)
    files: list[list[Placed]] = [[]]
    for tensor in tensors:
        own = "float32" if tensor.wide else dtype
        start = files[-1][-1].stop if files[-1] else 0
        if files[-1] and start + bytes_of(tensor, own) > file_bytes:
            files.append([])
            start = 0
        files[-1].append(Placed(tensor, own, start))
    if len(files) == 1:
        return [OutFile(SINGLE, tuple(files[0]))]
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    return [OutFile(name, tuple(placed)) for name, placed in zip(names, files, strict=True)]


def check_biases(family: Family, model: ModelDef, params: Tree, router_bias: Tree) -> None:
    """Refuses selection biases that a family's files cannot hold.

    Raises:
      InputError: if one is not zero.
    """
    zeros = without_rule(family, parameters_of(model, params, router_bias))
    for path, bias in flat(router_bias).items():
        if path in zeros and np.any(np.asarray(bias.addressable_data(0))):
            raise InputError(
                f"{family.name} has no tensor for the selection biases of loss-free balancing "
                f"({path}), and they are not zero. Without them the router would choose other "
                "experts. Name another family with --family."
            )


def write_weights(
    files: Sequence[OutFile],
    folder: Path,
    params: Tree,
    router_bias: Tree,
    processes: Processes,
    progress: Callable[[int], None] = lambda elements: None,
) -> None:
    """Writes the files, and their index if there are several. All processes call it.

    Args:
      folder: exists; nothing in it is read.
      params, router_bias: sharded arrays.
      progress: called with the number of elements of each tensor, in process 0 for all.
    """
    arrays = {**flat(params), **flat(router_bias)}
    count = processes.count
    for first in range(0, len(files), count):
        together = files[first : first + count]
        own = together[processes.index] if processes.index < len(together) else None
        with _Output(folder, own) as output:
            # By turns, so that all processes of a round write at the same time.
            for places in zip_longest(*(file.placed for file in together)):
                for file, place in zip(together, places, strict=True):
                    if place is not None:
                        _write_tensor(arrays, place, file is own, output, processes)
                        progress(place.tensor.view.elements)
    processes.gather("written")
    if processes.first and len(files) > 1:
        _write_index(files, folder)


def _write_tensor(
    arrays: Mapping[str, jax.Array],
    place: Placed,
    is_own: bool,
    output: "_Output",
    processes: Processes,
) -> None:
    dtype = DTYPES[place.dtype][1]
    array = arrays[place.tensor.path]
    if not is_own and array.is_fully_addressable:
        return
    values = assemble(array, place.tensor, dtype, processes)
    if is_own:
        output.write(place, place.tensor.view.to_tensor(values))


class _Output:
    """One open file, or none. A context manager, which syncs the file at its end."""

    def __init__(self, folder: Path, file: OutFile | None):
        self._path = None if file is None else folder / file.name
        self._header = b"" if file is None else file.header()
        self._size = 0 if file is None else file.placed[-1].stop

    def __enter__(self) -> "_Output":
        if self._path is not None:
            with writing(self._path):
                self._file = self._path.open("wb")
                self._file.write(self._header)
        return self

    def write(self, place: Placed, values: np.ndarray) -> None:
        """Appends a tensor, which comes at its place."""
        assert self._path is not None
        assert self._file.tell() == len(self._header) + place.start, "tensors come in order"
        with writing(self._path):
            self._file.write(memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8)))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._path is None:
            return
        with self._file, writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
        assert kind is not None or size == len(self._header) + self._size


def _write_index(files: Sequence[OutFile], folder: Path) -> None:
    where = {place.tensor.name: file.name for file in files for place in file.placed}
    total = sum(file.placed[-1].stop for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    with writing(folder / INDEX):
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def total_elements(files: Sequence[OutFile]) -> int:
    """Returns the numbers in all files together."""
    return sum(math.prod(p.tensor.view.shape) for file in files for p in file.placed)


def total_bytes(files: Sequence[OutFile]) -> int:
    """Returns the bytes of all files together, without headers."""
    return sum(file.placed[-1].stop for file in files)
