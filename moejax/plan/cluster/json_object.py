"""A JSON object read field by field: each value is of its kind and in its range, or refused.

Every refusal is one line: what is wrong, the value seen, the rule, what to do.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from moejax.config.fields import one_line, short
from moejax.errors import InputError

BITS = re.compile(r"bit|bps", re.IGNORECASE)


class JsonObject:
    """An object of a file, which knows where it stands."""

    def __init__(self, facts: Any, name: str, file: str):
        self.name, self.file = name, file
        if not isinstance(facts, dict):
            self.facts: dict[str, Any] = {}
            self.refuse(f"`{name or 'the file'}` is wrong", facts, "an object", "Correct it")
        self.facts = facts

    def at(self, field: str) -> str:
        """The full name of a field."""
        return f"{self.name}.{field}" if self.name else field

    def refuse(self, what: str, seen: Any, rule: str, remedy: str) -> NoReturn:
        """Raises InputError in the usual four parts."""
        raise InputError(f"{what}. {self.file} has {short(seen)}. It must be {rule}. {remedy}.")

    def keys(
        self, kind: type, optional: tuple[str, ...] = (), keys: dict[str, str] | None = None
    ) -> None:
        """Refuses fields that the class lacks, and looks for those that it needs.

        Args:
          optional: keys of the file that may be missing.
          keys: attribute -> its key in the file, where they differ.
        """
        keys = keys or {}
        known = [keys.get(field.name, field.name) for field in dataclasses.fields(kind)]
        self.known(known, [name for name in known if name not in optional])

    def known(self, known: list[str], needed: list[str]) -> None:
        """Refuses a field that is not known, and one that is missing."""
        for field in self.facts:
            if field in known:
                continue
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
        """A field's value, if the rule holds."""
        value = self.facts[field]
        if not holds(value):
            self.refuse(f"`{self.at(field)}` is wrong", value, rule, "Correct it")
        return value

    def text(self, field: str) -> str:
        """Text on one line."""
        return self.value(
            field, "text", lambda v: isinstance(v, str) and v != "" and v.isprintable()
        )

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of texts; () where it is left out."""
        if field not in self.facts:
            return ()
        rule = "a list of texts"
        return tuple(self.value(field, rule, lambda v: _all(v, lambda x: isinstance(x, str))))

    def flag(self, field: str) -> bool:
        """True or false; false where it is left out."""
        if field not in self.facts:
            return False
        return self.value(field, "true or false", lambda v: isinstance(v, bool))

    def count(self, field: str) -> int:
        """A whole number above zero. `type`, because True is an int to isinstance."""
        rule = "a whole number, at least 1"
        return self.value(field, rule, lambda v: type(v) is int and 0 < v < 2**63)

    def rate(self, field: str) -> float:
        """A number above zero."""
        return float(self.value(field, "a number above 0", lambda v: _is_number(v) and v > 0))

    def share(self, field: str, maximum: float) -> float:
        """A number from zero on."""
        rule = f"a number from 0 to {maximum:g}"
        return float(self.value(field, rule, lambda v: _is_number(v) and 0 <= v <= maximum))

    def curve(self, field: str) -> tuple[tuple[Any, float], ...]:
        """A list of pairs of numbers above zero."""

        def holds(value: Any) -> bool:
            return _all(value, lambda p: _all(p, lambda x: _is_number(x) and x > 0) and len(p) == 2)

        rule = "a list of pairs of numbers above 0"
        return tuple((x, float(y)) for x, y in self.value(field, rule, holds))

    def matrix(self, field: str) -> tuple[tuple[float, ...], ...]:
        """A list of lists of numbers; () where it is left out. `_check_pairs` does the rest."""
        if field not in self.facts:
            return ()
        rule = "a list of lists of numbers, none below 0; what is missing must be measured"
        rows = self.value(
            field,
            rule,
            lambda v: _all(v, lambda row: _all(row, lambda x: _is_number(x) and x >= 0)),
        )
        return tuple(tuple(map(float, row)) for row in rows)

    def inner(self, field: str) -> "JsonObject":
        """The object of a field."""
        return JsonObject(self.facts[field], self.at(field), self.file)

    def items(self, field: str) -> list["JsonObject"]:
        """The objects of a list that is not empty."""
        rule = "a list of objects, at least one"
        found = self.value(field, rule, lambda v: isinstance(v, list) and v != [])
        return [
            JsonObject(item, f"{self.at(field)}[{n}]", self.file) for n, item in enumerate(found)
        ]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1e300 < value < 1e300 and math.isfinite(value)


def _all(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))
