"""Reads a config file into entries: dotted name, value, and line.

Nothing here knows which settings exist; `config.load` checks the entries. Python files run as code
and are trusted. YAML and JSON are plain data: no tag, no code, at most 1 MB.
"""

import difflib
import importlib.util
import json
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.reader import ReaderError

from moejax.config.fields import one_line, short
from moejax.errors import InputError

MAX_BYTES = 1_000_000
PACKAGE = Path(__file__).parents[1]
_TOO_DEEP = "nested too deeply. Settings are at most three levels deep; flatten the file."


@dataclass(frozen=True)
class Entry:
    """One value of a config file, not yet checked."""

    name: str
    value: Any
    where: str
    plain_data: bool


def named_configs() -> dict[str, Path]:
    """Returns the configs that come with moejax by name: of the package, or of its sources."""
    folders = (PACKAGE / "configs", PACKAGE.parent / "configs")
    folder = next((folder for folder in folders if (folder / "tiny.py").is_file()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.py"))}


def read_entries(path: str | os.PathLike[str]) -> list[Entry]:
    """Returns the config file's entries, in order. A bare name is a config of moejax.

    Raises:
      InputError: for a missing file, an unknown kind of file, or a syntax error (with its line).
    """
    name = os.fspath(path)
    shown = one_line(name)
    if "://" in name:
        raise InputError(f"config {shown} is a URL. Only local files are read; download it first.")
    file = Path(name)
    if re.fullmatch(r"\w+", name) and not file.exists():
        file = _named(name)
    suffix = file.suffix.lower()
    if suffix not in (".py", ".yaml", ".yml", ".json"):
        raise InputError(
            f"config file {shown} ends in {suffix or 'no suffix'!r}. Use .py, .yaml, .yml or .json."
        )
    try:
        is_file = file.is_file()
    except ValueError:  # Python before 3.14 raises for a null byte in a path.
        is_file = False
    if not is_file:
        raise InputError(
            f"config file {shown} does not exist or is not a file (looked from "
            f"{one_line(str(Path.cwd()))}). Check the path."
        )
    if suffix == ".py":
        return _read_python(file, shown)
    text = _read_text(file, shown)
    return list(_read_json(text, shown) if suffix == ".json" else read_yaml(text, shown))


def _named(name: str) -> Path:
    """Returns the path of a config that comes with moejax."""
    known = named_configs()
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise InputError(
            f"no config {one_line(name)}. It is neither a file nor one that comes with moejax: "
            f"{', '.join(known)}.{hint} Name a file, such as configs/tiny.py, or one of these."
        )
    return known[name]


def _read_text(file: Path, shown: str) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"config file {shown} cannot be read: {error.strerror}.") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"config file {shown} is larger than {MAX_BYTES} bytes. Is it a config?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{shown}, line {line}: not UTF-8 text. Save the file as UTF-8.") from None


def _read_python(file: Path, shown: str) -> list[Entry]:
    """Runs the file and lists the ConfigDict that its `get_config()` returns."""
    from ml_collections import ConfigDict  # only Python configs need it

    spec = importlib.util.spec_from_file_location("moejax_config_file", file)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make = getattr(module, "get_config", None)
        config = make() if callable(make) else None
        nested = config.to_dict() if isinstance(config, ConfigDict) else None
    except SystemExit as error:
        raise InputError(
            f"{shown}: the file ended the program: sys.exit({short(error.code)}). A config file "
            "returns its config from get_config(). Remove the call."
        ) from error
    except Exception as error:
        raise InputError(_describe_raise(error, file, shown)) from error
    if not callable(make):
        raise InputError(f"{shown} has no function get_config(). Define one that returns a config.")
    if nested is None:
        raise InputError(
            f"{shown}: get_config() returned {type(config).__name__}, not a ConfigDict. Start from "
            "moejax.settings.default_config()."
        )
    return [Entry(name, value, shown, plain_data=False) for name, value in _flatten(nested, "")]


def _describe_raise(error: Exception, file: Path, shown: str) -> str:
    """Returns the config file's own line that led to the error, and the error in one line."""
    path = os.path.abspath(file)
    own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        own.append(error.lineno)
    where = f"{shown}, line {own[-1]}" if own and own[-1] else shown
    message = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    if " Other fields present" in message:  # A locked ConfigDict adds all of its fields.
        message = message.partition(" Other fields present")[0].lstrip("'")
    message = one_line(message)[:300].rstrip(".")
    return f"{where}: {type(error).__name__}: {message}. Correct the config file."


