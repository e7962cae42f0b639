"""Runs the trainer's own gradients on every device at once, beside what they are priced at.

The other rates are of one operation in a loop. A program runs hundreds of different ones once each:
products are not square, arithmetic that is no product takes time, caches are cold, and what a
compiler fuses is not known before. A model that needs no links tells what all that is worth.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config.fields import change
from moejax.config.schema import Config, PlanConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.plan.cluster.topology import Device
from moejax.plan.price.cost import alone
from moejax.plan.probe.timer import Stopwatch
from moejax.plan.trace.reader import read
from moejax.plan.trace.schedule import walk
from moejax.step.train_step import TrainStep, build_step

# Large enough to fill a device and its caches, and quick to compile.
SMALL = {
    "model.vocab_size": 512,
    "model.width": 256,
    "model.num_layers": 2,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_width": 32,
    "moe.num_experts": 2,
    "moe.experts_per_token": 2,
    "moe.expert_hidden": 512,
    "data.sequence_length": 128,
    "train.batch_sequences": 2,
}
LARGE = {
    "model.vocab_size": 8192,
    "model.width": 2048,
    "model.num_layers": 2,
    "model.num_heads": 16,
    "model.num_kv_heads": 16,
    "model.head_width": 128,
    "model.dtype": "bfloat16",
    "moe.num_experts": 8,
    "moe.experts_per_token": 2,
    "moe.expert_hidden": 4096,
    "data.sequence_length": 2048,
    "train.batch_sequences": 4,
}
SCATTER = 7919  # a prime: tokens that follow each other are far apart
MODELS = {"cpu": SMALL, "gpu": LARGE, "tpu": LARGE}


def probe_program(watch: Stopwatch, device: Device) -> float:
    """Returns measured over priced seconds of forward and backward, all devices at once.

    Process 0 alone reads the program for its price: its answer counts.

    Args:
      device: with the rates that were measured.
    """
    # On a device of this process, so that kernels are those that such devices take.
    train_step = _train_step(device.platform, watch.mesh.local_devices[0])
    layout = train_step.layout
    inside = Stopwatch(watch.processes, watch.mesh.devices, [name for name, _ in layout.sizes])

    def operate(given: Any) -> Any:
        return train_step.gradients_of_device(*given)

    measured = inside.seconds(operate, lambda: _arguments(train_step))
    if not watch.processes.first:
        return 0.0
    traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
    priced = sum(times * alone(op, device) for op, times in walk(read(traced.jaxpr)))
    return measured / priced


def _train_step(platform: str, device: Any) -> TrainStep:
    """Of a model on one device."""
    one = dict.fromkeys(("mesh.replica", "mesh.fsdp", "mesh.expert", "mesh.tensor"), 1)
    cfg = change(Config(plan=PlanConfig(mode="hand")), one | MODELS[platform])
    return build_step(cfg, build_mesh(build_layout(cfg.mesh), [device]), platform)


def _arguments(train_step: TrainStep) -> Any:
    """A state whose weights are as large as drawn ones, and a batch of scattered tokens.

    Nothing is drawn: random bits take long to compile.
    """
    size = train_step.cfg.model.init_deviation

    def weights(x: Any) -> jax.Array:
        places = jnp.arange(math.prod(x.shape), dtype=jnp.float32).reshape(x.shape)
        return (size * math.sqrt(2) * jnp.sin(places)).astype(x.dtype)

    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), train_step.abstract)
    batch = train_step.abstract_batch()
    places = jnp.arange(math.prod(batch.token_BT.shape), dtype=jnp.int32)
    token_BT = (places * SCATTER % train_step.cfg.model.vocab_size).reshape(batch.token_BT.shape)
    segment_BT = jnp.zeros(batch.token_BT.shape, jnp.int32)
    batch = batch._replace(token_BT=token_BT, target_BT=token_BT, segment_BT=segment_BT)
    return state._replace(params=jax.tree.map(weights, train_step.abstract.params)), batch
