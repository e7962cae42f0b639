import ast
import io
import sys
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table

from moejax.screen import screen, text_column, waiting

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("moejax", "benchmarks", "launch")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
    and path != ROOT / "moejax" / "screen.py"
    and (path.suffix == ".py" or path.read_bytes()[:40].startswith(b"#!/usr/bin/env python"))
)
# Calls that read markup unless they are told not to, or show a text by themselves.
CALLS = {"Console", "TextColumn", "status", "from_markup", "get_console", "Prompt", "inspect"}
MODULES = {"rich.markup", "rich.prompt", "rich.traceback", "rich.pretty"}
WORDS = "[/INST] [bold]b[/bold] runs/exp[lr=1e-3] [link=x] :smile: \\[a]"


def ways_in(source):
    """What in a program prints past `moejax.screen`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in CALLS:
                yield name
            for word in node.keywords:
                off = isinstance(word.value, ast.Constant) and word.value.value is False
                if word.arg in ("markup", "emoji") and not off:
                    yield f"{word.arg}="
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            if node.module in MODULES or (
                node.module == "rich" and names & {"print", "reconfigure"}
            ):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in {"rich", *MODULES})


def test_nothing_prints_past_the_screen():
    assert len(SOURCES) > 300
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in SOURCES
        if (names := list(ways_in(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "Console(stderr=True)",
        "rich.console.Console()",
        "TextColumn('{task.description}')",
        "console.status(name)",
        "Text.from_markup(name)",
        "console.print(name, markup=True)",
        "console.print(name, emoji=style)",
        "from rich import print",
        "from rich.markup import escape",
        "import rich",
    ],
)
def test_a_way_past_the_screen_is_seen(line):
    assert list(ways_in(line))


def test_texts_are_shown_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    console = screen()
    table = Table(WORDS, title=f"title {WORDS}")
    table.add_column(f"header {WORDS}")
    table.add_row("a", f"cell {WORDS}")
    console.print(WORDS)
    console.print(f"styled {WORDS}", style="yellow", highlight=False, soft_wrap=True)
    console.print(table)
    console.rule(f"rule {WORDS}", align="left")
    shown = capsys.readouterr().out
    assert shown.startswith(WORDS)
    for place in ("styled", "title", "header", "cell", "rule"):
        assert f"{place} {WORDS}" in shown


def test_progress_and_waiting_show_texts_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = screen(stderr=True)
    with Progress(text_column(), console=console) as progress:
        progress.add_task(f"progress {WORDS}")
    with waiting(console, f"first {WORDS}"):
        pass
    with waiting(console, "") as say:
        say(f"second {WORDS}")
    shown = capsys.readouterr().err
    for place in ("progress", "first", "second"):
        assert f"{place} {WORDS}" in shown


def test_letters_that_the_encoding_has_not_come_as_codes(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    console = screen()
    console.print(
        "f\u00fcr \u2028 \U0001f600 \udce9"
    )  # the last: a byte of a name that is not UTF-8
    sys.stdout.flush()
    assert raw.getvalue() == b"f\\xfcr \\u2028 \\U0001f600 \\udce9\n"
