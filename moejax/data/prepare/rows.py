"""Rows of JSONL and Parquet files, one at a time, with their origin."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from moejax.data.prepare.inputs import open_bytes
from moejax.errors import InputError

ROWS = 1024  # rows of Parquet decoded at once


class BadRowError(InputError):
    """A row that cannot be used, while others of its file can."""


class Row(NamedTuple):
    """A line of a JSONL file as it stands there, or the read columns of a row of a Parquet file."""

    content: bytes | dict[str, Any]
    source: str

    def value(self) -> Any:
        """Returns the JSON value of a line, or the columns by name.

        Raises:
          BadRowError: if a line is not JSON, or not UTF-8.
        """
        if isinstance(self.content, dict):
            return self.content
        try:
            with in_utf_8(self.source):
                text = self.content.decode("utf-8")
            return json.loads(text)
        # Brackets nested thousands deep end json with RecursionError.
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadRowError(
                f"line is not JSON. {self.source}: {error}. Every line must be one JSON object. "
                f"Correct or remove the line."
            ) from error


@contextmanager
def in_utf_8(source: str, start: int = 0) -> Iterator[None]:
    """Turns decoding errors into InputErrors that name the position.

    Args:
      start: position of the first decoded byte in the source.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise BadRowError(
            f"text is not UTF-8. {source}, byte {start + error.start}: "
            f"0x{error.object[error.start]:02x}. All text must be UTF-8. Convert "
            f"it with iconv, or leave it out (moejax prepare --skip-bad)."
        ) from error


def check_unicode(text: str, source: str) -> None:
    """Refuses half a character, which JSON can spell as backslash ud800.

    Raises:
      BadRowError: names its position.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"text is not Unicode. {source}, character {error.start}: {text[error.start]!a}. A "
            f"surrogate stands only in a pair. Correct or remove it."
        ) from error


def read_lines(file: Path) -> Iterator[Row]:
    """Yields the lines of a JSONL file that are not blank."""
    with open_bytes(file) as opened:
        for number, raw in enumerate(opened, 1):
            if raw.strip():
                yield Row(raw, f"{file}, line {number}")


def read_parquet(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of a Parquet file.

    Args:
      columns: names of which those are read that the file has.
    Raises:
      InputError: if the file is damaged or has none of the columns, or pyarrow is missing.
    """
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
    present = table.schema_arrow.names
    wanted = [name for name in columns if name in present]
    if not wanted:
        raise InputError(_no_column(file, present, columns))
    row = 0
    try:
        for batch in table.iter_batches(batch_size=ROWS, columns=wanted):
            for values in zip(*map(batch.column, wanted), strict=True):
                source, row = f"{file}, row {row}", row + 1
                read = {name: value.as_py() for name, value in zip(wanted, values, strict=True)}
                yield Row(read, source)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(
            f"Parquet file is damaged. {file}, after row {row}: "
            f"{' '.join(str(error).split())[:120]}. It must be Parquet. Copy it again."
        ) from error


def _no_column(file: Path, present: Sequence[str], columns: Sequence[str]) -> str:
    """Returns the message about a file without any of the columns."""
    have = ", ".join(present[:8])
    if len(columns) == 1:
        return (
            f"no text. {file} has columns {have}. Column {columns[0]!r} must hold strings. Name "
            f"the right one with --text-field; conversations are for moejax prepare --chat."
        )
    return (
        f"no conversations. {file} has columns {have}. There must be messages, or prompt and "
        f"completion, or instruction and output. Rename the columns."
    )