def _flatten(mapping: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Lists the leaves; an empty mapping is a leaf, so that misspelt groups are found."""
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _core_schema() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Makes PyYAML read text as YAML 1.2: `yes`, dates and base 60 are text, 1e-3 is a number."""
    number = r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    not_finite = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    kinds = (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
        ("float", f"{number}|{not_finite}", list("-+.0123456789")),
    )
    # PyYAML finds patterns by the first character of the text, and takes the first match.
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, firsts in kinds:
        for first in firsts:
            entry = (f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"))
            table.setdefault(first, []).append(entry)
    return table


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, cut down to plain data: no tags and no aliases.

    Aliases would let a small file stand for an enormous one.
    """

    yaml_implicit_resolvers = _core_schema()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuses anything but plain data, with its line, before values are built."""
        event = self.peek_event()
        refused = None
        if isinstance(event, yaml.AliasEvent):
            refused = f"alias *{event.anchor} is refused. Write the value out"
        elif tag := getattr(event, "tag", None):
            tag = tag.replace("tag:yaml.org,2002:", "!!")
            refused = f"tag {tag} is refused: settings are plain data. Remove the tag"
        if refused:
            raise ComposerError(None, None, refused, event.start_mark)
        return super().compose_node(parent, index)


def read_yaml(text: str, shown: str) -> list[Entry]:
    """Returns the entries of a YAML text; errors name it as `shown`, with the line."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{shown}, line 1: a config is a mapping of names to values.")
        return list(_walk_yaml(loader, root, "", shown))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        message = ", ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{shown}{line}: {one_line(message)}. Correct the file.") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(
            f"{shown}, line {line}: character {error.character:#x} may not stand in YAML."
        ) from None
    except RecursionError:
        raise InputError(f"{shown}: {_TOO_DEEP}") from None


def _walk_yaml(loader: _Loader, node: yaml.MappingNode, prefix: str, shown: str) -> Iterator[Entry]:
    """Lists the leaves of a mapping from nodes, which know their lines."""
    for key, value in node.value:
        where = f"{shown}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{where}: the name of a setting is plain text.")
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _walk_yaml(loader, value, f"{name}.", shown)
            continue
        try:
            made = loader.construct_object(value, deep=True)
        except ValueError as error:
            raise InputError(_describe_value(where, error)) from None
        yield Entry(name, made, where, plain_data=True)


def _read_json(text: str, shown: str) -> list[Entry]:
    try:
        root = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{shown}, line {error.lineno}: {error.msg}.") from None
    except RecursionError:
        raise InputError(f"{shown}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise InputError(_describe_value(shown, error)) from None
    if not isinstance(root, dict):
        raise InputError(f"{shown}, line 1: a config is an object of names and values.")
    return list(_walk_json(text, shown)) if root else []


def _describe_value(where: str, error: ValueError) -> str:
    """Says why a number could not be read."""
    if "integer string conversion" in str(error):
        return f"{where}: an integer has thousands of digits. It must fit in 64 bits. Correct it."
    return f"{where}: {one_line(str(error))}. Correct the file."


_EMPTY_OBJECT = re.compile(r"\{\s*\}")


def _walk_json(text: str, shown: str) -> Iterator[Entry]:
    """Lists the leaves of an object known to be valid JSON, with their lines.

    `json.loads` forgets lines and duplicate names, so the outline is read here: `raw_decode` takes
    one name or leaf at a time, and between them stand only blanks and `{ } : ,`.
    """
    decoder = json.JSONDecoder()
    prefixes: list[str] = []
    name, at, line = "", 0, 1
    expects_value = True
    while at < len(text):
        if text[at] == "{" and expects_value and not _EMPTY_OBJECT.match(text, at):
            prefixes.append(f"{name}." if name else "")
            expects_value = False
        elif text[at] == "}":
            prefixes.pop()
        elif text[at] == ":":
            expects_value = True
        elif text[at] == "\n":
            line += 1
        elif text[at] not in " \t\r,":
            value, end = decoder.raw_decode(text, at)
            if expects_value:
                yield Entry(name, value, f"{shown}, line {line}", plain_data=True)
                expects_value = False
            else:
                name = f"{prefixes[-1]}{value}"
            line += text.count("\n", at, end)
            at = end - 1
        at += 1
