"""Small models, batches and meshes that many tests share."""

import dataclasses
import math

import jax
import numpy as np

from moejax.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)
from moejax.dims import build_layout
from moejax.plan.build import build_mesh
from moejax.train.step import Batch, Trainer, build_trainer

SMALL_MODEL = ModelConfig(
    vocab_size=64,
    width=32,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_width=4,
    mlp_hidden=32,
    init_deviation=0.3,
)
SMALL_MOE = MoEConfig(num_experts=8, experts_per_token=2, expert_hidden=16)


def small_config(
    mesh: tuple[int, int, int, int] = (1, 1, 1, 1),
    *,
    activations: str = "sequence",
    expert_weights: str = "hidden",
    model: dict | None = None,
    moe: dict | None = None,
    router: dict | None = None,
    train: dict | None = None,
    optimizer: dict | None = None,
) -> Config:
    """A model of one expert layer on 8 sequences of 16 tokens, changed as asked."""
    routing = RouterConfig(**{"z_loss": 0.01, "balance_loss": 0.1, **(router or {})})
    return Config(
        model=dataclasses.replace(SMALL_MODEL, **(model or {})),
        moe=dataclasses.replace(SMALL_MOE, router=routing, **(moe or {})),
        mesh=MeshConfig(*mesh, activations=activations, expert_weights=expert_weights),
        data=DataConfig(sequence_length=16),
        train=TrainConfig(**{"batch_sequences": 8, "num_steps": 20, **(train or {})}),
        optimizer=OptimizerConfig(**{"warmup_steps": 0, **(optimizer or {})}),
    )


def trainer_for(cfg: Config) -> Trainer:
    """The trainer on the first devices that the mesh asks for."""
    layout = build_layout(cfg.mesh)
    devices = jax.devices()[: math.prod(size for _, size in layout.sizes)]
    return build_trainer(cfg, build_mesh(layout, devices), "cpu")


def random_batch(cfg: Config, seed: int = 0) -> Batch:
    """Random tokens in documents of about 8, some targets left out; NumPy arrays."""
    rng = np.random.default_rng(seed)
    shape = (cfg.train.batch_sequences, cfg.data.sequence_length)
    token_BT = rng.integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    target_BT = rng.integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    target_BT[rng.random(shape) < 0.1] = -1
    segment_BT = np.cumsum(rng.random(shape) < 0.125, axis=1).astype(np.int32)
    return Batch(token_BT, target_BT, segment_BT)


def place(trainer: Trainer, batch: Batch) -> Batch:
    """Puts a global batch onto the trainer's mesh."""
    return Batch(*jax.device_put(tuple(batch), trainer.batch_sharding))
