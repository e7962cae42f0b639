"""Reads a checkpoint's weights by name, as NumPy arrays, one at a time and without a device."""

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoint.arrays import StoredWeights
from moejax.checkpoint.find import latest_intact
from moejax.errors import InputError


class Weights(Mapping[str, np.ndarray]):
    """The weights of a checkpoint: name -> array. An array is read when it is asked for.

    docs/formats/checkpoint.md has the names, such as `embedding.table`. Stacked layers are one
    array, the layer first. Selection biases of routers have the names of their routers.

    Attributes:
      step: optimizer steps that were done.
      path: the checkpoint's directory.
      config: the run's settings, nested by section; empty where the checkpoint has none.
    """

    def __init__(self, path: Path, step: int, config: Mapping[str, Any]):
        self.path, self.step, self.config = path, step, config
        self._stored = StoredWeights(path)
        self._names = self._stored.names()

    def __getitem__(self, name: str) -> np.ndarray:
        return self.part(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<{len(self)} arrays of step {self.step} in {self.path}>"

    def part(self, name: str, *index: int | slice) -> np.ndarray:
        """Returns array[index] and reads only this part, such as one layer or one expert."""
        if name not in self._names:
            raise KeyError(name)
        return self._stored.read(name, index)


def load_checkpoint(
    path: str | os.PathLike[str], step: int | None = None, *, verify: str = "full"
) -> Weights:
    """Opens the weights of a run or of one checkpoint, for analysis or another program.

        weights = moejax.load_checkpoint("runs/tiny")
        weights["embedding.table"].shape

    Args:
      path: a run directory, a checkpoint's directory, or the output of `moejax hf import`.
      step: a step of the run; None: the newest intact one.
      verify: "full" compares all files with the manifest's digests, "size" only their sizes.

    Raises:
      InputError: if there is no checkpoint, or it is damaged.
    """
    if verify not in ("full", "size"):
        raise InputError(f"no such check. Got {verify!r}. It must be full or size. Correct it.")
    saved, notes = latest_intact(str(path), step, verify)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Weights(saved.path, saved.step, saved.manifest.get("config", {}))
