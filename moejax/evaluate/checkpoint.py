"""The checkpoint that is evaluated, and the config under which it is."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from moejax.config.checks import check
from moejax.config.checks.planned import EXCHANGE, LAYOUT, MESH
from moejax.config.fields import change, fields, get_value
from moejax.config.load import from_dict, parse_overrides
from moejax.config.schema import CompressionConfig, Config, PlanConfig
from moejax.errors import InputError
from moejax.runtime.processes import Processes
from moejax.step.state import Reduction, TrainState
from moejax.step.train_step import TrainStep
from moejax.train.checkpoint import Saved, latest_intact, restore_items
from moejax.train.resume import SHAPES

# Settings that an evaluation reads; all others are of training.
READ = ("model.", "moe.", "mesh.", "route", "kernels", "checkpoint.verify")
READ += ("data.source", "data.eval_files", "data.sequence_length", "data.isolate_documents")
READ += ("train.batch_sequences", "train.micro_batches")
# Settings that another mesh begins anew: those of the run may not fit it.
OF_MESH = (*LAYOUT, *EXCHANGE, "route_trim", "mesh.nodes")


class Chosen(NamedTuple):
    """What is evaluated: a checkpoint, the config to read it with, and notes for the user."""

    saved: Saved
    cfg: Config
    notes: list[str]


def choose(run: str, step: int | None, overrides: Iterable[str], processes: Processes) -> Chosen:
    """Returns the newest intact checkpoint of a run, or of a step. Changes no file.

    Args:
      run: a run directory or a checkpoint, of training or imported.
      overrides: settings as for training.
    Raises:
      InputError: if there is none, or a setting does not fit it.
    """
    values = parse_overrides(overrides)
    for name in values:
        if not name.startswith(READ):
            raise InputError(
                f"`{name}` has no effect. It is set for an evaluation, which reads "
                f"{', '.join(part.rstrip('.') for part in READ)}. Leave it out."
            )
    saved, notes = latest_intact(run, step, values.get("checkpoint.verify", "full"), processes)
    if "config" not in saved.manifest:
        raise InputError(
            f"checkpoint has no config. {saved.path} does not say what model it is of. moejax "
            f"writes that into the manifest. Name a checkpoint of moejax train or moejax hf import."
        )
    trained = from_dict(saved.manifest["config"])
    for name, value in values.items():
        if name in SHAPES and value != get_value(trained, name):
            raise InputError(
                f"`{name}` is fixed by the weights. Got {value}, {saved.path} has "
                f"{get_value(trained, name)}. A model is read in the shape that it was trained in. "
                f"Leave it out."
            )
    cfg = evaluation_config(trained, values)
    check(cfg)
    return Chosen(saved, cfg, notes)


def evaluation_config(cfg: Config, values: dict[str, Any]) -> Config:
    """Returns the config of a run with settings changed for an evaluation.

    The mesh is that of the run. If a setting names an axis, the settings describe the whole mesh:
    other axes have one device, and replica takes what they leave.
    """
    # Nothing is planned, and an evaluation has no codecs.
    cfg = change(cfg, {"plan": PlanConfig(mode="hand"), "compression": CompressionConfig()})
    if any(name in MESH for name in values):
        cfg = change(cfg, {name: fields()[name].default for name in OF_MESH})
        cfg = change(cfg, {"mesh.replica": None})
    return change(cfg, values)


def read_weights(saved: Saved, train_step: TrainStep) -> TrainState:
    """Returns a state of weights alone.

    Args:
      train_step: of weights, on the mesh.
    """
    weights = restore_items(saved.path, train_step.abstract, ("weights",))["weights"]
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        skipped=zero,
        params=weights["params"],
        router_bias=weights["balance"],
        optimizer=(),
        reduction=Reduction(None, None),
    )


def tokenizer_beside_weights(run: str, saved: Saved) -> Path | None:
    """Returns the tokenizer.json that an import left with the weights, if there is one."""
    folders = (Path(run), saved.path, saved.path.parent, saved.path.parent.parent)
    found = (folder / "tokenizer.json" for folder in folders)
    return next((path for path in found if path.is_file()), None)
