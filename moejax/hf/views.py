"""Maps numbers between a parameter and a tensor of a file, whose shapes differ.

A view is a permutation of numbers, described by letters of dimensions: each dimension of the tensor
joins some letters of the parameter, and letters that it lacks are at one position. A query
projection `w_DHC` is the tensor ("HC", "D"): heads and their channels are joined, and the matrix is
transposed. The gate of expert 3 in `w_EDUF` is ("F", "D") at E = 3, U = 0. One description serves
both directions, so that export undoes import by construction.

Letters are the parameter's, from `moejax/layout/layout.py`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

Range = tuple[int, int]  # first and last + 1
# A region of an array has one of three forms: `Bounds`, `Box`, and `hf.rules.Index`.
Bounds = tuple[Range, ...]  # along each dimension
Box = dict[str, Range]  # the part of a parameter that is wanted, by letter
Read = Callable[[Bounds], np.ndarray]  # reads a part of a tensor
TILE = 128  # rows and columns that are transposed together


@dataclass(frozen=True)
class View:
    """The part of one layer's parameter that a tensor holds.

    Attributes:
      dims: letters of the parameter, without stacked layers.
      sizes: elements along each letter.
      groups: letters that each dimension of the tensor joins; "" for a dimension of one element.
      at: positions of the letters that the tensor lacks.
      paired: a letter, a position and a number R, for rotary channels in another order. The tensor
        holds R positions of the letter, from that one on, as neighbouring pairs, the parameter as
        two halves.
    """

    dims: str
    sizes: tuple[int, ...]
    groups: tuple[str, ...]
    at: tuple[tuple[str, int], ...] = ()
    paired: tuple[str, int, int] | None = None

    def __post_init__(self) -> None:
        letters = "".join(self.groups) + "".join(letter for letter, _ in self.at)
        if sorted(letters) != sorted(self.dims):
            raise ValueError(f"{letters} are not the letters {self.dims}")

    @property
    def size(self) -> dict[str, int]:
        """Elements along each letter."""
        return dict(zip(self.dims, self.sizes, strict=True))

    @property
    def free(self) -> str:
        """Letters that the tensor has, in the parameter's order."""
        return "".join(letter for letter in self.dims if letter not in dict(self.at))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(math.prod(self.size[letter] for letter in group) for group in self.groups)

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    def fill(self, out: np.ndarray, box: Box, read: Read) -> None:
        """Fills a part of the parameter with the numbers that the tensor holds of it.

        Args:
          out: the part of the parameter that `box` names.
          read: returns a part of the tensor, given its range along each dimension.
        """
        target = self._at_positions(out, box)
        if target is None or not target.size:
            return
        for ranges, letters in self._parts(box):
            values = read(ranges).reshape([stop - start for start, stop in letters.values()])
            values = values.transpose([list(letters).index(letter) for letter in self.free])
            if self.paired is not None:
                letter = self.paired[0]
                wanted = self.tensor_positions()[slice(*box[letter])]
                values = np.take(values, wanted, axis=self.free.index(letter))
                letters = {**letters, letter: box[letter]}
            copy(target[tuple(_within(letters[x], box[x]) for x in self.free)], values)

    def to_tensor(self, values: np.ndarray, dtype: Any = None) -> np.ndarray:
        """Returns the tensor of the parameter's values at its positions, [free letters].

        Args:
          dtype: dtype of the tensor; None: dtype of the values.
        """
        if self.paired is not None:
            order = np.argsort(self.tensor_positions())
            values = np.take(values, order, axis=self.free.index(self.paired[0]))
        letters = "".join(self.groups)
        turned = values.transpose([self.free.index(x) for x in letters])
        whole = np.empty(turned.shape, values.dtype if dtype is None else dtype)
        copy(whole, turned)
        return whole.reshape(self.shape)

    def tensor_positions(self) -> np.ndarray:
        """Returns the tensor's position for each position of the parameter, paired letter only."""
        assert self.paired is not None
        letter, first, rotated = self.paired
        positions = np.arange(self.size[letter])
        pairs = positions[first : first + rotated].reshape(-1, 2)
        positions[first : first + rotated] = pairs.T.reshape(-1)
        return positions

    def _at_positions(self, out: np.ndarray, box: Box) -> np.ndarray | None:
        """Returns the part of `out` at the tensor's positions; None if they are outside."""
        index: list[int | slice] = []
        for letter in self.dims:
            position = dict(self.at).get(letter)
            if position is None:
                index.append(slice(None))
            elif box[letter][0] <= position < box[letter][1]:
                index.append(position - box[letter][0])
            else:
                return None
        return out[tuple(index)]

    def _parts(self, box: Box) -> Iterator[tuple[tuple[Range, ...], Box]]:
        """Yields the reads: ranges of the tensor, and the letters' ranges in reading order."""
        if self.paired is not None:  # its positions are scattered, so all are read
            box = {**box, self.paired[0]: (0, self.size[self.paired[0]])}
        for parts in product(*(list(self._of_group(group, box)) for group in self.groups)):
            letters = {letter: own for _, of_group in parts for letter, own in of_group.items()}
            yield tuple(ranges for ranges, _ in parts), letters

    def _of_group(self, group: str, box: Box) -> Iterator[tuple[Range, Box]]:
        """Yields contiguous ranges of one dimension of the tensor, with their letters' ranges."""
        # Letters after the first partial one from the right are whole; those before it are looped.
        inner = len(group)
        while inner > 0 and box[group[inner - 1]] == (0, self.size[group[inner - 1]]):
            inner -= 1
        cut = max(inner - 1, 0)
        whole = math.prod(self.size[letter] for letter in group[cut + 1 :])
        for outer in product(*(range(*box[letter]) for letter in group[:cut])):
            ranges = {letter: (at, at + 1) for letter, at in zip(group, outer, strict=False)}
            ranges |= {letter: box[letter] for letter in group[cut:]}
            first, last = ranges[group[cut]] if group else (0, 1)
            before = 0
            for letter, at in zip(group, outer, strict=False):
                before = before * self.size[letter] + at
            before *= self.size[group[cut]] if group else 1
            yield ((before + first) * whole, (before + last) * whole), ranges


def copy(target: np.ndarray, values: np.ndarray) -> None:
    """Copies values to the target, in tiles if their innermost dimensions differ.

    A transposed matrix is copied several times as fast as without tiles: a row of the one is a
    column of the other, and no cache holds all rows. Another dtype is converted after that.
    Measured in docs/log.md (2026-11-24).
    """
    inner = int(np.argmin(np.abs(values.strides))) if values.ndim else 0
    last = target.ndim - 1
    if inner >= last or target.size <= TILE * TILE:
        target[...] = values
        return
    index: list[slice] = [slice(None)] * target.ndim
    for i in range(0, target.shape[inner], TILE):
        for j in range(0, target.shape[last], TILE):
            index[inner], index[last] = slice(i, i + TILE), slice(j, j + TILE)
            part = values[tuple(index)]
            same = part.dtype == target.dtype
            target[tuple(index)] = part if same else np.ascontiguousarray(part)


def _within(part: Range, whole: Range) -> slice:
    return slice(part[0] - whole[0], part[1] - whole[0])
