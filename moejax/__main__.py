"""The console script `moejax`: one word names the command, the rest is its own."""

import difflib
import sys
from importlib import import_module

from moejax.commands import COMMANDS
from moejax.errors import located
from moejax.version import __version__

USAGE = """\
usage: moejax COMMAND ... | --version | --print-completion SHELL

{commands}

examples:
  moejax train --config tiny                   # a first run, of minutes
  moejax report runs/tiny --out report.html    # what it did
  eval "$(moejax --print-completion bash)"     # Tab completes

moejax COMMAND --help says more. Exit codes: docs/formats/exit.md."""


def usage() -> str:
    """Returns the list of commands."""
    lines = [f"  {name:10} {command.summary}" for name, command in COMMANDS.items()]
    return USAGE.format(commands="\n".join(lines))


def main() -> int:
    """Runs the command that the first argument names. Returns the exit code."""
    command, rest = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if command in COMMANDS:
        return import_module(COMMANDS[command].module).main(rest)
    if command in ("-V", "--version", "version"):
        print(f"moejax {__version__}")
        return 0
    if command == "--print-completion":
        import_module("moejax.completion").whole_parser().parse_args(sys.argv[1:])
    if command in ("", "-h", "--help", "help"):
        print(located(usage()))
        return 0
    known, close = ", ".join(COMMANDS), difflib.get_close_matches(command, COMMANDS, 1)
    hint = f"Did you mean {close[0]}?" if close else "moejax --help says what each does."
    print(f"moejax: error: no command {command!r}. Known: {known}. {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
