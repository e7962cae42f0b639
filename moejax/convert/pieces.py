"""Writes arrays a piece at a time, so that no process holds a model."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoint.arrays import NewArray, Part, PieceWriter, store_of
from moejax.hf.in_flight import map_in_flight
from moejax.runtime.processes import Processes

# Returns a part of an array: its bounds, and its dtype. Several threads call it.
ReadPiece = Callable[[Part, Any], np.ndarray]
HELD = 2  # a piece, and at most as many bytes of the tensors that it is read from


def write_pieces(
    sources: Mapping[NewArray, ReadPiece],
    item: Path,
    processes: Processes,
    progress: Callable[[int], None] = lambda elements: None,
) -> int:
    """Writes this process's share of the pieces of every array. Reads no others.

    Args:
      sources: for each array, a function that returns its parts.
      item: directory of the stores of all processes.
      progress: called with the elements of each piece.
    Returns:
      the sum of the digests of these pieces.
    """
    total = 0
    with PieceWriter(store_of(item, processes.index)) as writer:
        if processes.first:
            for array in sources:
                writer.create(array)
        own = _own_pieces(sources, processes)
        for array, part, values, digest in map_in_flight(_read_of(sources), own, _bytes_of):
            writer.write(array, part, values)
            total += digest
            progress(values.size)
    return total


def _own_pieces(
    sources: Mapping[NewArray, ReadPiece], processes: Processes
) -> Iterator[tuple[NewArray, Part]]:
    """Yields the pieces of this process, in turns with the other processes."""
    pieces = ((array, part) for array in sources for part in array.parts())
    for index, piece in enumerate(pieces):
        if index % processes.count == processes.index:
            yield piece


def _read_of(sources: Mapping[NewArray, ReadPiece]) -> Callable[..., Any]:
    """Returns a function that reads one piece and computes its digest."""

    def read(piece: tuple[NewArray, Part]) -> tuple[NewArray, Part, np.ndarray, int]:
        array, part = piece
        values = sources[array](part, array.dtype)
        return array, part, values, array.digest(part, values)

    return read


def _bytes_of(piece: tuple[NewArray, Part]) -> int:
    array, part = piece
    elements = math.prod(stop - start for start, stop in part)
    return HELD * elements * np.dtype(array.dtype).itemsize
