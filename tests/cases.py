"""Small models, batches and meshes that many tests share."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config.schema import (
    CompressionConfig,
    Config,
    DataConfig,
    FullAttentionConfig,
    LinearConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.step.state import Batch
from moejax.step.train_step import TrainStep, build_step

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
# With such a capacity nothing is dropped and every bucket holds what may come: no program has
# overflow rounds, which are a third of one to trace and to compile.
CERTAIN = {"capacity_factor": 16.0}

# Norms on both sides, of experts, router and values too; other heads without a window; GELU, a cap
# on logits, factors of blocks and experts (Gemma 4).
GEMMA = {
    "model": {
        "num_layers": 2,
        "block_norm": "both",
        "activation": "geglu",
        "layer_scale": True,
        "logit_cap": 2.0,
        "value_norm": True,
        "qk_norm": "head",
        "score_scale": 0.7,
        "num_kv_heads": 4,
        "sliding_window": 5,
        "full_attention_every": 2,
        "full_attention": FullAttentionConfig(
            head_width=10,
            num_kv_heads=2,
            keys_are_values=True,
            theta=300.0,
            turned_channels=4,
        ),
    },
    "moe": {
        "num_shared_experts": 1,
        "shared_hidden": 10,
        "own_norms": True,
        "expert_scale": True,
    },
}

# Layers of Mamba-2, attention without positions, experts at a latent, or an MLP (Nemotron-H).
MAMBA = LinearConfig("mamba2", 4, 8, key_width=6, value_width=4, convolution=3)
NEMOTRON = {
    "model": {
        "num_layers": 5,
        "activation": "relu2",
        "positions": "none",
        "layer_attention": ("linear", "none", "full", "none", "linear"),
        "layer_mlps": ("none", "dense", "none", "experts", "none"),
        "linear": dataclasses.replace(MAMBA, convolution_bias=True, least_step=0.05),
    },
    "moe": {"latent": 16, "num_shared_experts": 1, "shared_hidden": 24},
}
# Keys and values of other widths, a factor on values; blocks with a window have sinks, more keys
# and another base than those without (MiMo-V2).
MIMO = {
    "num_layers": 2,
    "attention_sinks": True,
    "num_kv_heads": 4,
    "value_width": 6,
    "value_scale": 0.7,
    "rope_width": 2,
    "sliding_window": 5,
    "full_attention_every": 2,
    "full_attention": FullAttentionConfig(num_kv_heads=2, theta=300.0, sinks=False),
}
# Positions in blocks with a window alone, an output gate, four norms of a block (AFMoE).
TRINITY = {
    "num_layers": 2,
    "positions": "window",
    "attention_gate": True,
    "block_norm": "both",
    "qk_norm": "head",
    "sliding_window": 5,
    "full_attention_every": 2,
}


def part_of(first: Sequence, second: Sequence, parts: int = 2) -> list:
    """Parameters of every pair; one part, that has every value of both, is always run.

    The others are for `make test-all CASES=every`.
    """
    pairs = []
    for (row, one), (column, other) in product(enumerate(first), enumerate(second)):
        both = (*one, other) if isinstance(one, tuple) else (one, other)
        marks = pytest.mark.exhaustive if (row + column) % parts else ()
        pairs.append(pytest.param(*both, marks=marks))
    return pairs


def some_of(cases: Iterable, *kept: Any) -> list:
    """Cases of a grid for `parametrize`: those that are not kept are exhaustive."""
    return [c if c in kept else pytest.param(c, marks=pytest.mark.exhaustive) for c in cases]


def few(examples: int) -> hypothesis.settings:
    """Settings for what compiles or runs whole programs: to shrink a failing one takes minutes."""
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    return hypothesis.settings(max_examples=examples, phases=phases)


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


def on_nodes(
    mesh: tuple[int, int, int, int] = (2, 2, 1, 2),
    nodes: int = 2,
    weights: str = "hidden",
    codec: str = "int8+feedback",
    **changes: Any,
) -> Config:
    """The small model on several nodes, with one codec for all gradients across them."""
    cfg = small_config(mesh, expert_weights=weights, moe=CERTAIN)
    policy = CompressionConfig(dense_gradient=codec, expert_gradient=codec, block=16)
    across = dataclasses.replace(cfg.mesh, nodes=nodes)
    return dataclasses.replace(cfg, mesh=across, compression=policy, **changes)


def step_for(cfg: Config) -> TrainStep:
    """The trainer on the first devices that the mesh asks for."""
    layout = build_layout(cfg.mesh)
    devices = jax.devices()[: math.prod(size for _, size in layout.sizes)]
    return build_step(cfg, build_mesh(layout, devices), "cpu")


def random_batch(cfg: Config, seed: int = 0) -> Batch:
    """Random tokens in documents of about 8, some targets left out; NumPy arrays."""
    rng = np.random.default_rng(seed)
    shape = (cfg.train.batch_sequences, cfg.data.sequence_length)
    token_BT = rng.integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    target_BT = rng.integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    target_BT[rng.random(shape) < 0.1] = -1
    segment_BT = np.cumsum(rng.random(shape) < 0.125, axis=1).astype(np.int32)
    return Batch(token_BT, target_BT, segment_BT)


def place(train_step: TrainStep, batch: Batch) -> Batch:
    """Puts a global batch onto the trainer's mesh."""
    return Batch(*jax.device_put(tuple(batch), train_step.batch_sharding))


