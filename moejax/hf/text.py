"""The text model inside a model of images and texts, which alone is read.

There `config.json` has the text model's keys in `text_config`, and names of its tensors are longer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families import FAMILIES
from moejax.hf.families.family import ANYWHERE, STORAGE, Family
from moejax.hf.files import SMALL_BYTES, read_json

TEXT, TIED = "text_config", "tie_word_embeddings"

T = TypeVar("T")


def read_text_config(path: Path) -> dict[str, Any]:
    """Returns the `config.json` of a text model; out of that of a model around it, if it is one.

    Raises:
      InputError: see `hf.files.read_json`, and for keys around it that are not known.
    """
    config = read_json(path, SMALL_BYTES)
    for family in FAMILIES:
        around = family.around
        if around is not None and config.get("model_type") == around.name:
            if config.get("architectures") not in (None, [around.architecture]):
                continue  # `family_of` says what is known
            try:
                return _text_of(config, family, around.keys)
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
    return config


def _text_of(config: Mapping[str, Any], family: Family, keys: tuple[str, ...]) -> dict[str, Any]:
    text = config.get(TEXT)
    if not isinstance(text, Mapping):
        raise InputError(
            f"`{TEXT}` is {short(text)}. It must be an object, with the keys of the text model. "
            "Correct config.json."
        )
    shared = (*ANYWHERE, *STORAGE)
    others = [f"`{key}`" for key in config if key not in (TEXT, TIED, *keys, *shared)]
    if others:
        raise InputError(
            f"beside `{TEXT}` there are {', '.join(others)}, whose meaning for {family.name} is "
            "not known here. Remove what the model's logits do not depend on from config.json."
        )
    usual = family.missing.get(TIED, False)
    tied, own = config.get(TIED, usual), text.get(TIED, usual)
    if tied != own:
        raise InputError(
            f"keys disagree: `{TIED}` is {short(tied)}, and {short(own)} in `{TEXT}`. Code of "
            "different authors reads one or the other. Correct config.json."
        )
    kept = {key: value for key, value in config.items() if key in shared}
    kept |= {"architectures": [family.architecture], "model_type": family.name}
    return kept | {key: x for key, x in text.items() if x is not None or key not in kept}


def by_own_names(weights: Mapping[str, T], config: Mapping[str, Any]) -> dict[str, T]:
    """Returns tensors under the names that they have in a text model by itself.

    Raises:
      InputError: if one is there under both names.
    """
    around = [family.around for family in FAMILIES if family.around and family.matches(config)]
    if not around:
        return dict(weights)
    prefixes, named = around[0].prefixes, {}
    for name, weight in weights.items():
        found = [(theirs, ours) for theirs, ours in prefixes if name.startswith(theirs)]
        own = found[0][1] + name.removeprefix(found[0][0]) if found else name
        if own in named:
            under = " or ".join(f"`{theirs}`" for theirs, _ in prefixes)
            raise InputError(
                f"tensor {short(own)} is there twice, once under {under}. "
                "Only one can be meant. Copy the folder again."
            )
        named[own] = weight
    return named
