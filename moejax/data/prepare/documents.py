"""Documents out of text, JSONL and Parquet files, one at a time."""

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from moejax.data.marks import MarkedDocument
from moejax.data.prepare.inputs import kind_of, open_bytes
from moejax.data.prepare.rows import BadRowError, check_unicode, in_utf_8, read_lines, read_parquet
from moejax.errors import InputError
from moejax.screen import counted

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
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def pieces(self) -> Iterator[str]:
        """The text, in parts."""
        for start in range(0, len(self.text), PIECE):
            yield self.text[start : start + PIECE]


class TextFile:
    """A plain text file, or a part of it, as one document.

    It is read twice: for its digest and its text.

    Attributes:
      held_out: whether it belongs to the held-out file; None: its digest decides.
    """

    def __init__(
        self, path: Path, start: int = 0, stop: int | None = None, held_out: bool | None = None
    ):
        """Takes a path, and the first byte of the document and the one behind it."""
        self._path, self.source, self.held_out = path, str(path), held_out
        self._start, self._stop = start, stop
        self._digest: str | None = None

    def size(self) -> int:
        """Number of bytes."""
        return self._path.stat().st_size

    def digest(self) -> str:
        """Returns the sha256 of its bytes; `pieces` checks that it has not changed."""
        result = hashlib.sha256()
        for raw in self._raw():
            result.update(raw)
        self._digest = result.hexdigest()
        return self._digest

    def _raw(self) -> Iterator[bytes]:
        """Yields the document's bytes, in parts."""
        start, stop, position = self._start, self._stop, 0
        with open_bytes(self._path) as opened:
            while raw := opened.read(PIECE):
                first, position = position, position + len(raw)
                last = None if stop is None else max(stop - first, 0)
                if kept := raw[max(start - first, 0) : last]:
                    yield kept
                if stop is not None and position >= stop:
                    return

    def pieces(self) -> Iterator[str]:
        """The text, in parts.

        Raises:
          InputError: if it is not UTF-8, or has changed since its digest was taken.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        result, position = hashlib.sha256(), self._start
        for raw in chain(self._raw(), (b"",)):
            result.update(raw)
            # The decoder keeps an incomplete character for the next piece.
            start = position - len(decoder.getstate()[0])
            with in_utf_8(self.source, start):
                text = decoder.decode(raw, final=not raw)
            position += len(raw)
            if text:
                yield text
        if self._digest not in (None, result.hexdigest()):
            raise InputError(
                f"a file was changed. {self.source} has other bytes than a moment before. It must "
                f"stay as it is while it is read. Run the same command again."
            )


AnyDocument = Document | TextFile


def halves(path: Path, fraction: float) -> list[TextFile]:
    """Cuts a text file at the end of a line: what is before is learned, what is behind held out.

    Args:
      fraction: share of the bytes that is held out, about.
    Returns:
      Two documents, or one of the whole file where no line ends in the last part of it.
    """
    with open_bytes(path) as opened:
        size = sum(map(len, iter(lambda: opened.read(PIECE), b"")))
    wanted = int(size * (1 - fraction))
    with open_bytes(path) as opened:
        position = 0
        while position < wanted:
            position += len(opened.read(min(PIECE, wanted - position)))
        for line in iter(lambda: opened.readline(PIECE), b""):
            position += len(line)
            if line.endswith(b"\n"):
                break
    if not 0 < position < size:
        return [TextFile(path)]
    return [TextFile(path, 0, position, False), TextFile(path, position, size, True)]


def rank_of(document: AnyDocument | MarkedDocument) -> float:
    """Returns a document's place, from 0 to 1: those of low rank are held out.

    Depends only on its text.
    """
    if isinstance(document, TextFile) and document.held_out is not None:
        return 0.0 if document.held_out else 1.0
    return int(document.digest()[:16], 16) / 2**64


class Skipped:
    """Counts rows and files that are left out because they are broken, and files without text."""

    def __init__(self, *, takes_bad: bool = False):
        """Takes whether broken rows and files are left out."""
        self.takes_bad = takes_bad
        self.rows, self.files, self.first = 0, 0, ""
        self.empty: list[Path] = []

    def add(self, error: BadRowError, *, file: bool = False) -> None:
        """Counts a row or a file, and keeps the first message; or raises the error."""
        if not self.takes_bad:
            raise error
        self.files += file
        self.rows += not file
        self.first = self.first or str(error)

    @property
    def text(self) -> str:
        """The numbers of rows and files left out as broken, in words; "" if there are none."""
        counts = {"row": self.rows, "file": self.files}
        return " and ".join(counted(n, f"broken {noun}") for noun, n in counts.items() if n)

    def notes(self) -> list[str]:
        """Returns what the user should know after all was read."""
        notes = [f"left out: {self.text}. The first: {self.first}"] if self.text else []
        if self.empty:
            notes.append(f"files without text: {len(self.empty):,}. The first: {self.empty[0]}")
        return notes


def _is_left_out(file: TextFile, skipped: Skipped) -> bool:
    """Whether a file is left out because it is not UTF-8 throughout."""
    if not skipped.takes_bad:
        return False
    try:
        for _ in file.pieces():
            pass
    except BadRowError as error:
        skipped.add(error, file=True)
        return True
    return False


def read_documents(
    files: list[Path], text_field: str, skipped: Skipped | None = None, *, fraction: float = 0.0
) -> Iterator[AnyDocument]:
    """Yields the non-empty documents of all files.

    Args:
      text_field: field or column of the text.
      skipped: counts what is left out; to leave broken files out reads text files once more.
      fraction: share to hold out of a text file that is alone; 0: it stays whole.

    Raises:
      BadRowError: for the first broken row or file, unless `skipped` takes it.
    """
    skipped = skipped or Skipped()
    for file in files:
        if kind_of(file) == "text":
            with open_bytes(file) as opened:
                empty = not opened.read(1)
            if empty:
                skipped.empty.append(file)
            elif not _is_left_out(TextFile(file), skipped):
                yield from halves(file, fraction) if fraction else [TextFile(file)]
            continue
        rows = read_lines(file) if kind_of(file) == "jsonl" else read_parquet(file, (text_field,))
        row = None
        for row in rows:
            try:
                document = Document(_text_of(row.value(), text_field, row.source), row.source)
            except BadRowError as error:
                skipped.add(error)
                continue
            if document.text:
                yield document
        if row is None:
            skipped.empty.append(file)


def _text_of(value: Any, text_field: str, source: str) -> str:
    """Returns the text of a row."""
    if isinstance(value, dict) and text_field in value:
        text = value[text_field]
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise BadRowError(
                f"a row without text. {source}: field {text_field!r} is {kind}. It must be a "
                f"string. Correct the row, or leave such rows out with --skip-bad."
            )
        check_unicode(text, source)
        return text
    have = ", ".join(sorted(value)[:8]) if isinstance(value, dict) else type(value).__name__
    raise BadRowError(
        f"no text. {source} has {have}. Field {text_field!r} must hold a string. Name the "
        f"right one with --text-field; conversations are for moejax prepare --chat."
    )
