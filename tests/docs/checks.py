"""Checks a command of the documentation without running it.

Its flags are read by the command's own parser, its settings by `load_config`, and each file it
names must be in the repository, be made by a command of the pages, or be the reader's own.
"""

import argparse
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from unittest.mock import patch

from moejax.__main__ import main as moejax
from moejax.config.checks import check
from moejax.config.command_line import Parser
from moejax.config.load import load_config, parse_overrides, split_overrides
from moejax.errors import InputError
from tests.docs.pages import ASSIGNED, ROOT, Block, Command, words_of
from tests.launch.modules import module

# Files that a reader brings along.
OWN = {
    "books": "texts",
    "later": "texts",
    "new": "texts",
    "articles.jsonl": "texts",
    "questions.txt": "prompts",
    "downloads": "models that others published",
    "runs/a": "runs to compare",
    "runs/b": "runs to compare",
}
# Programs of other projects: their flags cannot be checked here.
FOREIGN = {
    "xprof": "a viewer of profiles, not installed",
    "lm-eval": "installed by make parity, which runs this command",
    "kubectl": "needs a cluster",
    "docker": "not on machines that run tests",
    "torchrun": "starts another trainer, whose settings tests/plan/others checks",
    "jupyter": "of another project, installed by the line above it",
    "git": "of another project",
}


class BadCommandError(Exception):
    """What is wrong with a command, in one line."""


class _ParsedError(Exception):
    """Ends a command when it has read its flags."""


@dataclass
class Made:
    """Files that commands make, and configs that the pages show."""

    paths: set[str] = field(default_factory=set)
    configs: dict[str, Path] = field(default_factory=dict)

    def has(self, path: str) -> bool:
        """Whether a path or pattern is in the repository, made by a command, or the reader's."""
        path = str(PurePosixPath(path))
        if list(ROOT.glob(path)):
            return True
        parents = [path, *map(str, PurePosixPath(path).parents)]
        if any(parent in self.paths or parent in OWN for parent in parents):
            return True
        return "*" in path and any(fnmatch(made, path) for made in self.paths)


def check_command(command: Command, made: Made, made_anywhere: Made) -> None:
    """Checks a command, and notes what it makes.

    Args:
      made: by commands before it, on its page.
      made_anywhere: by any command of any page.

    Raises:
      BadCommandError: says what is wrong.
    """
    try:
        wanted = list(_walk(list(command.words), made))
    except (BadCommandError, InputError) as error:
        raise BadCommandError(f"{command}\n  {error}") from None
    for path in wanted:
        if not made.has(path) and not made_anywhere.has(path):
            raise BadCommandError(f"{command}\n  nothing makes {path}")


def _walk(words: list[str], made: Made) -> Iterator[str]:
    """Yields the files that a command reads, after checking its flags and settings."""
    if ">" in words:
        words, target = words[: words.index(">")], words[words.index(">") + 1]
        made.paths.add(target)
    if "|" in words:
        place = words.index("|")
        yield from _walk(words[:place], made)
        yield from _walk(words[place + 1 :], made)
        return
    while ASSIGNED.match(words[0]) or words[0] == "sudo":
        words = words[1:]
    program, rest = words[0], words[1:]
    name = PurePosixPath(program).name
    if name in FOREIGN:
        return
    if program == "cat":
        yield from rest
    elif program == "make":
        yield from _make(rest, made)
    elif name == "moejax":
        yield from _moejax(rest, made)
    elif name in ("python", "python3"):
        yield from _python(rest, made)
    elif program.startswith("launch/"):
        inner = _launcher(program, rest)
        yield from _walk(inner, made)
    elif program == "sbatch":
        script = next(n for n, word in enumerate(rest) if word.endswith(".sbatch"))
        yield rest[script]
        yield from _walk(rest[script + 1 :], made)
    elif name == "pip":
        yield from _pip(rest)
    else:
        raise BadCommandError(f"no check for {program}")


def recipe(words: list[str]) -> list[str]:
    """Returns the words of the last command that `make` would run, without its environments."""
    old = [f"--assume-old={venv}/.installed" for venv in (".venv", ".venv-aot", ".venv-parity")]
    ran = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *old, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise BadCommandError(ran.stderr.strip())
    return words_of(ran.stdout.strip().splitlines()[-1]) if ran.stdout.strip() else []


