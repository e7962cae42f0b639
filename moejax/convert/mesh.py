"""The mesh onto which weights are imported: all devices here, weights over as many as fit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moejax.config.schema import Config, TrainConfig
from moejax.config.spread import spread
from moejax.hf.model import model_alone
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.start import platform_of
from moejax.step.train_step import TrainStep, build_step


def build_here(cfg: Config, devices: Sequence[Any]) -> TrainStep:
    """Returns the shapes and shardings of a model's state on these devices; allocates nothing."""
    alone = replace(model_alone(cfg), train=TrainConfig(batch_sequences=len(devices)))
    wide = spread(alone, len(devices))
    assert wide is not None, "copies fit any number of devices"
    mesh = build_mesh(build_layout(wide.mesh), devices)
    return build_step(wide, mesh, platform_of(list(devices)))
