"""Consoles that show texts as they are, whoever wrote them.

Rich reads "[...]" in a text as a style and ":name:" as a picture: paths lose letters, and a text of
a user that looks like a style ends the program. Everything in moejax prints on a console from here,
which reads neither; tests/test_screen.py holds every other way in for a mistake.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import TextColumn
from rich.text import Text

from moejax.errors import let_print


def screen(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Returns a console on standard output or standard error.

    Args:
      quiet: whether it shows nothing.
    """
    let_print(sys.stderr if stderr else sys.stdout)
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def text_column(format: str = "{task.description}") -> TextColumn:
    """Returns a column of a progress bar with a text of the task."""
    return TextColumn(format, markup=False)


def counted(number: int, noun: str) -> str:
    """Returns "1 file" or "2 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def waiting(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Shows a text on a terminal during a wait. Yields a function that changes the text."""
    with console.status(Text(text)) as status:
        yield lambda text: status.update(Text(text))
