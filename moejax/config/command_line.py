"""The parser of every command: help that fits a screen, and wrong words answered in one line."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from moejax.config.fields import fields, one_line
from moejax.config.files import named_configs
from moejax.errors import located

# Messages of argparse.
UNKNOWN = "unrecognized arguments: "
CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Parses flags. An error is one line with a suggestion; the process exits with 2."""

    def __init__(self, *args: Any, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **{"formatter_class": formatter, **options})

    def format_usage(self) -> str:
        """Returns one line with the required arguments. The flags are listed below it."""
        return f"usage: {' '.join((self.prog, *self._needed(), '[flags]'))}\n"

    def format_help(self) -> str:
        """Returns the help, whose usage is that one line."""
        self.usage = self.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%")
        return located(super().format_help())

    def _needed(self) -> Iterable[str]:
        """Yields the required arguments, as the help shows them."""
        grouped = [group for group in self._mutually_exclusive_groups if group.required]
        for group in grouped:
            yield f"({' | '.join(_shown(action) for action in group._group_actions)})"
        inside = [action for group in grouped for action in group._group_actions]
        for action in self._actions:
            if action.required and action not in inside:
                yield _shown(action)

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with 2."""
        text = one_line(message)
        if text.startswith(UNKNOWN):
            word = text.removeprefix(UNKNOWN).split(" ")[0]
            text = f"unknown argument. Got {word}. {self._meant(word)}"
        elif found := CHOICE.fullmatch(text):
            text = _choice(*found.groups())
        else:
            text = f"{text.rstrip('.')}. {self.prog} --help says more."
        print(f"moejax: error: {text}", file=sys.stderr)
        sys.exit(2)

    def _meant(self, word: str) -> str:
        """Returns a suggestion for a word that is no flag of the command."""
        name, equals, value = word.partition("=")
        known = [option for action in self._actions for option in action.option_strings]
        if "--config.FIELD" in known:
            setting = _setting(name.lstrip("-"))
            if setting is not None:
                return f"Did you mean --config.{setting}={value if equals else 'VALUE'}?"
        if word.startswith("-"):
            alike = {option.replace("-", "_"): option for option in known}
            close = difflib.get_close_matches(name.replace("-", "_"), alike, 1)
            return f"Did you mean {alike[close[0]]}?" if close else "Leave it out."
        if "--config" in known and (word in named_configs() or Path(word).suffix):
            return f"Did you mean --config {one_line(word)}?"
        return "Leave it out, or put the name of its flag before it."


def _shown(action: argparse.Action) -> str:
    name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if isinstance(action, argparse._SubParsersAction):
        return str(name)
    if action.choices is not None and action.metavar is None:
        name = "|".join(map(str, action.choices))
    shown = " ".join((*action.option_strings[:1], str(name)))
    return f"{shown} ..." if action.nargs == "+" else shown


def _setting(name: str) -> str | None:
    """Returns the setting with this dotted name or last part; if several, the one of `train`."""
    ends = [known for known in fields() if known == name or known.endswith(f".{name}")]
    likely = [known for known in (name, f"train.{name}") if known in ends]
    return likely[0] if likely else ends[0] if len(ends) == 1 else None


def _choice(flag: str, seen: str, choices: str) -> str:
    """Returns argparse's message about a choice in moejax's form."""
    choices = choices.replace("'", "")
    close = difflib.get_close_matches(seen, choices.split(", "), 1)
    hint = f"Did you mean {close[0]}?" if close else "Choose one of them."
    return f"unknown value of {flag}. Got {seen}. It is one of {choices}. {hint}"
