"""The command `moejax prepare`: text, conversations, JSONL or Parquet files into token files.

Memory does not grow with the input: documents stream through one at a time, and plain text files
piece by piece. Only uncuttable parts are held whole: a line of JSONL, some rows of Parquet, and the
text between two allowed cuts (`moejax.data.cuts`).

Files are written under temporary names and renamed when they are complete.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from moejax.config.checks.paths import check_folder
from moejax.data.marks import MarkedDocument, marks_of
from moejax.data.prepare.chat import ChatReader
from moejax.data.prepare.documents import AnyDocument, Skipped, read_documents
from moejax.data.prepare.flags import SUFFIXES, parser
from moejax.data.prepare.inputs import STDIN, InputFiles, find_inputs, kind_of
from moejax.data.prepare.split import Split
from moejax.data.prepare.writers import ArrayRecordWriter, BinWriter
from moejax.data.sidecar import is_plain_name, sidecar_of
from moejax.data.tokenizer import BYTES, ByteTokenizer, FileTokenizer, Tokenizer, digest
from moejax.data.tokens import open_files, verify
from moejax.errors import InputError, exit_code
from moejax.screen import counted, screen, text_column

SECONDS_BETWEEN_LINES = 10  # of progress without a terminal
DEFAULT_FRACTION = 0.01  # of the text is held out
LARGE_BYTES = 64 << 20  # size above which a document that must be encoded whole is reported
CHAT_OPTIONS = ("chat_template", "answers", "date")  # without --chat no effect


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0, or 2 for bad input."""
    args = parser().parse_args(argv)

    def run() -> None:
        if args.verify:
            verify_files(args.files)
        else:
            prepare(args, screen(stderr=True))

    return exit_code(run, stopped="unfinished files were removed", files=True)


def prepare(args: argparse.Namespace, console: Console) -> None:
    """Writes the token files that the command line asks for."""
    _check_arguments(args)
    _check_output(args)
    with tempfile.TemporaryDirectory(prefix="moejax-") as scratch:
        stdin_format = args.stdin_format or "text"
        files = find_inputs(args.files, Path(scratch), stdin_format, args.ending)
        tokenizer: Tokenizer = ByteTokenizer()
        if args.tokenizer is not None:
            tokenizer = FileTokenizer(Path(args.tokenizer), args.eos)
        fraction = DEFAULT_FRACTION if args.eval_fraction is None else args.eval_fraction
        try:
            notes = _write_splits(args, files, tokenizer, Split(fraction), console)
        except _ShareMissedError as missed:
            notes = _write_splits(args, files, tokenizer, missed.nearer, console)
    if files.num_left_out:
        notes.append(f"files left out, for their endings: {files.num_left_out:,}")
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def _write_splits(
    args: argparse.Namespace,
    files: InputFiles,
    tokenizer: Tokenizer,
    split: Split,
    console: Console,
) -> list[str]:
    """Reads all documents once and writes each to its side. Returns notes.

    Raises:
      InputError: if a side has no document; nothing is left of the files.
      _ShareMissedError: if another split comes nearer to the share; the same holds.
    """
    chat = ChatReader(args) if args.chat else None
    skipped = Skipped(takes_bad=args.skip_bad)
    writers: dict[str, BinWriter] = {}
    try:
        for side in ("train", "eval") if split.share else ("train",):
            writers[side] = _open_writer(args, side, tokenizer, chat)
        documents: Iterator[AnyDocument | MarkedDocument]
        if chat is not None:
            documents = chat.read(files.paths, skipped)
        else:
            alone = len(files.paths) == 1 and kind_of(files.paths[0]) == "text"
            fraction, field = split.share if alone else 0.0, args.text_field or "text"
            documents = read_documents(files.paths, field, skipped, fraction=fraction)
        _write_documents(documents, split, tokenizer, writers, console)
        if (nearer := split.nearer()) is not None:
            raise _ShareMissedError(nearer)
        _check_splits(writers, len(files.paths), skipped.text)
        for path in _outputs(args):  # held-out text of an earlier run may be training text now
            path.unlink()
        if args.tokenizer is not None:
            # A copy beside the tokens, because sampling needs it and the original may move.
            _copy_tokenizer(Path(args.tokenizer), _tokenizer_copy(args))
        for writer in writers.values():
            writer.finish()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    notes = [_summary(side, writer, args.chat) for side, writer in writers.items()]
    if split.share and not split.is_near:
        notes.append(
            f"held out: {100 * split.held_out_bytes / split.num_bytes:.4g} % of the text, the "
            f"nearest to {100 * split.share:.4g} %: documents stay whole, and equal ones together"
        )
    return notes + skipped.notes() + (chat.notes() if chat else [])


def _summary(split: str, writer: BinWriter, chat: bool) -> str:
    learned = f" ({writer.num_targets:,} learned)" if chat else ""
    return (
        f"{split}: {writer.path}  {writer.num_documents:,} documents, "
        f"{writer.num_tokens:,} tokens{learned}, {writer.num_bytes:,} bytes of text"
    )


