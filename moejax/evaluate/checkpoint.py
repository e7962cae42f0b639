"""Chooses the checkpoint to evaluate, and makes its config."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from moejax.checkpoint.compatible import SHAPES
from moejax.checkpoint.find import Saved, latest_intact
from moejax.checkpoint.source import Source, frozen_source
from moejax.checkpoint.source import read_weights as read_base
from moejax.checkpoint.verify import restore_weights
from moejax.config.checks import check
from moejax.config.checks.mesh import check_batch, check_expert_axis, check_width
from moejax.config.checks.planned import EXCHANGE, LAYOUT, MESH, STAGES
from moejax.config.fields import change, fields, get_value
from moejax.config.load import from_dict, parse_overrides
from moejax.config.schema import CompressionConfig, Config, OuterConfig, PlanConfig
from moejax.errors import InputError
from moejax.runtime.processes import ALONE, Processes
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep, by_scores

# Settings of commands that only run the model; all others are for training.
FORWARD = ("model.", "moe.", "mesh.", "route", "kernels", "checkpoint.verify")
FORWARD += ("memory.experts", "train.batch_sequences", "checkpoint.init_from")
# Settings of an evaluation.
READ = (*FORWARD, "data.eval_files", "data.sequence_length", "data.isolate_documents")
READ += ("train.micro_batches",)
# Settings that go back to defaults on another mesh: the run's may not fit it.
OF_MESH = (*LAYOUT, *STAGES, *EXCHANGE, "route_trim", "mesh.nodes")


class Chosen(NamedTuple):
    """A checkpoint to evaluate, the config to read it with, and notes for the user."""

    saved: Saved
    cfg: Config
    notes: list[str]
    base: Source | None = None  # the frozen weights, if the checkpoint has adapters
    names_mesh: bool = False  # whether settings name an axis of the mesh


def choose(
    run: str,
    step: int | None,
    overrides: Iterable[str],
    processes: Processes,
    read: tuple[str, ...] = READ,
) -> Chosen:
    """Returns a run's newest intact checkpoint, or the one of a step. Changes no file.

    Args:
      run: a run directory or a checkpoint, of training or imported.
      overrides: settings as for training.
      read: prefixes of the settings that have an effect.
    Raises:
      InputError: if there is none, or a setting does not fit it.
    """
    values = checked_settings(overrides, read)
    saved, notes = latest_intact(run, step, values.get("checkpoint.verify", "full"), processes)
    if "config" not in saved.manifest:
        raise InputError(
            f"checkpoint has no config. {saved.path} does not say what model it is of. moejax "
            f"writes that into the manifest. Name a checkpoint of moejax train or moejax hf import."
        )
    trained = from_dict(saved.manifest["config"])
    cfg = evaluation_config(trained, values)
    check(cfg, trained=False)
    if trained.moe.router.forced != "none":
        notes.append(
            f"warning: {saved.path} is of a benchmark with `moe.router.forced` = "
            f"{trained.moe.router.forced}: its router learned nothing of use. Scores choose here."
        )
    base = frozen_source(saved, cfg, values.get("checkpoint.init_from"), processes)
    if base is not None:
        notes.append(f"adapters from {saved.path}, frozen weights from {base.path}")
    return Chosen(saved, cfg, notes, base, names_mesh(values))


def checked_settings(overrides: Iterable[str], read: tuple[str, ...]) -> dict[str, Any]:
    """Returns the values of overrides. Refuses those without one of the prefixes in `read`."""
    values = parse_overrides(overrides)
    for name in values:
        if not name.startswith(read):
            raise InputError(
                f"`{name}` has no effect. It is set for a command that reads "
                f"{', '.join(part.rstrip('.') for part in read)}. Leave it out."
            )
    return values


def names_mesh(settings: Iterable[str]) -> bool:
    """Returns whether one of the settings' names is that of a mesh axis."""
    return any(name in MESH for name in settings)


def evaluation_config(cfg: Config, values: dict[str, Any]) -> Config:
    """Returns the config of a run with settings changed for an evaluation.

    The run's mesh stays. If a setting names an axis, the settings describe the whole mesh: other
    axes have one device, and replica takes the remaining devices. See also `on_all_devices`.

    Raises:
      InputError: if a setting does not fit the weights.
    """
    for name, value in values.items():
        if name in SHAPES and value != get_value(cfg, name):
            raise InputError(
                f"`{name}` is fixed by the weights. Got {value}, the model has "
                f"{get_value(cfg, name)}. A model is read in the shape that it was trained in. "
                f"Leave it out."
            )
    if values.get("moe.router.forced", "none") != "none":
        raise InputError(
            "`moe.router.forced` has no effect here. It is for benchmarks of training. Leave it "
            "out: scores choose the experts."
        )
    # Nothing is planned, an evaluation has no codecs, and weights are those of the outer loop.
    hand = {"plan": PlanConfig(mode="hand"), "compression": CompressionConfig()}
    cfg = change(cfg, {**hand, "outer": OuterConfig()})
    if names_mesh(values):
        cfg = change(cfg, {name: fields()[name].default for name in OF_MESH})
        cfg = change(cfg, {"mesh.replica": None})
    return by_scores(change(cfg, values))


def on_all_devices(cfg: Config, num_devices: int) -> Config:
    """Returns a config on all devices, if it names no axis of a mesh, as imported ones do.

    Experts are spread first, then the width; devices that neither can use hold copies. A config
    that fits on no such mesh is returned as it is.
    """
    if any(get_value(cfg, name) != fields()[name].default for name in MESH):
        return cfg
    sizes = [size for size in range(num_devices, 0, -1) if num_devices % size == 0]
    meshes = [
        replace(cfg.mesh, replica=num_devices // expert // fsdp, fsdp=fsdp, expert=expert)
        for expert in (sizes if cfg.model.has_experts else [1])
        for fsdp in sizes
        if num_devices % (expert * fsdp) == 0
    ]
    fitting = [found for mesh in meshes if _fits(found := replace(cfg, mesh=mesh))]
    return max(fitting, key=lambda c: (c.mesh.fsdp * c.mesh.expert, c.mesh.expert), default=cfg)


def _fits(cfg: Config) -> bool:
    try:
        check_expert_axis(cfg)
        check_width(cfg)
        check_batch(cfg)
    except InputError:
        return False
    return True


def read_weights(chosen: Chosen, train_step: TrainStep, processes: Processes = ALONE) -> TrainState:
    """Returns a state of weights alone.

    Args:
      train_step: functions for weights alone (`TrainStep.of_weights`), on the mesh.
    """
    abstract, frozen = train_step.abstract, None
    weights = restore_weights(chosen.saved, abstract, processes)
    if chosen.base is not None:
        frozen, _ = read_base(chosen.base, abstract, processes)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        skipped=zero,
        params=weights["params"],
        router_bias=weights["balance"],
        optimizer=(),
        reduction=None,
        frozen=frozen,
    )


def tokenizer_beside_weights(chosen: Chosen) -> Path | None:
    """Returns the tokenizer.json that came with imported weights, if there is one."""
    paths = [saved.path for saved in (chosen.saved, chosen.base) if saved is not None]
    folders = [folder for path in paths for folder in path.parents[:2]]  # of an import, of a run
    found = (folder / place / "tokenizer.json" for folder in folders for place in ("hf", "."))
    return next((path for path in found if path.is_file()), None)
