"""Turns config files, overrides and dictionaries into one frozen `Config`, and back.

Every way in ends at `from_dict`'s check: unknown names and values of a wrong type or range raise
`InputError`. Rules between fields are in `moejax.config.checks`, which the commands call next.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from moejax.config.checks.planned import ANSWER, CHOSEN, CODECS, by_hand, chosen_names, pinned
from moejax.config.fields import (
    REMOVED_SETTINGS,
    change,
    check_value,
    fields,
    find_field,
    get_value,
    one_line,
    parse_text,
    sections,
    without_removed,
)
from moejax.config.files import Entry, read_entries, read_yaml
from moejax.config.schema import Config
from moejax.errors import InputError, write_whole


def default_config() -> Any:
    """Returns all settings at their defaults, a ConfigDict for a file's `get_config()` to change.

    Locked: a misspelt name raises where it is written. Values are checked when the file is loaded.
    """
    # Only config files in Python need it.
    from ml_collections import ConfigDict, FieldReference

    config = ConfigDict()
    for name in sections():
        parent, _, last = name.rpartition(".")
        _group(config, parent)[last] = ConfigDict()
    for field in fields().values():
        parent, _, last = field.name.rpartition(".")
        # A typed reference lets None stand for a value and a value for None.
        _group(config, parent)[last] = FieldReference(field.default, field_type=field.kind)
    return config.lock()


def _group(config: Any, dotted: str) -> Any:
    group = config
    for part in filter(None, dotted.split(".")):
        group = group[part]
    return group


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Reads a config file, for a notebook or the command line.

    A `.py` file defines `get_config()`, which returns an `ml_collections.ConfigDict`; its code runs
    as it is, so load only Python configs you trust. A `.yaml`, `.yml` or `.json` file is plain data
    and cannot run code. Fields that a file does not name keep their defaults.

    Args:
      path: a local file.
      overrides: texts such as `train.num_steps=5`, with or without `--config.` in front; later
        ones win over earlier ones and over the file.
    An override `plan=auto` asks for a new plan: the file's settings for its own cluster are then
    left to the planner (`load_with_notes`).

    Raises:
      InputError: the file cannot be read, or a field is unknown or has a wrong value.
    """
    return load_with_notes(path, overrides)[0]


def load_with_notes(
    path: str | os.PathLike[str], overrides: Iterable[str] = (), free: Collection[str] = ()
) -> tuple[Config, list[str]]:
    """Reads a config file as `load_config`, with notes on settings that a planner may change.

    If an override asks for a plan and the file does not, the file's mesh and other settings of
    `ANSWER` belong to another plan. They go back to their defaults, except those in `plan.keep`.
    Overrides are pinned, also where they repeat a default.

    Args:
      free: more settings of the file that go back to their defaults.

    Returns:
      The config, and lines for the user: settings that were freed, and those that are pinned.
    """
    values: dict[str, Any] = {}
    for entry in read_entries(path):
        try:
            _add(values, entry)
        except InputError as error:
            raise InputError(f"{entry.where}: {error}") from None
    given = parse_overrides(overrides)
    freed = _of_another_plan(values, given, free)
    rest = {name: value for name, value in values.items() if name not in freed}
    cfg = keep_given(change(Config(), rest | given), given)
    return cfg, [*_freed_notes(freed, given), *pin_notes(cfg, given)]


def _of_another_plan(
    values: Mapping[str, Any], given: Mapping[str, Any], free: Collection[str]
) -> dict[str, Any]:
    """Returns the file's settings, by name, that belong to another plan than the one asked for."""
    mode, names = given.get("plan.mode", "default"), {*free}
    if mode not in ("default", "hand") and values.get("plan.mode") != mode:
        names |= {*ANSWER} if mode == "auto" else {"mesh.nodes"}  # a plan file says its nodes
    kept = given.get("plan.keep", values.get("plan.keep", ()))
    names -= {*given, *(name for group in kept for name in chosen_names(group))}
    return {
        name: value
        for name, value in values.items()
        if name in names and value != fields()[name].default
    }


def keep_given(cfg: Config, given: Mapping[str, Any]) -> Config:
    """Returns the config; if it asks for a plan, overrides that repeat a default are pinned."""
    names = [name for name in given if name in CHOSEN and name not in by_hand(cfg)]
    if cfg.plan.mode != "auto" or not names:
        return cfg
    return change(cfg, {"plan.keep": tuple(dict.fromkeys((*cfg.plan.keep, *names)))})


