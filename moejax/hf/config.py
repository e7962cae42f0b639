"""The config of a folder of weights, as settings of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.config.fields import find_field, short
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.hf.families import family_of
from moejax.hf.families.family import Family, differences, from_settings
from moejax.hf.files import CONFIG
from moejax.hf.reader import Folder


def read_config(path: Path, keys: Mapping[str, Any]) -> tuple[Family, Config]:
    """Returns the family and the settings of a `config.json`; others have their defaults.

    Args:
      path: path of the file, for messages.
    Raises:
      InputError: names the key that cannot be computed here.
    """
    try:
        layers, most = keys.get("num_hidden_layers"), find_field("model.num_layers").at_most
        # A list of so many layers would fill the memory.
        if isinstance(layers, int) and most is not None and layers > most:
            raise InputError(
                f"`num_hidden_layers` is {short(layers)}. It may be {most:g}. Correct config.json."
            )
        family = family_of(keys)
        return family, from_settings(family.read(keys))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def config_of(folder: Folder) -> Config:
    """Returns the settings of a folder's `config.json`; see `read_config`."""
    return read_config(folder.path / CONFIG, folder.config)[1]


IMPORT_FIRST = (
    "Change these back; or, if the change is meant, import the folder (moejax hf import), change "
    "the settings, and begin from the imported checkpoint."
)


def check_same_model(folder: Folder, cfg: Config, advice: str = IMPORT_FIRST) -> None:
    """Refuses a config that computes something else with a folder's weights.

    Args:
      advice: what to do about it.
    Raises:
      InputError: lists the settings that differ.
    """
    changes = differences(config_of(folder), cfg)
    if changes:
        listed = ", ".join(
            f"{name}: {short(theirs)} -> {short(ours)}" for name, theirs, ours in changes
        )
        raise InputError(
            f"model differs from {folder.path / CONFIG}. {listed}. These weights were trained "
            f"with the first values. {advice}"
        )
