"""Declares settings: default, help text and range, which `fields` reads."""

import dataclasses
from typing import Any


def setting(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Returns a dataclass field that carries its help text and the range of its value."""
    rules = {"help": help, "at_least": at_least, "above": above, "at_most": at_most}
    return dataclasses.field(default=default, metadata={**rules, "choices": choices})


def section(kind: type, help: str) -> Any:
    """Returns a dataclass field that holds a nested group of settings."""
    return dataclasses.field(default_factory=kind, metadata={"help": help})
