"""Writes a model's weights as a folder of safetensors files.

The header of every file is known before the first tensor is read, so tensors stream: a thread reads
one, turns it, writes it at its place and forgets it; of a tensor with all experts of a layer it
takes one expert at a time. Bytes in flight are bounded. Each process writes its own files, and
reads no other tensors.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from moejax.errors import InputError, writing
from moejax.hf.families.family import Family
from moejax.hf.families.tensors import AHEAD, AHEAD_COPIES
from moejax.hf.files import INDEX, SINGLE
from moejax.hf.in_flight import map_in_flight
from moejax.hf.load import parameters_of, without_rule
from moejax.hf.rules import ReadPart, Tensor, tensors_of
from moejax.runtime.processes import Processes
from moejax.step.model import ModelDef
from moejax.step.state import Tree

TOGETHER_BYTES = 16 << 20  # at most, of a tensor whose experts are written together
READ_BYTES = 4  # at most, of a number that is read
FILE_BYTES = 5 * 10**9  # at most, of a file, as transformers cuts
DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor at its place in a file."""

    tensor: Tensor
    dtype: str  # of DTYPES
    start: int  # offset in the file's data

    @property
    def stop(self) -> int:
        """The end of its bytes in the file's data."""
        return self.start + bytes_of(self.tensor, self.dtype)

    def pieces(self, values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the tensor's values in runs, with their offsets in the file's data.

        They are one run, unless other parameters have rows of the tensor too.
        """
        rows = self.tensor.rows
        if rows is None:
            yield self.start, values
            return
        of_row = bytes_of(self.tensor, self.dtype) // (rows.parts * rows.of_part)
        at = 0
        for start, stop in rows.pieces(0, len(values)):
            yield self.start + start * of_row, values[at : at + stop - start]
            at += stop - start

    def experts(self) -> Iterator["PlacedTensor"]:
        """Yields the tensor of each expert, if all of a layer are together in a large one.

        Otherwise it yields the tensor itself.
        """
        view = self.tensor.view
        if view.groups[0] != "E" or self.stop - self.start <= TOGETHER_BYTES:
            yield self
            return
        for expert in range(view.size["E"]):
            one = replace(view, groups=view.groups[1:], at=(("E", expert), *view.at))
            placed = replace(self, tensor=replace(self.tensor, view=one))
            yield replace(placed, start=self.start + expert * bytes_of(placed.tensor, self.dtype))


@dataclass(frozen=True)
class OutFile:
    """A file and its tensors in order."""

    name: str
    placed: tuple[PlacedTensor, ...]

    def header(self) -> bytes:
        """Returns the bytes before the data."""
        return header_of(
            (p.tensor.name, DTYPES[p.dtype][0], p.tensor.shape, p.start, p.stop)
            for p in self.placed
        )


def header_of(tensors: Iterable[tuple[str, str, Sequence[int], int, int]]) -> bytes:
    """Returns the bytes before a file's data.

    Args:
      tensors: name, dtype, shape, and where it starts and stops in the data.
    """
    facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape, start, stop in tensors:
        facts[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor, dtype: str) -> int:
    """Returns a tensor's bytes in a file."""
    return math.prod(tensor.shape) * DTYPES[dtype][1].itemsize


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
      dtype: dtype of the weights; selection biases stay in float32.
    Raises:
      InputError: if the family has no tensor for a parameter.
    """
    parameters = parameters_of(model, params, router_bias)
    zeros = without_rule(family, parameters)
    held = {path: p for path, p in parameters.items() if path not in zeros}
    cfg = model.cfg.model
    tensors = tensors_of((*family.rules, *family.experts[0]), held, cfg)
    if cfg.predict_ahead and set(AHEAD).issubset(family.rules):
        # Libraries that predict with that layer look for the embedding and the head there.
        layer = f"model.layers.{cfg.num_layers}."
        copies = [replace(r, theirs=layer + r.theirs) for r in AHEAD_COPIES if r.ours in held]
        tensors += tensors_of(copies, {r.ours: held[r.ours] for r in copies}, cfg)
    files: list[list[PlacedTensor]] = [[]]
    for tensor in tensors:
        own = "float32" if tensor.wide else dtype
        start = files[-1][-1].stop if files[-1] else 0
        if files[-1] and files[-1][-1].tensor.name == tensor.name:  # of another parameter
            files[-1].append(PlacedTensor(tensor, own, files[-1][-1].start))
            continue
        if files[-1] and start + bytes_of(tensor, own) > file_bytes:
            files.append([])
            start = 0
        files[-1].append(PlacedTensor(tensor, own, start))
    if len(files) == 1:
        return [OutFile(SINGLE, tuple(files[0]))]
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    return [OutFile(name, tuple(placed)) for name, placed in zip(names, files, strict=True)]


def check_biases(family: Family, model: ModelDef, params: Tree, bias: Tree, read: ReadPart) -> None:
    """Refuses selection biases that a family's files cannot hold.

    Args:
      params, bias: shapes of parameters and selection biases.
    Raises:
      InputError: if one is not zero.
    """
    for path in sorted(without_rule(family, parameters_of(model, params, bias))):
        if np.any(read(path, ())):
            raise InputError(
                f"{family.name} has no tensor for the selection biases of loss-free balancing "
                f"({path}), and they are not zero. Without them the router would choose other "
                "experts. Name another family with --family."
            )


def files_of(files: Sequence[OutFile], processes: Processes) -> Sequence[OutFile]:
    """Returns the files that this process writes."""
    return files[processes.index :: processes.count]


def write_weights(
    files: Sequence[OutFile],
    folder: Path,
    read: ReadPart,
    processes: Processes,
    progress: Callable[[int], None] = lambda elements: None,
) -> None:
    """Writes the files, and their index if there are several. All processes call it.

    Args:
      folder: exists; nothing in it is read.
      read: called for all tensors of a parameter before the next one's.
      progress: called with the number of elements of each tensor that this process wrote.
    """
    with ExitStack() as stack:
        jobs = [
            (output, part)
            for file in files_of(files, processes)
            for output in [stack.enter_context(_Output(folder, file))]
            for place in file.placed
            for part in place.experts()
        ]
        jobs.sort(key=lambda job: job[1].tensor.path)
        for place in map_in_flight(partial(_write_tensor, read), jobs, _bytes_held):
            progress(place.tensor.view.elements)
    processes.gather("written")
    if processes.first and len(files) > 1:
        write_index(folder, files)


def write_index(
    folder: Path,
    files: Sequence[OutFile],
    others: Mapping[str, str] = MappingProxyType({}),
    further: int = 0,
) -> None:
    """Writes the index of files.

    Args:
      others: files of further tensors by name.
      further: bytes of these.
    """
    where = {place.tensor.name: file.name for file in files for place in file.placed}
    total = total_bytes(files) + further
    index = {"metadata": {"total_size": total}, "weight_map": {**where, **others}}
    with writing(folder / INDEX):
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes_held(job: tuple["_Output", PlacedTensor]) -> int:
    """Returns the bytes of a tensor as it is read and as it is written."""
    _, place = job
    return READ_BYTES * place.tensor.view.elements + bytes_of(place.tensor, place.dtype)


def _write_tensor(read: ReadPart, job: tuple["_Output", PlacedTensor]) -> PlacedTensor:
    output, place = job
    values = read(place.tensor.path, place.tensor.index)
    output.write(place, place.tensor.view.to_tensor(values, DTYPES[place.dtype][1]))
    return place


class _Output:
    """One open file. A context manager, which syncs it at its end."""

    def __init__(self, folder: Path, file: OutFile):
        self._path, self._header = folder / file.name, file.header()

    def __enter__(self) -> "_Output":
        with writing(self._path):
            self._file = self._path.open("wb", buffering=0)
            _write_all(self._file.fileno(), self._header, 0)
        return self

    def write(self, place: PlacedTensor, values: np.ndarray) -> None:
        """Writes a tensor at its place; several threads may write."""
        if values.shape != place.tensor.view.shape:
            raise ValueError(f"{place.tensor.name} has another shape")
        with writing(self._path):
            for start, piece in place.pieces(values):
                data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                _write_all(self._file.fileno(), data, len(self._header) + start)

    def __exit__(self, *error: object) -> None:
        with self._file, writing(self._path):
            os.fsync(self._file.fileno())


def _write_all(file: int, data: Any, offset: int) -> None:
    """Writes all bytes; the system may take them in parts."""
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def total_elements(files: Sequence[OutFile]) -> int:
    """Returns the number of elements in all files."""
    return sum(place.tensor.view.elements for file in files for place in file.placed)


def total_bytes(files: Sequence[OutFile]) -> int:
    """Returns the bytes of all files together, without headers."""
    return sum(file.placed[-1].stop for file in files)
