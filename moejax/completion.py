"""The command `moejax completion` prints a script that completes commands and settings in a shell.

The script is made once, from the parsers of the commands, so that pressing Tab starts no Python.
"""

import argparse
import re
from importlib import import_module

import shtab

from moejax.commands import COMMANDS
from moejax.config.command_line import Parser
from moejax.config.fields import Field, fields
from moejax.config.files import named_configs
from moejax.errors import exit_code
from moejax.plan.cluster.file import known_clusters

EPILOG = """\
examples:
  eval "$(moejax completion bash)"            # this shell; a line for ~/.bashrc
  moejax completion zsh > ~/.zfunc/_moejax    # in fpath, before compinit

Completed are commands, flags, settings (--config.mesh.expert), values that a
setting or flag may take, and files. Make it again when moejax was updated.
"""
# Words around `=` become words of their own: bash gives them as `--flag = value`, and where
# COMP_WORDBREAKS has no `=` as one, whose flag then stands before each reply.
BASH_WORDS = """\
_moejax() {
  local words=() word index at=0 flag=""
  for ((index = 0; index < ${#COMP_WORDS[@]}; index++)); do
    word="${COMP_WORDS[index]}"
    if [[ $word == "=" ]]; then
      [[ $index == $COMP_CWORD ]] || continue
      word=""
    elif [[ $index == $COMP_CWORD && $word == --*=* ]]; then
      flag="${word%%=*}="
      words+=("${word%%=*}")
      word="${word#*=}"
    fi
    [[ $index == $COMP_CWORD ]] && at=${#words[@]}
    words+=("$word")
  done
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$at
  _shtab_moejax
  [[ -z $flag ]] || COMPREPLY=("${COMPREPLY[@]/#/$flag}")
}"""
# Functions that complete names that come with moejax, and files.
BASH_FILES = """\
_moejax_{name}_file() {{
  compgen -W "{choices}" -- "$1"
  compgen -f -- "$1"
}}
"""
ZSH_FILES = """\
_moejax_{name}_file() {{
  _alternative '{name}:{name}:({choices})' 'files:file:_files'
}}
"""
# Words in the placeholders of values that are files and directories.
FILES = {"FILE", "PATH"}
DIRECTORIES = {"DIR", "FOLDER", "RUN"}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = Parser(
        prog="moejax completion",
        description="Prints a script that completes moejax's commands, flags and settings.",
        epilog=EPILOG,
    )
    command.add_argument(
        "shell", choices=("bash", "zsh", "tcsh"), help="shell that reads the script"
    )
    return command


def main(argv: list[str]) -> int:
    """Runs the command. Returns the exit code."""
    args = parser().parse_args(argv)

    def run() -> None:
        print(script(args.shell))

    return exit_code(run, stopped="nothing was printed")


def script(shell: str) -> str:
    """Returns the script for a shell: shtab's, in which a value may stand after `=`."""
    text = {"bash": BASH_FILES, "zsh": ZSH_FILES}.get(shell, "")
    named = {"topology": known_clusters(), "config": named_configs()}
    functions = [text.format(name=one, choices=" ".join(named[one])) for one in named]
    made = shtab.complete(whole_parser(), shell, preamble="".join(functions))
    if shell == "zsh":  # in its words: `=` says that the value may stand in the same word
        return re.sub(r'^(  "--[\w.-]+)(\[.*\]:.*:.*")$', r"\1=\2", made, flags=re.MULTILINE)
    if shell == "bash":
        made = made.replace("-F _shtab_moejax moejax", "-F _moejax moejax")
        return f"{made}\n{BASH_WORDS}"
    return made


def whole_parser() -> argparse.ArgumentParser:
    """Returns one parser of all commands, in which each setting is a flag."""
    whole = argparse.ArgumentParser(prog="moejax")
    whole.add_argument("--version", action="store_true", help="print the version")
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
        elif action.dest in ("topology", "config"):
            function = f"_moejax_{action.dest}_file"
            shells = {"bash": function, "zsh": function, "tcsh": "f"}
            action.complete = shells  # pyright: ignore[reportAttributeAccessIssue]
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
