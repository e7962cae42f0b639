"""The mesh onto which weights are imported: all devices here, weights over as many as fit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moejax.config.checks.mesh import check_expert_axis, check_width
from moejax.config.schema import Config, MeshConfig, TrainConfig
from moejax.errors import InputError
from moejax.hf.model import model_alone
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.start import platform_of
from moejax.step.train_step import TrainStep, build_step


def converted(cfg: Config, devices: int) -> Config:
    """Returns the model of a config on a mesh of so many devices; its training does not matter.

    Experts are spread first, then the width; devices that neither can use hold copies.
    """
    plain = replace(model_alone(cfg), train=TrainConfig(batch_sequences=devices))
    sizes = [size for size in range(devices, 0, -1) if devices % size == 0]
    fitting = [
        replace(plain, mesh=MeshConfig(devices // expert // fsdp, fsdp, expert))
        for expert in sizes
        for fsdp in sizes
        if devices % (expert * fsdp) == 0
    ]
    return max(filter(_fits, fitting), key=lambda c: (c.mesh.fsdp * c.mesh.expert, c.mesh.expert))


def _fits(cfg: Config) -> bool:
    try:
        check_expert_axis(cfg)
        check_width(cfg)
    except InputError:
        return False
    return True


def build_here(cfg: Config, devices: Sequence[Any]) -> TrainStep:
    """Returns the shapes and shardings of a model's state on these devices; allocates nothing."""
    cfg = converted(cfg, len(devices))
    return build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), platform_of(list(devices)))
