"""The devices and the mesh on which a checkpoint's model generates."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from jax.sharding import Mesh

from moejax.config.checks import resolve_mesh
from moejax.config.load import parse_overrides
from moejax.config.schema import Config, MeshConfig
from moejax.errors import InputError
from moejax.evaluate.checkpoint import Chosen, on_all_devices
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.processes import ALONE, Processes
from moejax.runtime.start import platform_of, start
from moejax.step.train_step import TrainStep

# Settings of the forward pass that generation decides by itself, and why.
DECIDED = {
    "moe.capacity_factor": "Experts take all tokens where texts are generated, so that no text "
    "depends on others",
    "model.scan_layers": "Texts are generated with each layer's weights apart",
}


class PlacedModel(NamedTuple):
    """The config, mesh and platform of a model on devices."""

    cfg: Config  # with its mesh resolved
    mesh: Mesh
    platform: str


def place(chosen: Chosen, processes: Processes = ALONE) -> PlacedModel:
    """Starts the devices. Returns the mesh of the run, or of all devices if it names no axis."""
    devices = start(chosen.cfg.mesh)
    platform = platform_of(devices)
    cfg = without_stages(on_all_devices(chosen.cfg, len(devices)))
    cfg = resolve_mesh(cfg, len(devices), platform, processes=processes.count)
    return PlacedModel(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)


def place_beside(train_step: TrainStep, cfg: Config, processes: Processes) -> PlacedModel:
    """Returns the mesh of a model on the devices of a run that trains, in their order.

    Args:
      cfg: the run's for an evaluation.
    """
    assert isinstance(train_step.mesh, Mesh), "the step is only traced"
    devices, platform = train_step.mesh.devices.flatten().tolist(), train_step.platform
    cfg = resolve_mesh(without_stages(cfg), len(devices), platform, processes=processes.count)
    return PlacedModel(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)


def without_stages(cfg: Config) -> Config:
    """Returns a config whose pipeline stages are shards: one token at a time fills no pipeline.

    Where shards share sequences, stages that become shards do too.
    """
    mesh, stages = cfg.mesh, cfg.mesh.stage
    usual = {
        name: getattr(MeshConfig(), name) for name in ("schedule", "stage_keeps", "stage_slices")
    }
    mesh = replace(mesh, stage=1, fsdp=mesh.fsdp * stages, **usual)
    if mesh.context > mesh.expert:  # shared over fsdp, of which whole axes count
        positions, rest = divmod(cfg.data.sequence_length, 2 * mesh.context * stages)
        stripe = math.gcd(positions, mesh.context_stripe)
        shared = {"context": mesh.context * stages, "context_stripe": stripe}
        alone = {name: getattr(MeshConfig(), name) for name in shared}
        mesh = replace(mesh, **(alone if rest else shared))
    train = replace(cfg.train, micro_batches=cfg.train.micro_batches // stages)
    return replace(cfg, mesh=mesh, train=train)


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuses settings of DECIDED."""
    for name in parse_overrides(overrides):
        if name in DECIDED:
            raise InputError(f"`{name}` has no effect. {DECIDED[name]}. Leave it out.")
