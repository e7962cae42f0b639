"""Documents out of text, JSONL and Parquet files, one at a time."""

import codecs
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.errors import InputError

PIECE = 1 << 20  # bytes of a file, or characters of a text, in one piece
ROWS = 1024  # rows of Parquet decoded at once


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
                with _utf_8(self.source, start):
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


def is_held_out(document: AnyDocument, fraction: float) -> bool:
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


@contextmanager
def _utf_8(source: str, start: int = 0) -> Iterator[None]:
    """Turns decoding errors into InputErrors that name the position.

    Args:
      start: position of the first decoded byte in the source.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(
            f"text is not UTF-8. {source}, byte {start + error.start}: "
            f"0x{error.object[error.start]:02x}. All text must be UTF-8. Convert it with iconv."
        ) from error


def _read_jsonl(file: Path, text_field: str) -> Iterator[Document]:
    with file.open("rb") as opened:
        for number, raw in enumerate(opened, 1):
            source = f"{file}, line {number}"
            if not raw.strip():
                continue
            try:
                with _utf_8(source):
                    text = raw.decode("utf-8")
                value = json.loads(text)
            # Brackets nested thousands deep end json with RecursionError.
            except (json.JSONDecodeError, RecursionError) as error:
                raise InputError(
                    f"line is not JSON. {source}: {error}. Every line must be one JSON object. "
                    f"Correct or remove the line."
                ) from error
            yield Document(_field(value, text_field, source), source)


def _field(value: Any, text_field: str, source: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
        have = ", ".join(sorted(value)[:8]) if isinstance(value, dict) else type(value).__name__
        raise InputError(
            f"no text. {source} has {have}. Field {text_field!r} must hold a string. Name the "
            f"right one with --text-field."
        )
    text = value[text_field]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half a character: "\\ud800"
        raise InputError(
            f"text is not Unicode. {source}, character {error.start}: {text[error.start]!a}. A "
            f"surrogate stands only in a pair. Correct or remove it."
        ) from error
    return text


def _read_parquet(file: Path, text_field: str) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"pyarrow is missing. {file} is a Parquet file. It comes with an extra. Run pip "
            f"install 'moejax[data]'."
        ) from error
    try:
        table = parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InputError(
            f"Parquet file is damaged. {file}: {' '.join(str(error).split())[:120]}. It must be "
            f"Parquet. Copy it again."
        ) from error
    if text_field not in table.schema_arrow.names:
        have = ", ".join(table.schema_arrow.names[:8])
        raise InputError(
            f"no text. {file} has columns {have}. Column {text_field!r} must hold strings. Name "
            f"the right one with --text-field."
        )
    row = 0
    try:
        for batch in table.iter_batches(batch_size=ROWS, columns=[text_field]):
            for value in batch.column(0):
                source, row = f"{file}, row {row}", row + 1
                yield Document(_field({text_field: value.as_py()}, text_field, source), source)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(
            f"Parquet file is damaged. {file}, after row {row}: "
            f"{' '.join(str(error).split())[:120]}. It must be Parquet. Copy it again."
        ) from error
