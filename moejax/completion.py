"""The command `moejax completion`: what a shell needs to complete moejax's commands and settings.

The script is made once, from the parsers of the commands, so that pressing Tab starts no Python.
"""

import argparse
from importlib import import_module

import shtab

from moejax.commands import COMMANDS
from moejax.config.fields import Field, fields
from moejax.errors import exit_code

EPILOG = """\
examples:
  eval "$(moejax completion bash)"                   # this shell; a line for ~/.bashrc
  moejax completion zsh > ~/.zfunc/_moejax           # a folder of fpath, before compinit

Completed are commands, their flags, every setting (--config.mesh.expert), values that a setting
or flag may take, and files. Make the script again when moejax was updated.
"""
FILES = ("FILE", "PATH")  # what placeholders of files and directories begin or end with
DIRECTORIES = ("DIR", "FOLDER", "RUN")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = argparse.ArgumentParser(
        prog="moejax completion",
        description="Prints a script that completes moejax's commands, flags and settings.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell it is for")
    return command


def main(argv: list[str]) -> int:
    """Runs the command. Returns the exit code."""
    args = parser().parse_args(argv)

    def run() -> None:
        print(shtab.complete(whole_parser(), args.shell))

    return exit_code(run, stopped="nothing was printed")


def whole_parser() -> argparse.ArgumentParser:
    """Returns one parser of all commands, in which each setting is a flag."""
    whole = argparse.ArgumentParser(prog="moejax")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        own = import_module(command.parser).parser()
        if name == "plan":
            probe = import_module("moejax.plan.probe.command").parser()
            _adopt(own.add_subparsers(dest="action"), "probe", "measure the links", probe)
        _adopt(commands, name, command.summary, own)
    return whole


def _adopt(commands: argparse._SubParsersAction, name: str, summary: str, own) -> None:
    """Adds a command whose parser exists."""
    adopted = commands.add_parser(name, help=summary, parents=[own], add_help=False)
    for action in adopted._actions:
        if "--config.FIELD" in action.option_strings:
            action.help = argparse.SUPPRESS  # the settings stand in its place
            for field in fields().values():
                _add_setting(adopted, field)
        elif isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _name_files(inner)
    _name_files(adopted)


def _add_setting(parser: argparse.ArgumentParser, field: Field) -> None:
    choices = ("true", "false") if field.kind is bool else field.choices
    if choices and field.optional:
        choices = (*choices, "none")
    help = field.help.replace("%", "%%")
    parser.add_argument(f"--config.{field.name}", choices=choices or None, help=help)


def _name_files(parser: argparse.ArgumentParser) -> None:
    """Tells shtab which values are files and directories, by their placeholders."""
    for action in parser._actions:
        words = str(action.metavar or action.dest).upper().replace("|", " ").replace(".", " ")
        if action.choices is not None:
            continue
        if any(word in FILES for word in words.split()):
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
        elif any(word in DIRECTORIES for word in words.replace("_", " ").split()):
            action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]
