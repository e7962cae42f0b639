"""The files of a folder of weights: found, confined to the folder, and their headers checked.

Nothing of a folder is trusted: names may lead outside, sizes may be absurd, headers may lie. The
safetensors library judges each file's header; bytes are read here (`hf.reader`), because in NumPy
it has no 8-bit floats, and it maps files, so that the memory in use seems to grow with each read.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from moejax.config.fields import one_line, short
from moejax.errors import InputError

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
# A config.json may list a label for each token, or each module that is not quantised.
SMALL_BYTES, INDEX_BYTES, HEADER_BYTES = 16 << 20, 100 << 20, 100 << 20
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PLAIN_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it.

    Attributes:
      start: offset of its first byte in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


def is_folder_of_weights(path: Path) -> bool:
    """Returns whether a path looks like a folder with a `config.json` of transformers."""
    try:
        return "model_type" in read_json(path / CONFIG, SMALL_BYTES)
    except InputError:
        return False


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Returns the object of a JSON file.

    Raises:
      InputError: if it is missing, too large, or no object.
    """
    if not path.is_file():
        raise InputError(f"no {path.name}. {path} does not exist. Copy the whole folder.")
    size = path.stat().st_size
    if size > limit:
        raise InputError(
            f"{path} has {size:,} bytes. At most {limit:,} are read, which is more than any model "
            f"needs. Is it a {path.name}? Take out lists that do not describe the model."
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    # Brackets nested thousands deep end json with RecursionError.
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged: {one_line(str(error))[:160]}. It must be JSON. Copy it again."
        ) from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is no JSON object. Copy it again.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object; refuses a name that is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{short(twice)}` is there twice")
    return values


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Returns all tensors of a folder by name.

    Raises:
      InputError: names the file or tensor that is missing, twice there, damaged or outside.
    """
    index, single = folder / INDEX, folder / SINGLE
    for path in (folder / CONFIG, index):
        check_inside(path)
    if index.is_file() and single.is_file():
        raise InputError(
            f"{folder} has both {INDEX} and {SINGLE}. Only one can be meant. Remove the other."
        )
    if single.is_file():
        return dict(_read_header(_confined(folder, SINGLE)))
    if index.is_file():
        return _read_sharded(folder, read_json(index, INDEX_BYTES))
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        raise InputError(
            f"weights are pickled. {folder} has {pickled[0]}. Loading a pickle runs its code, so "
            "only safetensors files are read. Convert it with transformers: save_pretrained "
            "writes safetensors."
        )
    raise InputError(
        f"no weights. {folder} has {', '.join(names[:8]) or 'nothing'}. There must be {SINGLE}, or "
        f"{INDEX} and the files that it names. Copy the whole folder."
    )


def _read_sharded(folder: Path, index: Mapping[str, Any]) -> dict[str, Stored]:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
        raise InputError(
            f"{folder / INDEX} is damaged: `weight_map` must give a file for each tensor. Copy it "
            "again."
        )
    found: dict[str, Stored] = {}
    for file in sorted(set(where.values())):
        for name, stored in _read_header(_confined(folder, file)):
            if name in found:
                raise InputError(
                    f"tensor {short(name)} is in two files, {found[name].file.name} and {file}. "
                    "Each must be there once. Copy the folder again."
                )
            if where.get(name) != file:
                listed = where.get(name, "no file")
                raise InputError(
                    f"tensor {short(name)} is in {file}, but {INDEX} says {short(listed)}. Copy "
                    "the folder again."
                )
            found[name] = stored
    for name, file in where.items():
        if name not in found:
            raise InputError(
                f"tensor {short(name)} is missing. {INDEX} says it is in {short(file)}. Copy that "
                "file again."
            )
    return found


def _confined(folder: Path, name: str) -> Path:
    """Returns the path of a file of weights.

    Raises:
      InputError: if its name or its link leads elsewhere, or it is missing.
    """
    if not PLAIN_NAME.fullmatch(name):
        raise InputError(
            f"{folder / INDEX} names the file {short(name)}. A file of weights is a plain name "
            "that ends in .safetensors, inside the folder. Copy the index again."
        )
    path = folder / name
    if not path.is_file():
        raise InputError(
            f"file {name} is missing. {path} does not exist or is no file, but tensors are in it. "
            "Copy it too."
        )
    check_inside(path)
    return path


def check_inside(path: Path) -> None:
    """Refuses a file of a folder that is a link to somewhere else.

    Files may be links into the blobs of a Hugging Face cache, where the folder is a snapshot.

    Raises:
      InputError: if it leads elsewhere.
    """
    root = path.parent.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise InputError(
            f"file {path.name} is outside. {path} leads to {path.resolve()}. Only files of the "
            "folder are read. Copy it there."
        )


def _read_header(file: Path) -> Iterator[tuple[str, Stored]]:
    """Yields the tensors of one file, after the library has judged its header."""
    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is no whole safetensors file: {_explain(file, error)}. Copy it again."
        ) from error
    header, start = _parse_header(file)
    for name, facts in header.items():
        if facts["dtype"] not in ITEM_BYTES:
            raise InputError(
                f"tensor {short(name)} has dtype {facts['dtype']}. Weights are "
                f"{', '.join(ITEM_BYTES)}. Choose a copy of the model in one of them."
            )
        first = start + facts["data_offsets"][0]
        yield name, Stored(file, facts["dtype"], tuple(facts["shape"]), first)


def _parse_header(file: Path) -> tuple[dict[str, Any], int]:
    """Returns a file's header without metadata, and where its data begin."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > HEADER_BYTES:
            raise InputError(
                f"{file} has a header of {length:,} bytes. At most {HEADER_BYTES:,} are read. Copy "
                "it again."
            )
        try:
            header = json.loads(opened.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{file} is no whole safetensors file: its header: {one_line(str(error))[:160]}. "
                "Copy it again."
            ) from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _explain(file: Path, error: Exception) -> str:
    """Returns the library's complaint, and the first tensor that the file is too short for."""
    complaint = one_line(str(error))[:160]
    size = file.stat().st_size if file.is_file() else 0
    try:
        header, start = _parse_header(file)
        for name, facts in header.items():
            end = start + facts["data_offsets"][1]
            if end > size:
                return (
                    f"tensor {short(name)} of shape {tuple(facts['shape'])} ends at byte {end:,}, "
                    f"the file has {size:,}"
                )
    except (InputError, KeyError, TypeError, IndexError, AttributeError, OSError):
        pass
    return complaint
