"""Plans of published models to translate, and what the trainers' packages know."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from moejax.config.fields import change
from moejax.config.schema import Config
from moejax.hf.families import family_of
from moejax.hf.families.family import from_settings
from moejax.plan.search.space import Limits, meshes, resolve

TESTS = Path(__file__).parents[2]
PUBLISHED = json.loads((TESTS / "hf" / "published.json").read_text())
KNOWN = json.loads((TESTS / "golden" / "trainers.json").read_text())
LIMITS = Limits(devices=64, nodes=8, platform="gpu")


def model(name: str, **values: Any) -> Config:
    """The config of a published model; names of settings have __ for a dot."""
    cfg = from_settings(family_of(PUBLISHED[name]).read(PUBLISHED[name]))
    step = {
        "model.dtype": "bfloat16",
        "data.sequence_length": 4096,
        "train.batch_sequences": 1024,
        "mesh.nodes": 8,
    }
    return change(cfg, step | {key.replace("__", "."): value for key, value in values.items()})


def plan(name: str, **values: Any) -> Config:
    """A valid plan of 64 GPUs on 8 nodes."""
    cfg = resolve(model(name, **values), LIMITS)
    assert cfg is not None, f"{name} with {values} breaks a rule"
    return cfg


@cache
def every_mesh(name: str, **values: Any) -> tuple[Config, ...]:
    """All valid meshes of 64 GPUs on 8 nodes, with the simplest route, on one stage or four."""
    found = []
    for stages in (1, 4):
        limits = dataclasses.replace(LIMITS, pinned=frozenset({"mesh.stage"}))
        found += meshes(model(name, mesh__stage=stages, **values), limits)
    return tuple(found)
