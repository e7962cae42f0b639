"""Token streams: where sequences are cut from. Format: docs/formats/tokens.md.

A stream is `eos document eos document ... eos`. An end-of-document token opens the next document
too, so every token after the first is a target, predicted from its own document alone.
"""

import glob
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moejax.errors import InputError

FORMAT_VERSION = 1
SIDECAR_LIMIT = 1 << 20
DTYPES = ("uint8", "uint16", "uint32")


class TokenSource(Protocol):
    """A stream that can be read anywhere."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eos_id(self) -> int:
        """The token between documents."""
        ...

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        ...

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the text behind the tokens, if known."""
        ...

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, int32."""
        ...


@dataclass(frozen=True)
class MemorySource:
    """A stream held in memory."""

    tokens: np.ndarray
    vocab_size: int
    eos_id: int
    num_bytes: int | None

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return len(self.tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, int32."""
        return self.tokens[start : start + length].astype(np.int32)


def from_documents(documents: Sequence[bytes]) -> MemorySource:
    """Joins documents at the level of bytes: ids 0 to 255, and 256 between documents."""
    eos = np.array([256], np.uint16)
    parts = [eos]
    for text in documents:
        parts += [np.frombuffer(text, np.uint8).astype(np.uint16), eos]
    return MemorySource(np.concatenate(parts), 257, 256, sum(map(len, documents)))


@dataclass(frozen=True)
class Sidecar:
    """What `FILE.json` says of the token file beside it."""

    format_version: int
    format: str  # "bin" or "array_record"
    dtype: str
    vocab_size: int
    eos_id: int
    num_tokens: int
    num_bytes: int
    num_documents: int
    sha256: str  # of the token file
    tokenizer: str  # "bytes", or the name of a tokenizer.json beside this file
    chunk_tokens: int | None = None  # array_record: tokens of a record

    def write(self, path: Path) -> None:
        """Writes the sidecar of a token file."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        sidecar_of(path).write_text(text, encoding="utf-8")


def sidecar_of(path: Path) -> Path:
    """The sidecar of a token file: its name with .json behind."""
    return path.with_name(path.name + ".json")


def read_sidecar(path: Path) -> Sidecar:
    """Reads and checks the sidecar of a token file.

    Raises:
      InputError: if it is missing, too large, damaged, or of a newer format.
    """
    file = sidecar_of(path)
    if not file.is_file():
        raise InputError(
            f"no sidecar. {file} does not exist. A token file needs the JSON that moejax prepare "
            f"wrote beside it. Copy it too, or prepare the text again."
        )
    if file.stat().st_size > SIDECAR_LIMIT:
        raise InputError(
            f"sidecar is too large. {file} has {file.stat().st_size} bytes. The limit is "
            f"{SIDECAR_LIMIT}. Prepare the text again."
        )
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        version = facts.get("format_version")
    except (ValueError, AttributeError) as error:
        raise InputError(
            f"sidecar is damaged. {file}: {error}. It must be the JSON that moejax prepare wrote. "
            f"Prepare the text again."
        ) from error
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise InputError(
            f"token file of a newer moejax. {file} has format {version}. This version reads up to "
            f"{FORMAT_VERSION}. Upgrade moejax."
        )
    return _checked(file, facts)


def _checked(file: Path, facts: dict[str, Any]) -> Sidecar:
    """Builds the sidecar, refusing fields that are missing, unknown or of the wrong kind."""
    try:
        sidecar = Sidecar(**facts)
        counts = (sidecar.vocab_size, sidecar.eos_id, sidecar.num_tokens, sidecar.num_bytes)
        assert all(isinstance(n, int) and n >= 0 for n in counts), "a count is not a number"
        assert sidecar.dtype in DTYPES, f"dtype {sidecar.dtype!r} is not one of {DTYPES}"
        assert sidecar.eos_id < sidecar.vocab_size, "eos_id is outside the vocabulary"
        assert sidecar.format in ("bin", "array_record"), f"format {sidecar.format!r} is unknown"
        if sidecar.format == "array_record":
            assert (sidecar.chunk_tokens or 0) > 0, "chunk_tokens is missing"
        assert Path(sidecar.tokenizer).name == sidecar.tokenizer, "tokenizer is not a plain name"
    except (TypeError, AssertionError) as error:
        raise InputError(
            f"sidecar is damaged. {file}: {error}. It must be the JSON that moejax prepare wrote. "
            f"Prepare the text again."
        ) from error
    return sidecar


class FileSource:
    """A token file, opened and checked; subclasses read it."""

    def __init__(self, path: Path, sidecar: Sidecar):
        self.path, self.sidecar = path, sidecar
        self.vocab_size, self.eos_id = sidecar.vocab_size, sidecar.eos_id
        self.num_tokens, self.num_bytes = sidecar.num_tokens, sidecar.num_bytes

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, int32.

        Raises:
          InputError: for an id outside the vocabulary, with file and offset.
        """
        tokens = self._read(start, length).astype(np.int64)
        wrong = np.flatnonzero(tokens >= self.vocab_size)
        if len(wrong):
            offset = start + int(wrong[0])
            raise InputError(
                f"token id outside the vocabulary. {self.path}, token {offset}: id "
                f"{tokens[wrong[0]]}. Ids must be below {self.vocab_size}. The file is damaged or "
                f"of another tokenizer: check it with its sha256, or prepare the text again."
            )
        return tokens.astype(np.int32)

    def _read(self, start: int, length: int) -> np.ndarray:
        raise NotImplementedError


