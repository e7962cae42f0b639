"""Documents out of text, JSONL and Parquet files, one at a time."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.errors import InputError


@dataclass(frozen=True)
class Document:
    """A text and where it came from."""

    text: str
    source: str


def is_held_out(document: Document, fraction: float) -> bool:
    """Whether a document goes to the held-out file; depends on its text alone."""
    digest = hashlib.sha256(document.text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def read_documents(files: list[Path], text_field: str) -> Iterator[Document]:
    """Yields the documents of all files that are not empty."""
    for file in files:
        if file.suffix == ".jsonl":
            found = _read_jsonl(file, text_field)
        elif file.suffix == ".parquet":
            found = _read_parquet(file, text_field)
        else:
            found = iter([Document(_decode(file.read_bytes(), str(file)), str(file))])
        for document in found:
            if document.text:
                yield document


def _decode(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text is not UTF-8. {source}, byte {error.start}: 0x{raw[error.start]:02x}. All text "
            f"must be UTF-8. Convert it with iconv."
        ) from error


def _read_jsonl(file: Path, text_field: str) -> Iterator[Document]:
    with file.open("rb") as opened:
        for number, raw in enumerate(opened, 1):
            source = f"{file}, line {number}"
            if not raw.strip():
                continue
            try:
                value = json.loads(_decode(raw, source))
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
        for batch in table.iter_batches(columns=[text_field]):
            for value in batch.column(0):
                source, row = f"{file}, row {row}", row + 1
                yield Document(_field({text_field: value.as_py()}, text_field, source), source)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(
            f"Parquet file is damaged. {file}, after row {row}: "
            f"{' '.join(str(error).split())[:120]}. It must be Parquet. Copy it again."
        ) from error
