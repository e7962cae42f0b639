"""The config of a folder of weights, as settings of a run."""

from moejax.config.fields import short
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.hf.families import family_of
from moejax.hf.families.family import differences, from_settings
from moejax.hf.files import CONFIG
from moejax.hf.reader import Folder

MAX_LAYERS = 10_000  # some fifty times what is published


def config_of(folder: Folder) -> Config:
    """Returns the settings that a folder's `config.json` says; others have their defaults.

    Raises:
      InputError: names the key that cannot be computed here.
    """
    try:
        _check_layers(folder.config.get("num_hidden_layers"))
        return from_settings(family_of(folder.config).read(folder.config))
    except InputError as error:
        raise InputError(f"{folder.path / CONFIG}: {error}") from None


def _check_layers(number: object) -> None:
    """Refuses a number of layers for which lists of layers would fill the memory."""
    if isinstance(number, int) and number > MAX_LAYERS:
        raise InputError(
            f"`num_hidden_layers` is {short(number)}. It may be {MAX_LAYERS}. Correct config.json."
        )


IMPORT_FIRST = (
    "Change these back; or, if the change is meant, import the folder (moejax hf import), change "
    "the settings, and begin from what that wrote."
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
