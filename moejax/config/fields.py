"""Every setting as a dotted name with its type and range, and the check of one value.

`config.schema` declares settings as nested dataclasses; here they become one flat table, which the
config files, the command line and the help text all read.
"""

import dataclasses
import difflib
import functools
import math
import operator
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from moejax.config.compression import without_removed_codecs
from moejax.config.schema import Config
from moejax.errors import InputError

_KIND_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list",
}

# Short names of settings that commands are given often.
ALIASES = {"init_from": "checkpoint.init_from"}

# Values that settings had once: what to write in place of each, and why.
REMOVED = {
    "mesh.schedule": {"gpipe": ("1f1b", "same bubble, less memory")},
    "route": {
        "spread": ("split", "fewer bytes between experts' devices"),
        "gather_home": ("split", "as fast with the best number of chunks"),
    },
    "moe.implementation": {
        "reference": ("auto", "the same products of each row and its own expert alone"),
        "reference_e4m3": ("mosaic_e4m3", "the same rounding, by a kernel"),
    },
}

# Settings of saved configs that say nothing any more.
REMOVED_SETTINGS = ("compression.adapt_every",)


@dataclasses.dataclass(frozen=True)
class Field:
    """One setting: its dotted name, its type and the rules its value obeys."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    at_least: float | None
    above: float | None
    at_most: float | None
    choices: tuple[str, ...]
    item: type = str  # of a list

    @property
    def wanted(self) -> str:
        """The type in words, for error messages."""
        name = _KIND_NAMES[self.kind]
        if self.kind is tuple:
            name += " of strings" if self.item is str else " of numbers"
        return name + (" or none" if self.optional else "")

    @property
    def type_name(self) -> str:
        """The type as written in `moejax.config.schema`."""
        name = f"tuple[{self.item.__name__}, ...]" if self.kind is tuple else self.kind.__name__
        return name + (" | None" if self.optional else "")

    @property
    def range(self) -> str:
        """The range in words; empty without one."""
        if self.choices:
            return ("a list of " if self.kind is tuple else "one of ") + ", ".join(self.choices)
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most}
        return " and ".join(
            f"{word} {bound}" for word, bound in bounds.items() if bound is not None
        )


@functools.cache
def fields() -> Mapping[str, Field]:
    """Returns all settings by dotted name, in the order of declaration."""
    return types.MappingProxyType({field.name: field for field in _walk(Config, "")})


@functools.cache
def sections() -> tuple[str, ...]:
    """Returns the groups of settings: `model`, `model.rope`, ..."""
    groups = (name.rpartition(".")[0] for name in fields())
    return tuple(dict.fromkeys(filter(None, groups)))


def _walk(kind: type, prefix: str) -> Iterator[Field]:
    hints = typing.get_type_hints(kind)
    for entry in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from _walk(hints[entry.name], f"{prefix}{entry.name}.")
        else:
            base, optional, item = _split_optional(hints[entry.name])
            rules = {**entry.metadata, "item": item}
            yield Field(prefix + entry.name, base, optional, entry.default, **rules)


def _split_optional(hint: Any) -> tuple[type, bool, type]:
    """Returns a setting's plain type, whether it allows None, and the type of a list's items."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (plain,) = (part for part in parts if part is not types.NoneType)
    kind = typing.get_origin(plain) or plain
    item = typing.get_args(plain)[0] if kind is tuple else str
    if kind not in _KIND_NAMES or item not in (str, float):
        raise TypeError(f"no rule to read a setting of type {hint}")
    return kind, len(parts) > 1, item


def find_field(name: str) -> Field:
    """Returns the setting of that dotted name.

    Raises:
      InputError: the name is a group, or unknown; then the closest name is suggested.
    """
    name = ALIASES.get(name, name)
    if name in fields():
        return fields()[name]
    # A group may be named alone: compression=hybrid, plan=auto.
    for short_for in ("preset", "mode"):
        if f"{name}.{short_for}" in fields():
            return fields()[f"{name}.{short_for}"]
    if name in sections():
        raise InputError(
            f"`{name}` is a group of settings, not a value. Set its fields, such as "
            f"`{next(known for known in fields() if known.startswith(name + '.'))}`."
        )
    # Long names are cut, because the matcher is quadratic.
    name = one_line(name[:100])
    raise InputError(f"unknown field `{name}`. {_suggest(name)}")


def _suggest(name: str) -> str:
    """Names the closest setting; the last part of the name weighs as much as the whole.

    A name in the same group comes before one elsewhere: `mesh.experts` is `mesh.expert`.
    A name whose last part contains it as a word comes before one that is only spelt like it:
    `checkpoint.every` is `checkpoint.save_every` rather than `checkpoint.verify`.
    """
    wanted = name.split(".")[-1]

    def likeness(known: str) -> float:
        own = known.split(".")[-1]
        last = difflib.SequenceMatcher(None, wanted, own).ratio()
        ends = 0.3 * (wanted in own.split("_"))
        ends += 0.2 * (known.rpartition(".")[0] == name.rpartition(".")[0])
        ends -= 0.3 * (known in sections())  # a group has no value
        return last + ends + difflib.SequenceMatcher(None, name, known).ratio()

    best = max([*fields(), *sections()], key=likeness)
    hint = f"Did you mean `{best}`? " if likeness(best) >= 1.2 else ""
    return f"{hint}`moejax train --settings` lists all."