def _make(words: list[str], made: Made) -> Iterator[str]:
    target = words[0]
    if not re.search(rf"^{re.escape(target)}:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE):
        raise BadCommandError(f"the Makefile has no target {target}")
    if target in ("train", "test", "test-all", "test-hardware", "aot", "parity"):
        yield from _walk(recipe(words), made)


def _python(words: list[str], made: Made) -> Iterator[str]:
    if words[0] != "-m":
        yield words[0]
        return
    name, rest = words[1], words[2:]
    if name.startswith("moejax."):
        yield from _moejax([name.split(".")[1], *rest], made)
    elif name == "pytest":
        yield from (word for word in rest if word.startswith("tests"))
    elif importlib.util.find_spec(name) is None:
        raise BadCommandError(f"no module {name}")


def _launcher(program: str, words: list[str]) -> list[str]:
    """Returns the command behind the launcher's flags."""
    parsed, _ = parsed_by(module(PurePosixPath(program).name).main, program, words)
    return parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command


def _pip(words: list[str]) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        if found := re.fullmatch(r"(?:\.|moejax)\[([\w,-]+)\]", word):
            unknown = set(found[1].split(",")) - set(project["optional-dependencies"])
            if unknown:
                raise BadCommandError(f"no extra {', '.join(unknown)}")
    if "-c" in words:
        yield words[words.index("-c") + 1]


def parsed_by(main, program: str, words: list[str]) -> tuple[argparse.Namespace, set[str]]:
    """Returns what a command's own parser reads from words, and the flags that it knows.

    Raises:
      BadCommandError: the parser refused a word.
    """
    found = {}
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, args=None, namespace=None):
        found["args"], found["flags"] = parse(parser, args, namespace), _flags(parser)
        raise _ParsedError

    def refuse(parser, message):
        raise BadCommandError(message)

    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        patch.object(argparse.ArgumentParser, "error", refuse),
        patch.object(Parser, "error", refuse),
        patch.object(sys, "argv", [program, *words]),
    ):
        try:
            code = main()
        except _ParsedError:
            return found["args"], found["flags"]
    raise BadCommandError(f"no flags were read; exit code {code}")


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    flags = set()
    for action in parser._actions:
        flags |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                flags |= _flags(inner)
    return flags


def _moejax(words: list[str], made: Made) -> Iterator[str]:
    """Checks `moejax COMMAND ...`, and yields the files that it reads."""
    if words in (["--help"], ["--version"], ["--print-completion", "bash"]):
        return
    args, flags = parsed_by(moejax, "moejax", words)
    rest, overrides = split_overrides(words)
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in flags:
            raise BadCommandError(f"no flag {flag}")  # a shortened one is taken by argparse
    values = parse_overrides(overrides)
    yield from _settings_read(values)
    given = vars(args)
    cfg = None
    if (config := given.get("config")) is not None:
        if "/" in config:
            yield config
        shown = made.configs.get(config, ROOT / config if (ROOT / config).exists() else None)
        if shown is not None or re.fullmatch(r"\w+", config):
            cfg = load_config(shown or config, overrides)
            if words[0] == "train":
                check(cfg)
        elif "run_dir" not in values:  # the config that an import wrote
            values["run_dir"] = f"runs/{PurePosixPath(config).parent.name}"
    for name in ("files", "data", "run_dir"):
        if isinstance(given.get(name), list):
            yield from (str(path) for path in given[name] if str(path) != "-")
    for name in ("run", "path", "prompts", "tokenizer", "chat_template"):
        if given.get(name) is not None:
            yield str(given[name])
    for name in ("topology", "routing"):
        if str(given.get(name)).endswith(".json"):
            yield given[name]
    _note_made(words, given, values, cfg, made)


def _settings_read(values: dict) -> Iterator[str]:
    for name in ("data.train_files", "data.eval_files"):
        yield from values.get(name, ())
    for name in ("checkpoint.init_from", "plan.mode"):
        if "/" in str(values.get(name)) or str(values.get(name)).endswith(".json"):
            yield values[name]


def _note_made(words: list[str], given: dict, values: dict, cfg, made: Made) -> None:
    """Adds what a command leaves behind."""
    if words[0] == "train" and not (given["dry_run"] or given["print_config"] or given["settings"]):
        made.paths.add(values["run_dir"] if cfg is None else cfg.run_dir)
    if str(given.get("routing")).endswith(".npz"):
        made.paths.add(given["routing"])
    for name in ("out", "report"):
        if given.get(name) is not None:
            out = str(given[name])
            made.paths.add(out)
            if words[0] == "prepare":
                made.paths |= {f"{out}.{split}.bin" for split in ("train", "eval")}


def note_file(block: Block, made: Made, folder: Path) -> None:
    """Writes a file that a page shows, so that commands after it find it."""
    path = folder / block.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
    made.paths.add(block.name)
    if path.suffix in (".yaml", ".json", ".py"):
        made.configs[block.name] = path
