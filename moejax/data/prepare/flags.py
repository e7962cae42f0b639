"""The flags of `moejax prepare`."""

import argparse

from moejax.config.command_line import Parser
from moejax.data.prepare.chat import ANSWERS

SUFFIXES = {"bin": ".bin", "array_record": ".array_record"}
EPILOG = """\
examples:
  moejax prepare books/ --out data/books
  moejax prepare web.jsonl.zst --tokenizer tokenizer.json --out data/web
  zcat dump.gz | moejax prepare - --stdin-format jsonl --out data/dump
  moejax prepare chat.jsonl --chat --tokenizer tokenizer.json --out data/chat
  moejax prepare --verify data/books.*.bin

It writes data/books.train.bin and data/books.eval.bin (held out). Which files
it reads, how to train on them, conversations: docs/guide/data.md.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = Parser(
        prog="moejax prepare",
        description="Turns text into token files for training.",
        epilog=EPILOG,
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
    command.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; else ids are bytes")
    command.add_argument(
        "--eos", metavar="TOKEN", help="ends a document (default: the usual names)"
    )
    command.add_argument(
        "--ending",
        metavar=".py",
        action="append",
        default=[],
        help="also read files of directories that end so, as text; may be repeated",
    )
    command.add_argument("--text-field", metavar="NAME", help="field of the text (default: text)")
    command.add_argument(
        "--stdin-format",
        choices=("text", "jsonl"),
        help="of standard input (default: text, one document)",
    )
    command.add_argument(
        "--skip-bad", action="store_true", help="leave broken rows and files out, and count them"
    )
    command.add_argument("--format", choices=sorted(SUFFIXES), default="bin", help="default: bin")
    command.add_argument(
        "--eval-fraction",
        type=float,
        metavar="SHARE",
        help="of the text to hold out, as whole documents (default: 0.01)",
    )
    command.add_argument("--overwrite", action="store_true", help="replace existing files")
    _add_chat_options(command)
    return command


def _add_chat_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--chat", action="store_true", help="read conversations; learn answers")
    command.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template (default: the one beside the tokenizer)",
    )
    command.add_argument(
        "--answers",
        choices=ANSWERS,
        help="which are learned (default: all)",
    )
    command.add_argument(
        "--date", metavar="YYYY-MM-DD", help="day for the template (default: today)"
    )
