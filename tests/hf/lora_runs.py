"""Runs with random adapters beside the weights of a folder, as checkpoints."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from moejax.checkpoint.source import base_of, find_source, read_weights
from moejax.checkpoint.writer import Checkpoints
from moejax.config.load import to_dict
from moejax.config.schema import CheckpointConfig, LoraConfig, MeshConfig
from moejax.hf.config import config_of
from moejax.hf.reader import Folder
from moejax.step.state import TrainState, flat
from moejax.step.train_step import TrainStep
from tests.cases import step_for
from tests.hf.golden import run_config
from tests.hf.random_models import draw


def write_run(
    run: Path,
    base: Path,
    mesh: MeshConfig,
    tokens: tuple[int, int] = (4, 16),
    *,
    weights: Path | None = None,
    predict_ahead: int = 0,
    train_files: tuple[str, ...] = (),
    **lora,
) -> tuple[TrainStep, TrainState]:
    """Writes a run whose adapters are far from zero.

    Args:
      base: a folder of weights.
      weights: what the run began with; None: the folder.
      train_files: token files; none: the built-in text.
    """
    with Folder(base) as folder:
        cfg = run_config(config_of(folder), mesh, tokens)
    cfg = dataclasses.replace(
        cfg,
        data=dataclasses.replace(
            cfg.data, source="tokens" if train_files else "stdlib", train_files=train_files
        ),
        model=dataclasses.replace(cfg.model, predict_ahead=predict_ahead),
        lora=LoraConfig(**{"rank": 2, "alpha": 1.0, **lora}),
        checkpoint=CheckpointConfig(init_from=str(weights or base)),
    )
    train_step = step_for(cfg)
    source = find_source(cfg, "full")
    assert source is not None
    frozen, router_bias = read_weights(source, train_step.abstract)
    shapes = train_step.abstract.params
    leaves = [
        jax.device_put(draw(path, leaf.shape), leaf.sharding) for path, leaf in flat(shapes).items()
    ]
    adapters = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    small = train_step.abstract._replace(params=None, router_bias=None, frozen=None)
    zeros = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), small)
    state = zeros._replace(params=adapters, router_bias=router_bias, frozen=frozen)
    writer = Checkpoints(run / "checkpoints", keep=1)
    try:
        writer.save(3, state, {"config": to_dict(cfg), "base": base_of(cfg, source)})
    finally:
        writer.close()
    return train_step, state