class BinSource(FileSource):
    """Little-endian ids, one after the other, read through a memory map."""

    def __init__(self, path: Path, sidecar: Sidecar):
        super().__init__(path, sidecar)
        size, width = path.stat().st_size, np.dtype(sidecar.dtype).itemsize
        if size != sidecar.num_tokens * width:
            tail = f" ({size % width} bytes beyond whole tokens)" if size % width else ""
            raise InputError(
                f"token file has the wrong size. {path} has {size} bytes{tail}, its sidecar says "
                f"{sidecar.num_tokens} tokens of {sidecar.dtype}. They must agree. Copy both files "
                f"again, or prepare the text again."
            )

    @cached_property
    def _map(self) -> np.ndarray:
        dtype = np.dtype(self.sidecar.dtype).newbyteorder("<")
        return np.memmap(self.path, dtype=dtype, mode="r")

    def _read(self, start: int, length: int) -> np.ndarray:
        return np.array(self._map[start : start + length])


class ArrayRecordSource(FileSource):
    """Records of `chunk_tokens` ids each; the format checks each record's hash itself."""

    @cached_property
    def _records(self) -> Any:
        # Imported late: grain takes a second that runs on other sources need not spend.
        from grain.sources import ArrayRecordDataSource

        return ArrayRecordDataSource([str(self.path)])

    def _read(self, start: int, length: int) -> np.ndarray:
        chunk = self.sidecar.chunk_tokens
        assert chunk is not None, "checked with the sidecar"
        first, last = start // chunk, (start + length - 1) // chunk
        dtype = np.dtype(self.sidecar.dtype).newbyteorder("<")
        try:
            parts = [np.frombuffer(self._records[i], dtype) for i in range(first, last + 1)]
        except (ValueError, RuntimeError, IndexError) as error:
            raise InputError(
                f"ArrayRecord is damaged. {self.path}, records {first} to {last}: "
                f"{' '.join(str(error).split())[:120]}. Every record carries a hash. Copy the file "
                f"again, or prepare the text again."
            ) from error
        return np.concatenate(parts)[start - first * chunk :][:length]


class JoinedSource:
    """Several sources of one vocabulary, read as one stream."""

    def __init__(self, sources: Sequence[FileSource]):
        self.sources = tuple(sources)
        self.vocab_size, self.eos_id = sources[0].vocab_size, sources[0].eos_id
        self.ends = np.cumsum([source.num_tokens for source in sources])
        self.num_tokens = int(self.ends[-1])
        self.num_bytes = sum(source.num_bytes for source in sources)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, int32, across file ends where it must."""
        parts, stop = [], start + length
        place = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop and place < len(self.sources):
            source, end = self.sources[place], int(self.ends[place])
            take = min(stop, end) - start
            parts.append(source.read(start - (end - source.num_tokens), take))
            start, place = start + take, place + 1
        return np.concatenate(parts)


def open_files(patterns: Sequence[str], wanted: str, *, model_vocab: int) -> JoinedSource:
    """Opens the token files that paths or globs name, in sorted order, as one stream.

    Args:
      wanted: the format all must have: "bin" or "array_record".
      model_vocab: ids must be below it.

    Raises:
      InputError: if a pattern matches nothing, or files are damaged or do not fit together.
    """
    paths = []
    for pattern in patterns:
        found = sorted(path for path in glob.glob(pattern, recursive=True))
        if not found:
            raise InputError(
                f"no token file. {pattern!r} matches nothing from {Path.cwd().name}/. A path or "
                f"glob must name files of moejax prepare. Check the path, or prepare the text."
            )
        paths += [Path(path) for path in found if not path.endswith(".json")]
    sources = []
    for path in paths:
        sidecar = read_sidecar(path)
        if sidecar.format != wanted:
            raise InputError(
                f"token file of another format. {path} is {sidecar.format}. data.source="
                f"{'tokens' if wanted == 'bin' else wanted} reads {wanted}. Set the other source."
            )
        kind = BinSource if wanted == "bin" else ArrayRecordSource
        sources.append(kind(path, sidecar))
    _check_together(sources, model_vocab)
    return JoinedSource(sources)


def _check_together(sources: Sequence[FileSource], model_vocab: int) -> None:
    """Refuses files of different tokenizers, and a model too small for them."""
    first = sources[0]
    for source in sources:
        same = (source.vocab_size, source.eos_id) == (first.vocab_size, first.eos_id)
        if not same:
            raise InputError(
                f"token files disagree. {first.path} has vocabulary {first.vocab_size} and eos "
                f"{first.eos_id}, {source.path} has {source.vocab_size} and {source.eos_id}. All "
                f"files of a run need one tokenizer. Prepare them alike."
            )
    if first.vocab_size > model_vocab:
        raise InputError(
            f"tokenizer is larger than the model. {first.path} has vocabulary {first.vocab_size}, "
            f"model.vocab_size is {model_vocab}. Every id needs a row. Raise model.vocab_size."
        )


def verify(source: FileSource) -> None:
    """Compares a token file with the digest in its sidecar; reads the whole file.

    Raises:
      InputError: if they differ.
    """
    with source.path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != source.sidecar.sha256:
        raise InputError(
            f"token file is damaged. {source.path} has sha256 {found[:16]}, its sidecar says "
            f"{source.sidecar.sha256[:16]}. They must agree. Copy it again."
        )
