"""Compares restored numbers with the saved ones, by the digests in a manifest.

Files were verified before (`checkpoint.find`). This compares the numbers on the devices now with
those at the save, so it also finds a wrong write, and a wrong restore.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.checkpoint.digests import (
    SITES,
    ArrayDigests,
    add_up,
    digest_of_zeros,
    from_json,
    together,
)
from moejax.checkpoint.find import Saved
from moejax.checkpoint.writer import by_key, restore_items
from moejax.errors import InputError
from moejax.runtime.processes import Processes
from moejax.step.state import TrainState, flat


def wrong_numbers(
    manifest: Mapping[str, Any], arrays: Mapping[str, jax.Array], processes: Processes
) -> str | None:
    """Describes differences from the saved numbers; None if there are none.

    All processes call it, and return the same. Formats before 3 have no digests, nor have imports;
    numbers that were cast on the way are not compared.
    """
    known = manifest.get("arrays")
    if not known:
        return None
    saved = {key: from_json(key, facts) for key, facts in known.items()}
    compared = {
        key: x for key, x in arrays.items() if key in saved and saved[key].dtype == x.dtype.name
    }
    found = together(processes.gather(add_up(compared).here()))
    texts = differences(saved, found)
    return summary(texts) if texts else None


def restore_weights(saved: Saved, abstract: TrainState, processes: Processes) -> dict[str, Any]:
    """Reads the item `weights` of a checkpoint, shaped and sharded like the weights of `abstract`.

    Raises:
      InputError: in all processes, if numbers differ from the saved ones.
    """
    weights = restore_items(saved.path, abstract, ("weights",))["weights"]
    wrong = wrong_numbers(saved.manifest, by_key({"weights": flat(weights)}), processes)
    if wrong is not None:
        raise InputError(
            f"checkpoint is damaged. {saved.path}: {wrong}. Restored numbers must equal the saved "
            f"ones. Copy it again, or name an older step."
        )
    return weights


SHOWN = 4  # at most, differences in a message, and arrays of one difference
BLOCK = re.compile(r"groups\.(\d+)\.blocks\.(\d+)\.")


class Cell(NamedTuple):
    """A layer, or an expert of a layer: its array's key, and index along dimensions of cells.

    Of what the sites of an outer loop train, the site comes first.
    """

    key: str
    at: tuple[int, ...]

    @property
    def site(self) -> int | None:
        """The site that it is of, if it is of one."""
        return self.at[0] if self.key.partition("/")[0] in SITES else None

    @property
    def inside(self) -> tuple[int, ...]:
        """Its index without the site."""
        return self.at if self.site is None else self.at[1:]


def differences(saved: Mapping[str, ArrayDigests], found: Mapping[str, ArrayDigests]) -> list[str]:
    """Returns a text for each difference.

    Arrays that only one side has, or whose dtypes differ, are not compared.
    """
    keys = [key for key in found if key in saved and saved[key].dtype == found[key].dtype]
    wrong = [
        Cell(key, tuple(int(n) for n in at))
        for key in keys
        for at in np.argwhere(saved[key].cells != found[key].cells)
    ]
    if not wrong:
        return []
    naming = _Naming(saved)
    origins = _origins(saved, {_kind(saved[cell.key]) for cell in wrong})
    arrays: dict[str, list[str]] = {}
    for cell in wrong:
        text, names = naming.describe(cell, saved, found, origins)
        known = arrays.setdefault(text, [])
        known += [name for name in names if name not in known]
    return [text.format(_listed(names)) for text, names in arrays.items()]


def summary(texts: list[str]) -> str:
    """Returns differences as one text."""
    rest = [f"and {len(texts) - SHOWN} differences more"] if len(texts) > SHOWN else []
    return "; ".join(texts[:SHOWN] + rest)


Kind = tuple[str, tuple[int, ...]]  # dtype, and the shape of a cell


def _kind(digests: ArrayDigests) -> Kind:
    return digests.dtype, digests.shape[digests.cells.ndim :]


def _origins(saved: Mapping[str, ArrayDigests], kinds: set[Kind]) -> dict[tuple[Kind, str], Cell]:
    """Returns for each kind and digest the first cell that had it in the saved state."""
    origins: dict[tuple[Kind, str], Cell] = {}
    for key, digests in saved.items():
        if (kind := _kind(digests)) in kinds:
            for at in np.ndindex(digests.cells.shape):
                origins.setdefault((kind, str(digests.cells[at])), Cell(key, at))
    return origins


class _Naming:
    """The names of cells: layers are counted through all groups of blocks."""

    def __init__(self, saved: Mapping[str, ArrayDigests]):
        blocks: dict[int, int] = {}
        repeats: dict[int, int] = {}
        for key, digests in saved.items():
            if key.startswith("weights/") and (found := BLOCK.search(key)):
                group, block = int(found[1]), int(found[2])
                blocks[group] = max(blocks.get(group, 0), block + 1)
                repeats[group] = digests.shape[0]
        self._pattern, self._first, first = blocks, {}, 0
        for group in sorted(blocks):
            self._first[group] = first
            first += blocks[group] * repeats[group]

    def describe(
        self,
        cell: Cell,
        saved: Mapping[str, ArrayDigests],
        found: Mapping[str, ArrayDigests],
        origins: Mapping[tuple[Kind, str], Cell],
    ) -> tuple[str, list[str]]:
        """Returns a text about a cell's change, with `{}` for the arrays, and the arrays' names."""
        now, was = str(found[cell.key].cells[cell.at]), str(saved[cell.key].cells[cell.at])
        kind, name = _kind(saved[cell.key]), _name(cell.key)
        if now == digest_of_zeros(math.prod(kind[1])):
            return f"{self.place(cell)} ({{}}) is all zeros", [name]
        origin = origins.get((kind, now))
        if origin is None:
            return f"{self.place(cell)} ({{}}) is changed", [name]
        names = [name] if origin.key == cell.key else [name, _name(origin.key)]
        if origin.key in found and str(found[origin.key].cells[origin.at]) == was:
            first, second = sorted((cell, origin), key=lambda one: (one.at, one.key))
            return f"{self._pair(first, second)} ({{}}) are swapped", sorted(names)
        return f"{self.place(cell)} ({{}}) is a copy of {self._seen_from(origin, cell)}", names

    def place(self, cell: Cell) -> str:
        """Returns the name of a layer, or of an expert and its layer, and of its site."""
        layer, at = self._layer(cell), cell.inside
        text = f"expert {at[1]} of {layer}" if len(at) == 2 else layer
        return text if cell.site is None else f"{text} of site {cell.site}"

    def _pair(self, one: Cell, other: Cell) -> str:
        if len(one.at) == 2 and one.site is None and self._layer(one) == self._layer(other):
            return f"experts {one.at[1]} and {other.at[1]} of {self._layer(one)}"
        return f"{self.place(one)} and {self.place(other)}"

    def _seen_from(self, cell: Cell, other: Cell) -> str:
        same = len(cell.at) == 2 and cell.site is None and self._layer(cell) == self._layer(other)
        return f"expert {cell.at[1]}" if same else self.place(cell)

    def _layer(self, cell: Cell) -> str:
        if not cell.inside:
            return "the array"
        found = BLOCK.search(cell.key)
        if found is None or int(found[1]) not in self._first:
            return f"layer {cell.inside[0]} of {_name(cell.key).split('.')[0]}"
        group, block = int(found[1]), int(found[2])
        return f"layer {self._first[group] + cell.inside[0] * self._pattern[group] + block}"


def _name(key: str) -> str:
    """Returns an array's name as documented: parameters by their paths alone."""
    item, _, path = key.partition("/")
    return path.removeprefix("params.") if item == "weights" else f"{item}: {path}"


def _listed(names: list[str]) -> str:
    rest = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join(names[:SHOWN] + rest)
