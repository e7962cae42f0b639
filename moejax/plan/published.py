"""The config of a plan for a published model: from its `config.json`, without weights or a run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moejax.config.fields import change, get_value
from moejax.config.load import parse_overrides
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.hf.config import read_config
from moejax.hf.families.family import differences
from moejax.hf.files import CONFIG
from moejax.hf.text import read_text_config

LENGTH = 4096  # positions of a sequence, or the model's own most if that is fewer
STEP_TOKENS = 4 * 2**20  # least tokens of one step, as papers' models of this size are trained


@dataclasses.dataclass(frozen=True)
class Published:
    """A published model as a config.

    Attributes:
      path: its `config.json`.
      family: its family (`moejax.hf.families`).
      cfg: settings of the model, of one step, and of the overrides.
      taken: assumed settings by dotted name, with reasons: neither file nor override names them.
    """

    path: Path
    family: str
    cfg: Config
    taken: dict[str, str]

    def describe(self) -> str:
        """Returns the family, and one line for each setting that was taken for granted."""
        lines = [f"model of {self.path}, family {self.family}"]
        if self.taken:
            lines.append("neither the file nor an override says, so these are assumed:")
        for name, why in self.taken.items():
            lines.append(f"  --config.{name}={get_value(self.cfg, name)}  ({why})")
        return "\n".join(lines)


def read_published(path: Path, devices: int, overrides: Sequence[str] = ()) -> Published:
    """Returns the config of a `config.json`, or of a folder that has one.

    Args:
      devices: number of the cluster's devices; the batch is a multiple of them.
      overrides: settings as on a command line, such as `train.batch_sequences=64`.
    Raises:
      InputError: for a missing or damaged file, a family or key that is not known, and overrides
        that make another model of it.
    """
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"--hf has no {CONFIG}. Got {path}. It must be a folder with the {CONFIG} of a model, "
            "or that file. Check the path."
        )
    config = read_text_config(file)
    family, model = read_config(file, config)
    given = parse_overrides(overrides)
    step = _step(config, devices, given)
    cfg = change(model, {name: value for name, (value, _) in step.items()} | given)
    if changes := differences(model, cfg):
        name, theirs, ours = changes[0]
        raise InputError(
            f"--config.{name} changes the model. It is {ours}, {file} says {theirs}. With --hf "
            "overrides set how to train, not the model. Leave it out, or give --config instead."
        )
    return Published(file, family.name, cfg, {name: why for name, (_, why) in step.items()})


def _step(
    config: dict[str, Any], devices: int, given: dict[str, Any]
) -> dict[str, tuple[Any, str]]:
    """Returns settings of a step that are not given: the value of each, and why."""
    longest = config.get("max_position_embeddings")
    length = LENGTH if type(longest) is not int else max(1, min(LENGTH, longest))
    used = given.get("data.sequence_length", length)
    batch = devices * max(1, -(-STEP_TOKENS // (used * devices)))
    step: dict[str, tuple[Any, str]] = {
        "model.dtype": ("bfloat16", "compute; masters are float32"),
        "data.sequence_length": (length, f"at most {LENGTH}"),
        "train.batch_sequences": (batch, f"at least {STEP_TOKENS / 2**20:g} Mi tokens a step"),
    }
    return {name: entry for name, entry in step.items() if name not in given}
