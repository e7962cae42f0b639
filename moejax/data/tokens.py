"""Token streams, from which sequences are cut. Format: docs/formats/tokens.md.

A stream is `eos document eos document ... eos`. An end-of-document token opens the next document
too, so every token after the first is a target, predicted from its own document alone.
"""

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np

from moejax.data.sidecar import Sidecar, read_sidecar
from moejax.data.tokenizer import digest
from moejax.errors import InputError


class FilePart(TypedDict):
    """A file of a stream, or a text in memory, with a digest of its content."""

    name: str
    digest: str
    tokens: int


@runtime_checkable
class TokenSource(Protocol):
    """A stream with random access."""

    @property
    def vocab_size(self) -> int:
        """Upper bound of ids."""
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

    def parts(self) -> list[FilePart]:
        """Returns the stream's files, in order."""
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

    def parts(self) -> list[FilePart]:
        """Returns one part with the digest of the tokens."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens).astype("<u4")).hexdigest()
        return [FilePart(name="built-in text", digest=digest, tokens=self.num_tokens)]


def from_documents(documents: Sequence[bytes]) -> MemorySource:
    """Joins documents as bytes: ids 0 to 255, and 256 between documents."""
    eos = np.array([256], np.uint16)
    parts = [eos]
    for text in documents:
        parts += [np.frombuffer(text, np.uint8).astype(np.uint16), eos]
    return MemorySource(np.concatenate(parts), 257, 256, sum(map(len, documents)))


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
        assert 0 <= start <= start + length <= self.num_tokens
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

    def check_ends(self) -> None:
        """Raises InputError unless the stream begins and ends with eos."""
        for offset in (0, self.num_tokens - 1):
            token = int(self.read(offset, 1)[0])
            if token != self.eos_id:
                raise InputError(
                    f"token file has no eos at its ends. {self.path}, token {offset}: id {token}. "
                    f"A stream begins and ends with eos = {self.eos_id}. Check the file with its "
                    f"sha256, or prepare the text again."
                )

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
    """Records of `chunk_tokens` ids each; the format itself checks a hash of each record."""

    @cached_property
    def _records(self) -> Any:
        # Imported late: grain takes a second, which other sources do not need.
        from grain.sources import ArrayRecordDataSource

        return ArrayRecordDataSource([str(self.path)])

    def _read(self, start: int, length: int) -> np.ndarray:
        chunk = self.sidecar.chunk_tokens
        assert chunk is not None, "checked with the sidecar"
        if not length:
            return np.empty(0, self.sidecar.dtype)
        first, last = start // chunk, (start + length - 1) // chunk
        dtype = np.dtype(self.sidecar.dtype).newbyteorder("<")
        try:
            records = [self._records[i] for i in range(first, last + 1)]
        except (ValueError, RuntimeError, IndexError) as error:
            raise InputError(
                f"ArrayRecord is damaged. {self.path}, records {first} to {last}: "
                f"{' '.join(str(error).split())[:120]}. Every record carries a hash. Copy the file "
                f"again, or prepare the text again."
            ) from error
        for number, record in enumerate(records, first):
            self._check_record(number, record, chunk * dtype.itemsize)
        tokens = np.frombuffer(b"".join(records), dtype)
        return tokens[start - first * chunk :][:length]

    def _check_record(self, number: int, record: bytes, full: int) -> None:
        """Checks a record's size: another dtype or chunk size would make all ids wrong."""
        total = self.num_tokens * np.dtype(self.sidecar.dtype).itemsize
        expected = min(full, total - number * full)
        if len(record) != expected:
            raise InputError(
                f"ArrayRecord does not fit its sidecar. {self.path}, record {number} has "
                f"{len(record)} bytes, dtype and chunk_tokens of the sidecar ask for {expected}. "
                f"They must agree. Copy both files again, or prepare the text again."
            )