def get_value(cfg: Config, name: str) -> Any:
    """Returns the value of the setting with that dotted name."""
    return operator.attrgetter(name)(cfg)


def check_value(field: Field, value: Any) -> Any:
    """Returns the value in the field's own type (int to float, list to tuple).

    One string or number may stand for a list, as on the command line, where commas part a string.

    Raises:
      InputError: wrong type, out of range, NaN or infinite.
    """
    if value is None and field.optional:
        return None
    converted = _convert(field, value)
    if removed := REMOVED.get(field.name, {}).get(converted):
        raise InputError(f"`{field.name}` {value!r} was removed: use {removed[0]!r}, {removed[1]}.")
    inside = (
        (field.at_least is None or converted >= field.at_least)
        and (field.above is None or converted > field.above)
        and (field.at_most is None or converted <= field.at_most)
        and (not field.choices or set(_items(converted)).issubset(field.choices))
    )
    if not inside:
        wrong = [item for item in _items(converted) if field.choices and item not in field.choices]
        close = difflib.get_close_matches(wrong[0], field.choices, 1) if wrong else []
        hint = f" Did you mean {close[0]}?" if close else ""
        raise InputError(f"`{field.name}` must be {field.range}. Got {short(value)}.{hint}")
    return converted


def has_removed(settings: Mapping[str, Any]) -> bool:
    """Whether one of some saved settings, by dotted name, has a value that was removed."""
    return any(without_removed(name, value) != value for name, value in settings.items())


def without_removed(name: str, value: Any) -> Any:
    """Returns a saved value of a setting, or the one to use in its place."""
    if not isinstance(value, str):
        return value
    if name.startswith("compression."):
        return without_removed_codecs(value)
    known = REMOVED.get(name, {})
    return known[value][0] if value in known else value


def _items(value: Any) -> tuple[Any, ...]:
    """Returns the entries of a list, or a value as the only one."""
    return value if isinstance(value, tuple) else (value,)


def _convert(field: Field, value: Any) -> Any:
    kind = field.kind
    if kind is tuple and field.item is str and type(value) is str:
        value = _spell(tuple, value)
    if kind is tuple and field.item is float and type(value) in (int, float):
        value = (value,)
    if kind is tuple and isinstance(value, list | tuple):
        if field.item is str and all(type(v) is str for v in value):
            return tuple(value)
        if field.item is float and all(type(v) in (int, float) for v in value):
            return tuple(_finite(field, v) for v in value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(field, value)
    # `type(...) is`, not isinstance: True is no integer, and a subclass would not survive JSON.
    if kind is not tuple and type(value) is kind:
        if kind is int and not -(2**63) <= typing.cast(int, value) < 2**63:
            raise InputError(f"`{field.name}` must fit in 64 bits. Got {short(value)}.")
        return value
    raise InputError(f"`{field.name}` must be {field.wanted}. Got {short(value)}.")


def _finite(field: Field, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"`{field.name}` must be a finite number. Got {short(value)}.")
    return number


def parse_text(field: Field, text: str) -> Any:
    """Returns the checked value of a command-line text such as `3`, `true`, `none` or `a,b`.

    Raises:
      InputError: the text does not spell a value of the field's type and range.
    """
    text = text if field.kind is str else text.strip()
    if field.optional and text.lower() in ("none", "null"):
        return None
    value = _spell(field.kind, text)
    if field.kind is tuple:
        value = tuple(_spell(field.item, part) for part in value)
    return check_value(field, value)


def _spell(kind: type, text: str) -> Any:
    """Reads `text` as `kind`; returns unreadable text unchanged, for `check_value`."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",")) if text else ()
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        return text


def short(value: Any) -> str:
    """Returns a value on one line, cut to the length of an error message."""
    limits = reprlib.Repr()
    limits.maxstring = limits.maxlong = limits.maxother = 80
    return one_line(limits.repr(value))


def one_line(text: str) -> str:
    """Replaces line breaks and unprintable characters by escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def change(cfg: Config, values: Mapping[str, Any]) -> Config:
    """Returns `cfg` with settings replaced, by dotted name."""
    for name, value in values.items():
        cfg = _replaced(cfg, name.split("."), value)
    return cfg


def _replaced(group: Any, path: list[str], value: Any) -> Any:
    """Returns a group of settings with one replaced, in it or in a group below."""
    first, *rest = path
    inner = _replaced(getattr(group, first), rest, value) if rest else value
    return dataclasses.replace(group, **{first: inner})
