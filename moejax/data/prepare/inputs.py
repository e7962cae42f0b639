"""The files that `moejax prepare` reads: found in directories, decompressed, or from stdin."""

import gzip
import io
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moejax.errors import InputError

STDIN = "-"
COMPRESSED = (".gz", ".zst")
TEXT = (".txt", ".text", ".md", ".rst")
ROWS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InputFiles(NamedTuple):
    """Files in the order in which they are read, and how many others their directories hold."""

    paths: list[Path]
    num_left_out: int = 0


def find_inputs(
    names: Sequence[str], scratch: Path, stdin_format: str = "text", endings: Sequence[str] = ()
) -> InputFiles:
    """Returns the files that arguments name.

    Args:
      names: files; directories, of which files with known endings are taken, in sorted order; and
        at most one `-`, standard input.
      scratch: directory that standard input is copied to, because text is read twice.
      stdin_format: "text" or "jsonl".
      endings: further ones of text files that directories are searched for, such as ".py".

    Raises:
      InputError: if a name is no file or directory, or a directory holds nothing to read.
    """
    _check_endings(endings, names)
    paths: list[Path] = []
    num_left_out = 0
    for name in names:
        path = Path(name)
        if name == STDIN:
            paths.append(_standard_input(scratch, stdin_format))
        elif path.is_dir():
            taken, left_out = _search(path, endings)
            num_left_out += left_out
            paths += taken
        elif path.is_file():
            paths.append(path)
        else:
            raise InputError(
                f"no input file. {path} does not exist. Every argument must name a file, a "
                f"directory, or - for standard input. Check the path."
            )
    if len({path.resolve() for path in paths}) < len(paths):
        resolved = [path.resolve() for path in paths]
        twice = next(p for p, r in zip(paths, resolved, strict=True) if resolved.count(r) > 1)
        raise InputError(
            f"an input file is named twice. {twice} would be learned twice. Each file is read "
            f"once. Name it once, or the directory alone."
        )
    return InputFiles(paths, num_left_out)


def _search(folder: Path, endings: Sequence[str]) -> tuple[list[Path], int]:
    """Returns a directory's files with known endings, and the number of its other files."""
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    taken = [path for path in inside if _is_known(path, endings)]
    if not taken:
        raise InputError(
            f"nothing to read. {folder} holds {len(inside)} files, none with an ending of "
            f"{', '.join((*TEXT, *ROWS, *endings))} (.gz, .zst behind). Other text is read "
            f"where its ending is named, such as --ending .py, or the file itself."
        )
    return taken, len(inside) - len(taken)


def _check_endings(endings: Sequence[str], names: Sequence[str]) -> None:
    """Refuses endings that are none, that stand for rows, or that no directory is searched for."""
    for ending in endings:
        if not re.fullmatch(r"\.[^./\s]+", ending) or ending.lower() in (*ROWS, *COMPRESSED):
            raise InputError(
                f"`--ending` is wrong. Got {ending!r}. It is a dot and letters, of files that are "
                f"text: {', '.join((*ROWS, *COMPRESSED))} are read by their format. Write "
                f"--ending .py."
            )
    if endings and not any(Path(name).is_dir() for name in names):
        raise InputError(
            f"`--ending` has no effect. Got {endings[0]!r}, but no directory. It chooses files of "
            f"directories; a file that is named is read whatever its ending. Leave it out."
        )


def _is_known(path: Path, endings: Sequence[str]) -> bool:
    known = (*TEXT, *(ending.lower() for ending in endings))
    return not path.name.startswith(".") and (kind_of(path) != "text" or _ending(path) in known)


def _ending(path: Path) -> str:
    """Returns the ending of what a file holds, without that of its compression."""
    bare = path.with_suffix("") if path.suffix in COMPRESSED else path
    return bare.suffix.lower()


def kind_of(path: Path) -> str:
    """Returns "jsonl", "parquet" or "text"."""
    return ROWS.get(_ending(path), "text")


def _standard_input(scratch: Path, stdin_format: str) -> Path:
    """Copies standard input to a file. Returns its path."""
    path = scratch / f"standard-input{'.jsonl' if stdin_format == 'jsonl' else ''}"
    with path.open("xb") as opened:
        shutil.copyfileobj(sys.stdin.buffer, opened)
    return path


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file's bytes, decompressed, without a byte-order mark.

    Raises:
      InputError: if it is damaged, or compressed in a way that needs a package that is missing.
    """
    with path.open("rb") as raw:
        opened = raw if path.suffix not in COMPRESSED else _decompressed(path, raw)
        try:
            if opened.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
                opened.read(len(BYTE_ORDER_MARK))
            yield opened
        except (OSError, EOFError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk; those of gzip and zstd have no number
            raise InputError(
                f"a compressed file is damaged. {path}: {error}. It must be whole. Copy it again."
            ) from error


def _decompressed(path: Path, raw: io.BufferedReader) -> io.BufferedReader:
    """Returns a reader of a compressed file's content."""
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    try:
        import pyarrow
    except ImportError as error:
        raise InputError(
            f"pyarrow is missing. {path} is compressed by zstd. It comes with an extra. Run "
            f"pip install 'moejax[data]'."
        ) from error
    return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"))
