"""Documents out of text, JSONL and Parquet files, one at a time."""

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.data.marks import MarkedDocument
from moejax.data.rows import check_unicode, in_utf_8, read_lines, read_parquet
from moejax.errors import InputError

PIECE = 1 << 20  # bytes of a file, or characters of a text, in one piece


@dataclass(frozen=True)
class Document:
    """A text and its origin."""

    text: str
    source: str

    def size(self) -> int:
        """Approximate number of bytes."""
        return len(self.text)

    def digest(self) -> str:
        """Returns the sha256 of the text as UTF-8."""
        result = hashlib.sha256()
        for piece in self.pieces():
            result.update(piece.encode("utf-8"))
        return result.hexdigest()

    def pieces(self) -> Iterator[str]:
        """The text, in parts."""
        for start in range(0, len(self.text), PIECE):
            yield self.text[start : start + PIECE]


class TextFile:
    """A plain text file, which is one document. It is read twice: for its digest and its text."""

    def __init__(self, path: Path):
        self._path, self.source = path, str(path)
        self._digest: str | None = None

    def size(self) -> int:
        """Number of bytes."""
        return self._path.stat().st_size

    def digest(self) -> str:
        """Returns the sha256 of its bytes; `pieces` checks that it has not changed."""
        with self._path.open("rb") as opened:
            self._digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return self._digest

    def pieces(self) -> Iterator[str]:
        """The text, in parts.

        Raises:
          InputError: if it is not UTF-8, or has changed since its digest was taken.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        result, position = hashlib.sha256(), 0
        with self._path.open("rb") as opened:
            while True:
                raw = opened.read(PIECE)
                result.update(raw)
                # The decoder keeps an incomplete character for the next piece.
                start = position - len(decoder.getstate()[0])
                with in_utf_8(self.source, start):
                    text = decoder.decode(raw, final=not raw)
                position += len(raw)
                if text:
                    yield text
                if not raw:
                    break
        if self._digest not in (None, result.hexdigest()):
            raise InputError(
                f"a file was changed. {self.source} has other bytes than a moment before. It must "
                f"stay as it is while it is read. Run the same command again."
            )


AnyDocument = Document | TextFile


def is_held_out(document: AnyDocument | MarkedDocument, fraction: float) -> bool:
    """Whether a document belongs to the held-out file; depends only on its text."""
    return int(document.digest()[:16], 16) < fraction * 2**64


def read_documents(files: list[Path], text_field: str) -> Iterator[AnyDocument]:
    """Yields the non-empty documents of all files."""
    for file in files:
        if file.suffix == ".jsonl":
            documents = _read_jsonl(file, text_field)
        elif file.suffix == ".parquet":
            documents = _read_parquet(file, text_field)
        else:
            with file.open("rb") as opened:
                if opened.read(1):
                    yield TextFile(file)
            continue
        for document in documents:
            if document.text:
                yield document


def _read_jsonl(file: Path, text_field: str) -> Iterator[Document]:
    for line in read_lines(file):
        yield Document(_field(line.value(), text_field, line.source), line.source)


def _read_parquet(file: Path, text_field: str) -> Iterator[Document]:
    for row in read_parquet(file, (text_field,)):
        yield Document(_field(row.value(), text_field, row.source), row.source)


def _field(value: Any, text_field: str, source: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
        have = ", ".join(sorted(value)[:8]) if isinstance(value, dict) else type(value).__name__
        raise InputError(
            f"no text. {source} has {have}. Field {text_field!r} must hold a string. Name the "
            f"right one with --text-field; conversations are for moejax prepare --chat."
        )
    check_unicode(value[text_field], source)
    return value[text_field]