def _freed_notes(freed: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns a line about settings of a file that are not used, if there are any."""
    if not freed:
        return []
    if (mode := given["plan.mode"]) != "auto":
        return [f"{mode} replaces {_shown(freed)} of the config file"]
    return [
        f"free, although the config file sets it: {_shown(freed)}. --config.plan.keep=NAMES keeps "
        "what it names."
    ]


def pin_notes(cfg: Config, given: Mapping[str, Any]) -> list[str]:
    """Returns a line about the settings that a search must not change, if there are any.

    Args:
      given: overrides by name; other settings are the file's.
    """
    if cfg.plan.mode != "auto":
        return []
    names = {*pinned(cfg)}
    if cfg.compression.preset != "none":  # pins all codecs
        names = {*names - {*CODECS}, *by_hand(cfg) & {*given}, "compression.preset"}
    parts = []
    for source, here in (("command line", True), ("config file", False)):
        wanted = [name for name in fields() if name in names and (name in given) is here]
        if wanted:
            parts.append(f"{_shown({n: get_value(cfg, n) for n in wanted})} ({source})")
    return [f"pinned: {', '.join(parts)}"] if parts else []


def _shown(values: Mapping[str, Any]) -> str:
    words = ((name, "none" if value is None else value) for name, value in values.items())
    return ", ".join(f"{name} = {value}" for name, value in words)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Returns the values of overrides by dotted name, as for `load_config`.

    Raises:
      InputError: a field is unknown or has a wrong value.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        values |= _parse_override(override)
    return values


def split_overrides(argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into flags and `--config.a.b=value` overrides."""
    overrides, rest, args = [], [], iter(argv)
    for word in args:
        if word.startswith("--config."):
            if "=" not in word:
                word = f"{word}={next(args, '')}"
            overrides.append(word)
        else:
            rest.append(word)
    return rest, overrides


def _add(values: dict[str, Any], entry: Entry) -> None:
    """Checks one value of a file and stores it under its dotted name."""
    if entry.name in REMOVED_SETTINGS or (entry.name in sections() and entry.value == {}):
        return
    field = find_field(entry.name)
    if field.name in values:
        raise InputError(f"`{field.name}` is set twice. Remove one of the two.")
    # Plain-data files spell None as `null`, but the help texts say "none", so both must work.
    spelled_none = entry.plain_data and field.optional and entry.value == "none"
    values[field.name] = None if spelled_none else check_value(field, entry.value)


def override(cfg: Config, overrides: Iterable[str]) -> Config:
    """Returns a config with overrides such as `train.num_steps=5`; later ones win.

    Raises:
      InputError: a field is unknown or has a wrong value.
    """
    return change(cfg, parse_overrides(overrides))


def _parse_override(override: str) -> dict[str, Any]:
    """Returns the values of an override: one, or a group written as {name: value, ...}."""
    name, equals, text = override.removeprefix("--").removeprefix("config.").partition("=")
    if not equals:
        raise InputError(
            f"override `{one_line(override)}` has no `=`. Write it as --config.train.num_steps=5."
        )
    name = name.strip()
    if name in sections() and text.lstrip().startswith("{"):
        values: dict[str, Any] = {}
        for entry in read_yaml(text, f"override {name}"):
            _add(values, dataclasses.replace(entry, name=f"{name}.{entry.name}"))
        return values
    field = find_field(name)
    return {field.name: parse_text(field, text)}


def from_dict(mapping: Mapping[str, Any]) -> Config:
    """Returns the Config of a nested dictionary, such as a checkpoint's.

    Fields that it lacks keep their defaults, and removed values are read as those to use in their
    place (`fields.REMOVED`).

    Raises:
      InputError: a name is unknown, or a value has a wrong type or range.
    """
    values: dict[str, Any] = {}
    for name, value in _flatten(mapping, ""):
        value = without_removed(name, value)
        _add(values, Entry(name, value, where="", plain_data=False))
    return change(Config(), values)


def _flatten(mapping: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name in sections():
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def to_dict(cfg: Config) -> dict[str, Any]:
    """Returns the nested dictionary of a Config; `from_dict` undoes it."""
    return dataclasses.asdict(cfg)


def save_json(cfg: Config, path: str | os.PathLike[str]) -> None:
    """Writes the whole Config as JSON, which `load_config` reads back to the same values."""
    write_whole(Path(path), json.dumps(to_dict(cfg), indent=2) + "\n")


def diff(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """Returns (dotted name, value in a, value in b) of every setting that differs."""
    pairs = ((name, get_value(a, name), get_value(b, name)) for name in fields())
    return [(name, left, right) for name, left, right in pairs if left != right]


def describe_fields() -> list[tuple[str, str, Any, str, str]]:
    """Returns (name, type, default, help, range in words) of every setting, for `--settings`."""
    return [(f.name, f.type_name, f.default, f.help, f.range) for f in fields().values()]