def _open_writer(
    args: argparse.Namespace, split: str, tokenizer: Tokenizer, chat: ChatReader | None
) -> BinWriter:
    """Opens the output of one split."""
    form = None if chat is None else chat.form
    path = Path(f"{args.out}.{split}{SUFFIXES[args.format]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = BinWriter if args.format == "bin" else ArrayRecordWriter
    if args.tokenizer is None:
        return kind(path, tokenizer, BYTES, marked=args.chat, chat=form)
    name, sha256 = _tokenizer_copy(args).name, digest(Path(args.tokenizer))
    return kind(path, tokenizer, name, sha256, marked=args.chat, chat=form)


def _tokenizer_copy(args: argparse.Namespace) -> Path:
    return Path(f"{args.out}.tokenizer.json")


def _copy_tokenizer(original: Path, copy: Path) -> None:
    if copy.exists() and copy.samefile(original):
        return
    partial = copy.with_name(copy.name + ".partial")
    shutil.copyfile(original, partial)
    partial.replace(copy)


def _outputs(args: argparse.Namespace) -> list[Path]:
    """Returns existing token files of this name, of any split and format, with sidecars."""
    files = [Path(f"{args.out}.{s}{end}") for s in ("train", "eval") for end in SUFFIXES.values()]
    named = [path for file in files for path in (file, sidecar_of(file), marks_of(file))]
    return [path for path in named if path.exists()]


def _check_output(args: argparse.Namespace) -> None:
    """Refuses to replace files without `--overwrite`, and a folder that cannot be written."""
    check_folder(Path(args.out).parent, f"--out {args.out}")
    existing = _outputs(args)
    if existing and not args.overwrite:
        raise InputError(
            f"output exists. {existing[0]} is there already. Nothing is replaced unasked. Add "
            f"--overwrite, or choose another --out."
        )


def _check_arguments(args: argparse.Namespace) -> None:
    if args.out is None or not is_plain_name(Path(args.out).name):
        raise InputError(
            f"no output name. `--out` is {args.out!r}. It must be a path that ends in a name of "
            f"ASCII letters, digits and . _ + -. Write --out data/books."
        )
    if args.eos is not None and args.tokenizer is None:
        raise InputError(
            f"`--eos` has no effect. Got {args.eos!r} without --tokenizer. The tokenizer of bytes "
            f"has eos 256. Leave --eos out, or name a --tokenizer."
        )
    given = [name for name in CHAT_OPTIONS if getattr(args, name)]
    if given and not args.chat:
        raise InputError(
            f"`--{given[0].replace('_', '-')}` has no effect. Got it without --chat. It is about "
            f"conversations. Add --chat, or leave it out."
        )
    if args.stdin_format is not None and STDIN not in args.files:
        raise InputError(
            f"`--stdin-format` has no effect. Got {args.stdin_format!r}, but standard input is not "
            f"read. Name - among the files, or leave it out."
        )
    if args.chat and args.text_field is not None:
        raise InputError(
            f"`--text-field` has no effect. Got {args.text_field!r} with --chat. Conversations "
            f"have fields of fixed names. Leave it out."
        )
    if args.eval_fraction is not None and not 0 <= args.eval_fraction < 1:
        raise InputError(
            f"`--eval-fraction` is out of range. Got {args.eval_fraction}. It must be at least 0 "
            f"and below 1. Use 0.01 to hold one part in a hundred out."
        )


def verify_files(patterns: list[str]) -> None:
    """Checks token files of both formats against the digests in their sidecars.

    Raises:
      InputError: for the first file that differs.
    """
    for pattern in patterns:
        format = "array_record" if pattern.endswith(SUFFIXES["array_record"]) else "bin"
        for source in open_files([pattern], format, model_vocab=2**31).sources:
            verify(source)
            print(f"{source.path}: sha256 is right")


def _write_documents(
    documents: Iterator[AnyDocument | MarkedDocument],
    split: Split,
    tokenizer: Tokenizer,
    writers: dict[str, BinWriter],
    console: Console,
) -> None:
    """Streams every document to its side, with progress on a terminal."""
    columns = (SpinnerColumn(), text_column(), TimeElapsedColumn())
    last_update = time.monotonic()
    told, drawn = tokenizer.cuts, console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not drawn) as progress:
        task = progress.add_task("reading")
        for number, document in enumerate(documents):
            told = told or _tell_of_large(document, console)
            held_out = split.holds_out(document)
            writer = writers["eval" if held_out else "train"]
            before = writer.num_bytes
            if isinstance(document, MarkedDocument):
                writer.add_marked(document)
            else:
                writer.add(document, tokenizer)
            split.count(writer.num_bytes - before, held_out)
            if number % 200 == 0:
                tokens = sum(writer.num_tokens for writer in writers.values())
                text = f"{document.source}  {number:,} documents, {tokens:,} tokens"
                progress.update(task, description=text)
                if not drawn and time.monotonic() - last_update > SECONDS_BETWEEN_LINES:
                    console.print(text, highlight=False, soft_wrap=True)
                    last_update = time.monotonic()


class _ShareMissedError(Exception):
    """Another split comes nearer to the share to hold out."""

    def __init__(self, nearer: Split):
        super().__init__("the documents are written again")
        self.nearer = nearer


def _check_splits(writers: dict[str, BinWriter], num_files: int, left_out: str) -> None:
    """Refuses a side without documents."""
    total = sum(writer.num_documents for writer in writers.values())
    for split, writer in writers.items():
        if writer.num_documents:
            continue
        same = ", all of one text" if total > 1 else ""
        without = f" and {left_out}" if left_out else ""
        raise InputError(
            f"no {split} documents. {counted(num_files, 'file')} gave "
            f"{counted(total, 'document')}{same}{without}. Each side needs one. Give more "
            f"documents, or add --eval-fraction 0 (none held out)."
        )


def _tell_of_large(document: AnyDocument | MarkedDocument, console: Console) -> bool:
    """Reports a document that takes much memory before it is encoded. Returns whether it does."""
    size = document.size()
    if size < LARGE_BYTES:
        return False
    console.print(
        f"{document.source} has {size / 2**20:,.0f} MiB and is encoded whole, which takes many "
        f"times that of memory: this tokenizer is not known to allow cuts "
        f"(docs/formats/tokens.md). Split the document if memory runs out.",
        highlight=False,
        soft_wrap=True,
    )
    return True
