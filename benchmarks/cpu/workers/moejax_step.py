"""The moejax side of `step.py`: its own train step, dropless, on one device."""

import os
import platform
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
from protocol import serve

import moejax
from moejax.config.checks import check, resolve_mesh
from moejax.config.load import from_dict
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.model.count import count
from moejax.runtime.start import platform_of, start
from moejax.step.state import Batch
from moejax.step.train_step import TrainStep, build_step


class MoejaxSide:
    """The compiled step of `moejax.train` and its state."""

    def __init__(self, request: dict[str, Any]):
        cfg = from_dict(request["config"])
        check(cfg)
        devices = start(cfg.mesh)
        name = platform_of(devices)
        cfg = resolve_mesh(cfg, len(devices), name)
        self.train_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), name)
        self.state = self.train_step.init()
        self.facts = _facts(self.train_step)

    def place(self, token_BT: np.ndarray) -> Batch:
        """One document a sequence, the next token as target, nothing to predict at the end."""
        target_BT = np.pad(token_BT[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        batch = Batch(token_BT, target_BT, np.zeros_like(token_BT))
        return Batch(*jax.device_put(tuple(batch), self.train_step.batch_sharding))

    def step(self, batch: Batch) -> jax.Array:
        """Takes one step."""
        self.state, metrics = self.train_step.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        return metrics.loss

    def multiplier(self, size: int) -> Callable[[], None]:
        """A compiled matrix product."""
        x = jnp.ones((size, size), jnp.float32)
        multiply = jax.jit(jnp.matmul)
        return lambda: jax.block_until_ready(multiply(x, x))

    def set_experts(self, name: str) -> None:
        """Not offered: the implementation is a setting, moe.implementation."""
        raise ValueError(f"experts {name}: set --config.moe.implementation={name} instead.")


def _facts(train_step: TrainStep) -> dict[str, Any]:
    cfg, counts = train_step.cfg, count(train_step.cfg, train_step.parameter_sizes())
    return {
        "versions": {
            "moejax": moejax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            "experts": train_step.spec.experts,
            "attention": train_step.spec.attention,
            "scan_layers": cfg.model.scan_layers,
            "remat": cfg.model.remat,
            "capacity_factor": cfg.moe.capacity_factor,
            "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
        },
        "parameters": counts.total,
        "flops_per_step": counts.flops_per_token
        * cfg.train.batch_sequences
        * cfg.data.sequence_length,
    }


if __name__ == "__main__":
    serve(MoejaxSide)
