"""The flag `moejax --print-completion`: what a shell completes, by shtab.

The script is made once, from the parsers of the commands, so that pressing Tab starts no Python.
"""

import argparse
import re
from importlib import import_module

import shtab

from moejax.commands import COMMANDS
from moejax.config.command_line import Parser
from moejax.config.fields import Field, fields

# Words in the placeholders of values that are files and directories.
FILES = {"FILE", "PATH"}
DIRECTORIES = {"DIR", "FOLDER", "RUN"}


def whole_parser() -> argparse.ArgumentParser:
    """Returns one parser of all commands, in which each setting is a flag."""
    whole = Parser(prog="moejax")
    whole.add_argument("--version", action="store_true", help="print the version")
    shtab.add_argument_to(whole)
    commands = whole.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        own = import_module(command.parser_module).parser()
        if name == "plan":
            probe = import_module("moejax.plan.probe.command").parser()
            _adopt(own.add_subparsers(dest="action"), "probe", "measure the links", probe)
        _adopt(commands, name, command.summary, own)
    _complete_values(whole)
    return whole


def _adopt(commands: argparse._SubParsersAction, name: str, summary: str, own) -> None:
    """Adds a command whose parser exists."""
    commands.add_parser(name, help=summary, parents=[own], add_help=False)


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Makes settings flags, and tells shtab which values are files, in all commands."""
    for action in list(parser._actions):
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_values(command)
        elif "--config.FIELD" in action.option_strings:
            action.help = argparse.SUPPRESS  # the settings stand in its place
            for field in fields().values():
                _add_setting(parser, field)
        elif action.choices is None:
            _name_files(action)


def _add_setting(parser: argparse.ArgumentParser, field: Field) -> None:
    choices = ("true", "false") if field.kind is bool else field.choices
    if choices and field.optional:
        choices = (*choices, "none")
    help = field.help.replace("%", "%%")
    parser.add_argument(f"--config.{field.name}", choices=choices or None, help=help)


def _name_files(action: argparse.Action) -> None:
    words = re.split(r"[^A-Z]+", str(action.metavar or action.dest).upper())
    for known, complete in ((FILES, shtab.FILE), (DIRECTORIES, shtab.DIRECTORY)):
        if known & set(words):
            action.complete = complete  # pyright: ignore[reportAttributeAccessIssue]
