"""The command `moejax goodput`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moejax.config.command_line import Parser
from moejax.errors import exit_code
from moejax.report.goodput import Goodput, read_goodput
from moejax.screen import screen

EPILOG = """\
examples:
  moejax goodput runs/tiny
  moejax goodput runs/tiny --json      # for scripts

Goodput is the share of time in steps that count: not those that a later start
did again, or that the run rolled back. docs/formats/events.md says what a run
writes down for it.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = Parser(
        prog="moejax goodput",
        description="Tells how a run spent its time, and what its restarts cost.",
        epilog=EPILOG,
    )
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of a run")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str]) -> int:
    """Runs the command. Returns the exit code."""
    args = parser().parse_args(argv)
    stopped = "nothing of the run was changed"
    return exit_code(lambda: run(args), stopped=stopped, debug=args.debug, files=True)


def run(args: argparse.Namespace) -> None:
    """Prints how the run spent its time."""
    found = read_goodput(args.run_dir)
    if args.json:
        print(json.dumps({"goodput": found.share, **asdict(found)}))
    else:
        show(found, screen())


def show(found: Goodput, console: Console) -> None:
    """Prints the tables of times and of restarts."""
    console.print(f"goodput {found.share:.1%} of {found.total:,.0f} s", highlight=False)
    table = Table("time in", "seconds", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, seconds in sorted(found.seconds.items(), key=lambda pair: -pair[1]):
        if seconds:
            table.add_row(name, f"{seconds:,.1f}", f"{seconds / found.total:.1%}")
    console.print(table)
    if not found.restarts:
        console.print("no restarts")
        return
    table = Table("restart at step", "steps lost", "down s", "to next steps s", "before it")
    for one in found.restarts:
        recovered = "-" if one.recovered is None else f"{one.recovered:,.1f}"
        table.add_row(str(one.step), str(one.lost), f"{one.down:,.1f}", recovered, one.how)
    console.print(table)
