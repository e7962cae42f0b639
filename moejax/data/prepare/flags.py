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
    add = command.add_argument
    add("files", nargs="+", metavar="FILE", help="files, directories, or - for standard input")
    add("--out", help="output path without ending, e.g. data/books")
    add("--verify", action="store_true", help="check the sha256 of token files; write nothing")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json; else ids are bytes")
    add("--eos", metavar="TOKEN", help="ends a document (default: the usual names)")
    add(
        "--ending",
        metavar=".py",
        action="append",
        default=[],
        help="also read files of directories that end so, as text; may be repeated",
    )
    add("--text-field", metavar="NAME", help="field of the text (default: text)")
    add(
        "--stdin-format",
        choices=("text", "jsonl"),
        help="of standard input (default: text, one document)",
    )
    add("--skip-bad", action="store_true", help="leave broken rows and files out, and count them")
    add("--format", choices=sorted(SUFFIXES), default="bin", help="default: bin")
    add(
        "--eval-fraction",
        type=float,
        metavar="SHARE",
        help="of the text to hold out, as whole documents (default: 0.01)",
    )
    add("--overwrite", action="store_true", help="replace existing files")
    add("--chat", action="store_true", help="read conversations; learn answers")
    add(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template (default: the one beside the tokenizer)",
    )
    add("--answers", choices=ANSWERS, help="which are learned (default: all)")
    add("--date", metavar="YYYY-MM-DD", help="day for the template (default: today)")
    return command