class JoinedSource:
    """Several sources of one vocabulary, read as one stream."""

    def __init__(self, sources: Sequence[FileSource]):
        self.sources = tuple(sources)
        self.vocab_size, self.eos_id = sources[0].vocab_size, sources[0].eos_id
        self.ends = np.cumsum([source.num_tokens for source in sources])
        self.num_tokens = int(self.ends[-1])
        sizes = [source.num_bytes for source in sources]
        self.num_bytes = None if None in sizes else sum(size or 0 for size in sizes)

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns tokens start .. start + length - 1, int32, across files if necessary."""
        assert 0 <= start <= start + length <= self.num_tokens
        parts, stop = [np.empty(0, np.int32)], start + length
        index = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop and index < len(self.sources):
            source, end = self.sources[index], int(self.ends[index])
            take = min(stop, end) - start
            parts.append(source.read(start - (end - source.num_tokens), take))
            start, index = start + take, index + 1
        return np.concatenate(parts)

    def parts(self) -> list[FilePart]:
        """Returns the files, with digests from their sidecars."""
        return [
            FilePart(name=str(s.path), digest=s.sidecar.content_digest(), tokens=s.num_tokens)
            for s in self.sources
        ]


def open_files(patterns: Sequence[str], wanted: str, *, model_vocab: int) -> JoinedSource:
    """Opens the token files that paths or globs name, in sorted order, as one stream.

    Args:
      wanted: the required format: "bin" or "array_record".
      model_vocab: ids must be below it.

    Raises:
      InputError: if a pattern matches nothing, or files are damaged or inconsistent.
    """
    sources = []
    for path in _find_files(patterns):
        sidecar = read_sidecar(path)
        if sidecar.format != wanted:
            raise InputError(
                f"token file of another format. {path} is {sidecar.format}. data.source="
                f"{'tokens' if wanted == 'bin' else wanted} reads {wanted}. Set the other source."
            )
        kind = BinSource if wanted == "bin" else ArrayRecordSource
        sources.append(kind(path, sidecar))
        sources[-1].check_ends()
    _check_together(sources, model_vocab)
    return JoinedSource(sources)


def _find_files(patterns: Sequence[str]) -> list[Path]:
    """Returns the token files of paths and globs, without sidecars and tokenizers."""
    paths: list[Path] = []
    for pattern in patterns:
        # An existing path is not a pattern, even with characters such as `*`.
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if Path(name).is_file() and name[-5:] != ".json"]
        if not files:
            raise InputError(
                f"no token file. {pattern!r} matches none, seen from {Path.cwd()}. A path or "
                f"glob must name files of moejax prepare. Check the path, or prepare the text."
            )
        paths += files
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise InputError(
            f"token file is named twice. {twice} matches more than once in {list(patterns)}. Each "
            f"is read once an epoch. Take it out of one pattern."
        )
    return paths


def check_apart(train: JoinedSource, held_out: JoinedSource) -> None:
    """Refuses held-out files that are also training files, or of another tokenizer.

    Raises:
      InputError: see above.
    """
    _check_same([train.sources[0], held_out.sources[0]])
    trained = {source.path.resolve() for source in train.sources}
    for source in held_out.sources:
        if source.path.resolve() in trained:
            raise InputError(
                f"held-out text is trained on. {source.path} is in data.train_files and in "
                f"data.eval_files. No file may be in both. Write patterns that do not meet, such "
                f"as '*.train.bin' and '*.eval.bin'."
            )


def _check_together(sources: Sequence[FileSource], model_vocab: int) -> None:
    """Refuses files of different tokenizers, and a model too small for them."""
    first = sources[0]
    _check_same(sources)
    if first.vocab_size > model_vocab:
        raise InputError(
            f"tokenizer is larger than the model. {first.path} has vocabulary {first.vocab_size}, "
            f"model.vocab_size is {model_vocab}. Every id needs a row. Raise model.vocab_size."
        )


def _check_same(sources: Sequence[FileSource]) -> None:
    first = sources[0]
    for source in sources:
        expected, actual = ((s.vocab_size, s.eos_id) for s in (first, source))
        # The tokenizer's file name may differ, its content may not.
        digests = [s.sidecar.tokenizer_sha256 for s in (first, source)]
        if expected != actual or digests[0] != digests[1]:
            raise InputError(
                f"token files disagree. {first.path} has vocabulary {expected[0]}, eos "
                f"{expected[1]} and tokenizer sha256 {digests[0]}, {source.path} has {actual[0]}, "
                f"{actual[1]} and {digests[1]}. All files of a run need one tokenizer. Prepare "
                f"them alike."
            )


def verify(source: FileSource) -> None:
    """Compares a token file with the digest in its sidecar; reads the whole file.

    Raises:
      InputError: if they differ.
    """
    actual = digest(source.path)
    if actual != source.sidecar.sha256:
        raise InputError(
            f"token file is damaged. {source.path} has sha256 {actual[:16]}, its sidecar says "
            f"{source.sidecar.sha256[:16]}. They must agree. Copy it again."
        )
