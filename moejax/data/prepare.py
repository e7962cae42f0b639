"""The command `moejax prepare`: text, JSONL or Parquet files into token files.

Documents stream through: memory does not grow with the input. Files are written under temporary
names, digested while they are written, and renamed when they are complete.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moejax.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from moejax.data.tokens import FORMAT_VERSION, Sidecar, sidecar_of
from moejax.errors import InputError

CHUNK_TOKENS = 8192
SUFFIXES = {"bin": ".bin", "array_record": ".array_record"}
EPILOG = """\
examples:
  moejax prepare books/*.txt --out data/books
  moejax prepare web.jsonl --text-field text --tokenizer tokenizer.json --out data/web
  moejax prepare wiki.parquet --format array_record --out data/wiki

writes data/books.train.bin and data/books.eval.bin, each with a .json beside it. Train on them with
  --config.data.source=tokens --config.data.train_files=data/books.train.bin \\
  --config.data.eval_files=data/books.eval.bin
(array_record files: --config.data.source=array_record).
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        prepare(args, Console(stderr=True))
    except InputError as error:
        print(f"moejax: error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="moejax prepare",
        description="Turns text into token files for training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=".jsonl: an object a line; .parquet: a document a row; else: a document a file",
    )
    made.add_argument("--out", required=True, help="output path without ending, e.g. data/books")
    made.add_argument("--tokenizer", help="a tokenizer.json; without it, ids are bytes")
    made.add_argument("--eos", help="token (or id) that ends a document; default: the usual names")
    made.add_argument("--text-field", default="text", help="field or column of the text")
    made.add_argument("--format", choices=sorted(SUFFIXES), default="bin", help="default: bin")
    made.add_argument(
        "--eval-fraction",
        type=float,
        default=0.01,
        help="documents held out, chosen by a hash of their text (default 0.01; 0: none)",
    )
    made.add_argument("--overwrite", action="store_true", help="replace existing files")
    return made


def prepare(args: argparse.Namespace, console: Console) -> None:
    """Writes the token files that the command line asks for."""
    if not 0 <= args.eval_fraction < 1:
        raise InputError(
            f"`--eval-fraction` is out of range. Got {args.eval_fraction}. It must be at least 0 "
            f"and below 1. Use 0.01 to hold one document in a hundred out."
        )
    files = [Path(name) for name in args.files]
    for file in files:
        if not file.is_file():
            raise InputError(
                f"no input file. {file} does not exist. Every argument must name a file. Check "
                f"the path."
            )
    tokenizer: Tokenizer = ByteTokenizer()
    if args.tokenizer is not None:
        tokenizer = FileTokenizer(Path(args.tokenizer), args.eos)
    splits = ["train", "eval"] if args.eval_fraction else ["train"]
    writers = {split: _open_writer(args, split, tokenizer) for split in splits}
    try:
        _write_documents(args, files, tokenizer, writers, console)
        for writer in writers.values():
            writer.finish()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    for split, writer in writers.items():
        console.print(
            f"{split}: {writer.path}  {writer.num_documents:,} documents, "
            f"{writer.num_tokens:,} tokens, {writer.num_bytes:,} bytes of text",
            highlight=False,
            soft_wrap=True,
        )


def _open_writer(args: argparse.Namespace, split: str, tokenizer: Tokenizer) -> "Writer":
    """Makes the output of one split; refuses to replace files unasked."""
    path = Path(f"{args.out}.{split}{SUFFIXES[args.format]}")
    if path.exists() and not args.overwrite:
        raise InputError(
            f"output exists. {path} is there already. Nothing is replaced unasked. Add "
            f"--overwrite, or choose another --out."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    name = "bytes"
    if args.tokenizer is not None:
        # A copy beside the tokens: training samples text with it long after this one has moved.
        name = f"{path.name.split('.')[0]}.tokenizer.json"
        copy = path.with_name(name)
        if not copy.exists() or not copy.samefile(args.tokenizer):
            shutil.copyfile(args.tokenizer, copy)
    kind = BinWriter if args.format == "bin" else ArrayRecordWriter
    return kind(path, tokenizer, name)


def _write_documents(
    args: argparse.Namespace,
    files: list[Path],
    tokenizer: Tokenizer,
    writers: dict[str, "Writer"],
    console: Console,
) -> None:
    """Streams every document to its split, with progress on a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading")
        for number, document in enumerate(read_documents(files, args.text_field)):
            held_out = "eval" in writers and is_held_out(document, args.eval_fraction)
            writers["eval" if held_out else "train"].add(document, tokenizer)
            if number % 200 == 0:
                tokens = sum(writer.num_tokens for writer in writers.values())
                text = f"{document.source}  {number:,} documents, {tokens:,} tokens"
                progress.update(task, description=text)
    for split, writer in writers.items():
        if not writer.num_documents:
            raise InputError(
                f"no {split} documents. {len(files)} files gave "
                f"{sum(w.num_documents for w in writers.values())} documents. Each split needs one. "
                f"Give more documents, or change --eval-fraction (0: no held-out file)."
            )


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
            except json.JSONDecodeError as error:
                raise InputError(
                    f"line is not JSON. {source}: {error.msg}. Every line must be one JSON object. "
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
    return value[text_field]


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
    for batch in table.iter_batches(columns=[text_field]):
        for value in batch.column(0):
            source, row = f"{file}, row {row}", row + 1
            yield Document(_field({text_field: value.as_py()}, text_field, source), source)


class Writer:
    """A token file in the making; subclasses store ids."""

    def __init__(self, path: Path, tokenizer: Tokenizer, tokenizer_name: str):
        self.path, self.tokenizer_name = path, tokenizer_name
        self.partial = path.with_name(path.name + ".partial")
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self.dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self.num_tokens = self.num_bytes = self.num_documents = 0
        self._open()
        self._store([self.eos_id])

    def add(self, document: Document, tokenizer: Tokenizer) -> None:
        """Adds a document and the token that ends it."""
        self._store([*tokenizer.encode(document.text), self.eos_id])
        self.num_documents += 1
        self.num_bytes += len(document.text.encode("utf-8"))

    def _store(self, ids: list[int]) -> None:
        array = np.array(ids, np.dtype(self.dtype).newbyteorder("<"))
        self.num_tokens += len(array)
        self._put(array)

    def finish(self) -> None:
        """Closes the file, writes its sidecar, and gives both their names."""
        self._close()
        with self.partial.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        sidecar = Sidecar(
            format_version=FORMAT_VERSION,
            format=self.format,
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            num_documents=self.num_documents,
            sha256=digest,
            tokenizer=self.tokenizer_name,
            chunk_tokens=CHUNK_TOKENS if self.format == "array_record" else None,
        )
        sidecar_of(self.path).unlink(missing_ok=True)
        self.partial.replace(self.path)
        sidecar.write(self.path)

    def abandon(self) -> None:
        """Removes what was written."""
        self._close()
        self.partial.unlink(missing_ok=True)

    format = ""

    def _open(self) -> None:
        raise NotImplementedError

    def _put(self, array: np.ndarray) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


class BinWriter(Writer):
    """Ids one after the other."""

    format = "bin"
    _file: BinaryIO

    def _open(self) -> None:
        self._file = self.partial.open("wb")

    def _put(self, array: np.ndarray) -> None:
        self._file.write(array.tobytes())

    def _close(self) -> None:
        self._file.close()


class ArrayRecordWriter(Writer):
    """Ids in records of CHUNK_TOKENS, the last one shorter."""

    format = "array_record"

    def _open(self) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter as Library

        # One record a group: sequences are read at random.
        self._writer = Library(str(self.partial), "group_size:1")
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    def _put(self, array: np.ndarray) -> None:
        self._waiting.append(array)
        self._num_waiting += len(array)
        if self._num_waiting >= CHUNK_TOKENS:
            joined = np.concatenate(self._waiting)
            whole = len(joined) // CHUNK_TOKENS * CHUNK_TOKENS
            for start in range(0, whole, CHUNK_TOKENS):
                self._writer.write(joined[start : start + CHUNK_TOKENS].tobytes())
            self._waiting, self._num_waiting = [joined[whole:]], len(joined) - whole

    def _close(self) -> None:
        if not self._writer.is_open():
            return
        if self._num_waiting:
            self._writer.write(np.concatenate(self._waiting).tobytes())
        self._writer.close()


if __name__ == "__main__":
    sys.exit(main())
