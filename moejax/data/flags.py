"""The flags of `moejax prepare`."""

import argparse

from moejax.data.chat import ANSWERS

SUFFIXES = {"bin": ".bin", "array_record": ".array_record"}
EPILOG = """\
examples:
  moejax prepare books/ --out data/books
  moejax prepare web.jsonl.zst --text-field text --tokenizer tokenizer.json --out data/web
  zcat dump.gz | moejax prepare - --stdin-format jsonl --out data/dump
  moejax prepare wiki.parquet --format array_record --out data/wiki
  moejax prepare chat.jsonl --chat --tokenizer model/tokenizer.json --out data/chat
  moejax prepare --verify data/books.*.bin

Every text file is a document, and so is every row. Of a text file that is alone the end is held
out, from the start of a line. Of a directory .txt, .text, .md, .rst, .jsonl, .ndjson and .parquet
are read; .gz and .zst are decompressed.

writes data/books.train.bin and data/books.eval.bin, each with a .json beside it. Train on them with
  --config.data.source=tokens --config.data.train_files=data/books.train.bin \\
  --config.data.eval_files=data/books.eval.bin
(array_record files: --config.data.source=array_record).

--chat reads rows with messages ([{"role": "user", "content": "..."}, ...]), or with prompt and
completion, or with instruction, input and output. The tokenizer's own chat template writes them;
the tokens of the assistant, with what ends its turn, are learned, and all others only read.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = argparse.ArgumentParser(
        prog="moejax prepare",
        description="Turns text into token files for training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="files, directories, or - for standard input",
    )
    command.add_argument("--out", help="output path without ending, e.g. data/books")
    command.add_argument(
        "--verify", action="store_true", help="check the sha256 of token files; write nothing"
    )
    command.add_argument("--tokenizer", help="a tokenizer.json; without it, ids are bytes")
    command.add_argument(
        "--eos", help="token (or id) that ends a document; default: the usual names"
    )
    command.add_argument("--text-field", help="field or column of the text (default: text)")
    command.add_argument(
        "--stdin-format",
        choices=("text", "jsonl"),
        help="what standard input is (default: text, one document)",
    )
    command.add_argument(
        "--skip-bad", action="store_true", help="leave broken rows out, and count them"
    )
    command.add_argument("--format", choices=sorted(SUFFIXES), default="bin", help="default: bin")
    command.add_argument(
        "--eval-fraction",
        type=float,
        help="documents held out, chosen by a hash of their text (default 0.01, of few documents "
        "at least one; 0: none)",
    )
    command.add_argument("--overwrite", action="store_true", help="replace existing files")
    _add_chat_options(command)
    return command


def _add_chat_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--chat", action="store_true", help="read conversations; learn answers")
    command.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template; default: chat_template.jinja or tokenizer_config.json beside the "
        "tokenizer",
    )
    command.add_argument(
        "--answers",
        choices=ANSWERS,
        help="answers of a conversation that are learned (default: all)",
    )
    command.add_argument(
        "--date", metavar="YYYY-MM-DD", help="day that a template may write (default: today)"
    )
