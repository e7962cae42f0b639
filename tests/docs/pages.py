"""Code blocks of Markdown pages: commands, Python, the content of files, and what is printed."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")  # a variable in front of a command
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:sudo )?"
    r"(?:(?:make|cat|git|pip|python3|sbatch|xprof|docker|kubectl|torchrun)\b|launch/|\.venv)"
)
PYTHON = re.compile(r"(?:import|from) [\w.]+")
# A line that looks like a command must be checked as one, and not pass for a program's output.
SUSPICIOUS = re.compile(r"\.venv|(?<!\S)--[a-z]|^\s*moejax ")
NAMED = re.compile(r"`([\w./-]+\.\w+)`:$")  # the end of a sentence that gives a file's name


@dataclass(frozen=True)
class Block:
    """A block, or a part of one between blank lines.

    Attributes:
      page: path in the repository.
      line: number of its first line, from 1.
      name: of the file that it is the content of.
    """

    page: str
    line: int
    kind: Literal["commands", "python", "file", "text"]
    text: str
    name: str = ""


@dataclass(frozen=True)
class Command:
    """One line for a shell, with its words; `>` and `|` are words of their own."""

    page: str
    line: int
    text: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Returns the blocks of a page, indented or fenced, in order."""
    text = (ROOT / page).read_text() if text is None else text
    found, lines, before, number = [], text.splitlines(), "", 0
    while number < len(lines):
        line = lines[number]
        blank_before = number == 0 or not lines[number - 1].strip()
        if line.startswith("```"):
            stop = number + 1
            while not lines[stop].startswith("```"):
                stop += 1
            found += _parts(page, number + 2, lines[number + 1 : stop], before)
            number, before = stop, ""
        elif line.startswith("    ") and blank_before:
            stop = number
            while stop < len(lines) and (lines[stop].startswith("    ") or not lines[stop].strip()):
                stop += 1
            found += _parts(page, number + 1, [text[4:] for text in lines[number:stop]], before)
            number, before = stop - 1, ""
        elif line.strip():
            before = line
        number += 1
    return found


def _parts(page: str, first: int, lines: list[str], before: str) -> list[Block]:
    """Cuts a block at blank lines, unless it is a program or a file."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    if name := NAMED.search(before.rstrip()):
        return [Block(page, first, "file", "\n".join(lines) + "\n", name[1])]
    if PYTHON.match(lines[0]):
        return [Block(page, first, "python", "\n".join(lines) + "\n")]
    parts, start = [], 0
    for number in range(len(lines) + 1):
        if number < len(lines) and lines[number].strip():
            continue
        if number > start:
            text = "\n".join(lines[start:number])
            kind = "commands" if PROGRAM.match(text) else "text"
            parts.append(Block(page, first + start, kind, text))
        start = number + 1
    return parts


def commands_of(block: Block) -> list[Command]:
    """Returns the commands of a block; lines that end in a backslash go on.

    Raises:
      ValueError: a line is not a command, or output looks like one.
    """
    where = f"{block.page}:{block.line}"
    if block.kind == "text" and (odd := SUSPICIOUS.search(block.text)):
        raise ValueError(f"{where}: {odd[0]!r} looks like a command, in a block that is none")
    if block.kind != "commands":
        return []
    commands, offset = [], 0
    for joined in block.text.replace("\\\n", "\\\0").split("\n"):
        line, offset = block.line + offset, offset + 1 + joined.count("\0")
        text = " ".join(joined.replace("\\\0", " ").split())
        if not PROGRAM.match(text):
            raise ValueError(f"{block.page}:{line}: `{text}` begins with no known program")
        commands.append(Command(block.page, line, text, tuple(words_of(text))))
    return commands


def words_of(text: str) -> list[str]:
    """Splits a command as a shell does, without its comment."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|>")
    lexer.whitespace_split = True
    return list(lexer)


def paths_in(page: str) -> list[str]:
    """Returns the paths of the repository that a page names as code."""
    spans = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    folders = ("moejax/", "tests/", "docs/", "configs/", "launch/", "benchmarks/")
    return [span for span in spans if span.startswith(folders) and " " not in span]


def messages_in(page: str) -> list[str]:
    """Returns what a page quotes of messages: code with `...` for what differs."""
    spans = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    return [span for span in spans if "..." in span and not span.startswith("--")]
