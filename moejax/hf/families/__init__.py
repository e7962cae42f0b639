"""Tables of the families of models that files can be read from and written to.

Read `parts` and `family` (`config.json` as settings), its parts `attention`, `blocks`, `experts`
and `rope`, `tensors` (rules that families share), then `tables`, Mixtral first, `biased`,
`latent` and `dense`.
"""

from collections.abc import Mapping
from typing import Any

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families.family import Family
from moejax.hf.families.tables import FAMILIES


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a `config.json`.

    Raises:
      InputError: if no family matches.
    """
    for family in FAMILIES:
        if family.matches(config):
            return family
    known = ", ".join(f"{family.name} ({family.architecture})" for family in FAMILIES)
    raise InputError(
        f"no family for `model_type` {short(config.get('model_type'))} with `architectures` "
        f"{short(config.get('architectures'))}. Known: {known}. Choose a model of one of them."
    )


def family_named(name: str) -> Family:
    """Returns the family of that name.

    Raises:
      InputError: lists the names.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise InputError(f"no family {short(name)}. Known: {known}. Choose one of them.")
