"""An exported text model goes back into the model of images and texts that it came from.

Its tensors get the longer names that they have there. All others are copied from that model's
folder as they are: of images and sounds, and of layers that predict further tokens.
"""

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from moejax.config.fields import short
from moejax.convert.texts import without_code
from moejax.errors import InputError, writing
from moejax.hf.families import FAMILIES
from moejax.hf.families.family import Around, Family
from moejax.hf.files import (
    CONFIG,
    ITEM_BYTES,
    SINGLE,
    SMALL_BYTES,
    Stored,
    check_inside,
    find_tensors,
    read_json,
)
from moejax.hf.text import TEXT, read_text_config
from moejax.hf.writer import OutFile, PlacedTensor, header_of, write_index

COPIED = "model-left-out.safetensors"
PIECE_BYTES = 8 << 20
DTYPES = ("torch_dtype", "dtype")  # keys of older libraries and newer ones
# Small files beside those that a text model has.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
SAME = ("hidden_size", "vocab_size")  # keys that tell models apart


@dataclass(frozen=True)
class Surroundings:
    """The model around a text model.

    Attributes:
      config: its `config.json`.
      prefixes: what names of an exported text model's tensors begin with, and what stands there.
      copied: the tensors that an export has none of.
    """

    folder: Path
    config: Mapping[str, Any]
    prefixes: tuple[tuple[str, str], ...]
    copied: Mapping[str, Stored]

    @property
    def copied_bytes(self) -> int:
        """Bytes of the tensors that are copied."""
        return sum(_bytes(stored) for stored in self.copied.values())

    def renamed(self, files: Sequence[OutFile]) -> list[OutFile]:
        """Returns an export's files with the longer names of tensors; they have an index."""

        def longer(placed: PlacedTensor) -> PlacedTensor:
            name = placed.tensor.name
            for ours, theirs in self.prefixes:
                if name.startswith(ours):
                    name = theirs + name.removeprefix(ours)
                    break
            return replace(placed, tensor=replace(placed.tensor, name=name))

        only = "model-00001-of-00001.safetensors"
        return [
            OutFile(only if file.name == SINGLE else file.name, tuple(map(longer, file.placed)))
            for file in files
        ]

    def config_with(self, text: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole `config.json`, with an exported text model's inside.

        Args:
          text: that of the text model as it would be written by itself.
          changed: ids of special tokens in it that did not come with the weights.
        """
        inside = {key: x for key, x in text.items() if key not in ("architectures", *DTYPES)}
        outer = without_code(self.config)
        kept = {key: x for key, x in outer.items() if key not in DTYPES}
        ids = {key: x for key, x in changed.items() if key in kept}
        return {**kept, **ids, DTYPES[0]: text[DTYPES[0]], TEXT: inside}

    def copy(self, out: Path, files: Sequence[OutFile]) -> None:
        """Writes the other tensors, the index of all, and the small files of processors."""
        _write_copied(out / COPIED, self.copied)
        write_index(out, files, dict.fromkeys(self.copied, COPIED), self.copied_bytes)
        for name in PROCESSORS:
            if (self.folder / name).is_file():
                check_inside(self.folder / name)
                with writing(out / name):
                    shutil.copyfile(self.folder / name, out / name)


def open_around(
    folder: Path, family: Family, text: Mapping[str, Any], predicts_ahead: bool
) -> Surroundings:
    """Returns the model in a folder, into which an exported text model goes.

    Args:
      text: the exported text model's `config.json`.
      predicts_ahead: whether the export has the layers that predict further tokens.
    Raises:
      InputError: if the folder has no such model, or another one.
    """
    around = family.around
    if around is None:
        known = ", ".join(one.name for one in FAMILIES if one.around is not None)
        raise InputError(
            f"`--around` {folder} has no effect on {family.name}. Models of images are known "
            f"around {known}. Leave it out."
        )
    config = read_json(folder / CONFIG, SMALL_BYTES)
    inside = read_text_config(folder / CONFIG)
    if config.get("model_type") != around.name:
        raise InputError(
            f"`--around` {folder} has model_type {short(config.get('model_type'))}. Around "
            f"{family.name} is {around.name}. Name the folder that was imported."
        )
    if other := [key for key in SAME if inside.get(key) != text.get(key)]:
        raise InputError(
            f"`--around` {folder} is another model: its text model has `{other[0]}` = "
            f"{short(inside.get(other[0]))}, the export {short(text.get(other[0]))}. Name the "
            "folder that was imported."
        )
    if "quantization_config" in config:
        raise InputError(
            f"`--around` {folder} is quantised, and an export is not. Name a folder of the same "
            "model without `quantization_config`."
        )
    tensors = find_tensors(folder)
    left_out = [around.others] if predicts_ahead else [around.others, family.ahead_tensors]
    copied = {
        name: stored
        for name, stored in tensors.items()
        if any(pattern and re.fullmatch(pattern, name) for pattern in left_out)
    }
    return Surroundings(folder, config, _prefixes(around, tensors), copied)


def _prefixes(around: Around, tensors: Mapping[str, Stored]) -> tuple[tuple[str, str], ...]:
    """Returns prefixes of an export's names, with those that names in a folder have."""
    found = {}
    for theirs, ours in around.prefixes:
        if any(name.startswith(theirs) for name in tensors):
            found.setdefault(ours, theirs)
    return tuple(found.items())


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * ITEM_BYTES[stored.dtype]


def _write_copied(path: Path, copied: Mapping[str, Stored]) -> None:
    """Writes one file of safetensors with tensors of other files, byte for byte."""
    ends = list(accumulate(map(_bytes, copied.values()), initial=0))
    header = header_of(
        (name, stored.dtype, stored.shape, start, stop)
        for (name, stored), (start, stop) in zip(copied.items(), pairwise(ends), strict=True)
    )
    with writing(path), path.open("wb") as out:
        out.write(header)
        for stored in copied.values():
            with stored.file.open("rb") as file:
                file.seek(stored.start)
                left = _bytes(stored)
                while left:
                    piece = file.read(min(left, PIECE_BYTES))
                    if not piece:
                        raise InputError(f"{stored.file} ended early. Copy it again.")
                    out.write(piece)
                    left -= len(piece)
        out.flush()
        os.fsync(out.fileno())