def skew(router_bias, bias: dict[int, float]):
    """The selection biases with some experts' entries set: routes tokens away or towards them."""

    def set_entries(bias_LE):
        for expert, value in bias.items():
            bias_LE = bias_LE.at[:, expert].set(value)
        return bias_LE

    return jax.tree.map(set_entries, router_bias)


def one_device_state(cfg: Config):
    """The first state of a config, on one device; mesh, route and routing do not matter."""
    plain = {"route": "split", "route_chunks": 1, "route_chunks_backward": None}
    routing = {"capacity_factor": None, "experts_per_token": 1, "router": RouterConfig()}
    moe = dataclasses.replace(cfg.moe, **routing)
    # Copies, because a step may be given the state's buffers to reuse.
    return jax.tree.map(
        jnp.array, _first_state(dataclasses.replace(cfg, mesh=MeshConfig(), moe=moe, **plain))
    )


@functools.cache
def _first_state(cfg: Config):
    return jax.tree.map(np.asarray, step_for(cfg).init())


def drawn_state(train_step: TrainStep, seed: int = 0):
    """A state of any numbers at step 0, for tests of where they go: nothing is compiled."""
    rng = np.random.default_rng(seed)

    def draw(a):
        drawn = rng.standard_normal(a.shape) if a.shape else np.zeros(())
        return jax.device_put(drawn.astype(a.dtype), a.sharding)

    return jax.tree.map(draw, train_step.abstract)


def spread(state, train_step: TrainStep):
    """Puts a state onto the trainer's mesh."""
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, train_step.abstract)


def assert_close(got, wanted, *, terms: int) -> None:
    """Compares trees of float32 arrays, leaf by leaf, against each leaf's largest value.

    The bound is that of adding `terms` rounded numbers in any order: terms * eps.
    """
    bound = terms * np.finfo(np.float32).eps
    for path, want in jax.tree_util.tree_flatten_with_path(wanted)[0]:
        have = np.asarray(_at(got, path), np.float64)
        want = np.asarray(want, np.float64)
        assert have.shape == want.shape
        worst = np.max(np.abs(have - want), initial=0) / max(np.max(np.abs(want), initial=0), 1e-6)
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: off by {worst:.2e} > {bound:.2e}"


def _at(tree, path):
    for key in path:
        tree = tree[getattr(key, "key", getattr(key, "idx", None))]
    return tree
