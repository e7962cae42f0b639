"""Reads a JSON object field by field and refuses values of the wrong type or range.

Every error is one line: the problem, the value, the rule, the remedy.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any, NoReturn

from moejax.config.fields import one_line, short
from moejax.errors import InputError

BITS = re.compile(r"bit|bps", re.IGNORECASE)


class JsonObject:
    """An object inside a file, with its path for error messages."""

    def __init__(self, facts: Any, name: str, file: str):
        self.name, self.file = name, file
        if not isinstance(facts, dict):
            self.facts: dict[str, Any] = {}
            self.refuse(f"`{name or 'the file'}` is wrong", facts, "an object", "Correct it")
        self.facts = facts

    def at(self, field: str) -> str:
        """Returns the full path of a field."""
        return f"{self.name}.{field}" if self.name else field

    def refuse(self, what: str, seen: Any, rule: str, remedy: str) -> NoReturn:
        """Raises InputError: the problem, the value, the rule, the remedy."""
        raise InputError(f"{what}. {self.file} has {short(seen)}. It must be {rule}. {remedy}.")

    def keys(self, kind: type, keys: dict[str, str], ignored: tuple[str, ...] = ()) -> None:
        """Refuses unknown fields, and missing ones that have no default, from a dataclass.

        Args:
          keys: attribute -> its key in the file, where they differ.
          ignored: keys that nothing reads any more.
        """
        known = {keys.get(f.name, f.name): f.default for f in dataclasses.fields(kind)}
        needed = [name for name, default in known.items() if default is dataclasses.MISSING]
        self.known([*known, *ignored], needed)

    def known(self, known: list[str], needed: list[str]) -> None:
        """Refuses unknown fields and missing ones, from a list of names."""
        for field in (name for name in self.facts if name not in known):
            if BITS.search(field):
                rule = "bytes a second, in a field `bytes_per_s`"
                name = one_line(field[:80])
                remedy = "Divide bits a second by 8 and rename it"
                self.refuse(f"`{self.at(name)}` counts bits", self.facts[field], rule, remedy)
            close = difflib.get_close_matches(field[:80], known, 1, 0.5)
            hint = f"Did you mean `{close[0]}`? Rename it" if close else "Leave it out"
            rule = "one of " + ", ".join(known)
            self.refuse(f"unknown field in `{self.name or 'the file'}`", field, rule, hint)
        for field in needed:
            if field not in self.facts:
                self.refuse(f"`{self.at(field)}` is missing", sorted(self.facts), "there", "Add it")

    def value(self, field: str, rule: str, holds: Callable[[Any], bool]) -> Any:
        """Returns a field's value if it obeys the rule."""
        value = self.facts[field]
        if not holds(value):
            self.refuse(f"`{self.at(field)}` is wrong", value, rule, "Correct it")
        return value

    def text(self, field: str) -> str:
        """Returns a text of one line."""
        return self.value(
            field, "text", lambda v: isinstance(v, str) and v != "" and v.isprintable()
        )

    def given(self, **readers: Callable[[str], Any]) -> dict[str, Any]:
        """Returns the values of those of the fields that are there."""
        return {field: read(field) for field, read in readers.items() if field in self.facts}

    def texts(self, field: str) -> tuple[str, ...]:
        """Returns a list of strings."""
        rule = "a list of strings"
        return tuple(self.value(field, rule, lambda v: _all(v, lambda x: isinstance(x, str))))

    def flag(self, field: str) -> bool:
        """Returns a boolean."""
        return self.value(field, "true or false", lambda v: isinstance(v, bool))

    def count(self, field: str) -> int:
        """Returns a positive integer. Checks `type`, because isinstance takes True for an int."""
        rule = "a whole number, at least 1"
        return self.value(field, rule, lambda v: type(v) is int and 0 < v < 2**63)

    def rate(self, field: str) -> float:
        """Returns a positive number."""
        return float(self.value(field, "a number above 0", lambda v: _is_number(v) and v > 0))

    def share(self, field: str, maximum: float) -> float:
        """Returns a number between zero and a limit."""
        rule = f"a number from 0 to {maximum:g}"
        return float(self.value(field, rule, lambda v: _is_number(v) and 0 <= v <= maximum))

    def curve(self, field: str) -> tuple[tuple[Any, float], ...]:
        """Returns a list of pairs of positive numbers."""

        def holds(value: Any) -> bool:
            return _all(value, lambda p: _all(p, lambda x: _is_number(x) and x > 0) and len(p) == 2)

        rule = "a list of pairs of numbers above 0"
        return tuple((x, float(y)) for x, y in self.value(field, rule, holds))

    def matrix(self, field: str) -> tuple[tuple[float, ...], ...]:
        """Returns a matrix; `_check_pairs` checks its shape."""
        rule = "a list of lists of numbers, none below 0; what is missing must be measured"
        rows = self.value(
            field,
            rule,
            lambda v: _all(v, lambda row: _all(row, lambda x: _is_number(x) and x >= 0)),
        )
        return tuple(tuple(map(float, row)) for row in rows)

    def inner(self, field: str) -> "JsonObject":
        """Returns the object in a field."""
        return JsonObject(self.facts[field], self.at(field), self.file)

    def items(self, field: str) -> list["JsonObject"]:
        """Returns the objects of a non-empty list."""
        rule = "a list of objects, at least one"
        objects = self.value(field, rule, lambda v: isinstance(v, list) and v != [])
        return [
            JsonObject(item, f"{self.at(field)}[{n}]", self.file) for n, item in enumerate(objects)
        ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and -1e300 < value < 1e300


def _all(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))
