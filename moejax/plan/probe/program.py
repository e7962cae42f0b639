"""Times a whole forward and backward pass against its price: the program overhead.

The other rates come from one operation in a loop. A program runs hundreds of different ones once
each: products are not square, elementwise work takes time, caches are cold, and fusion is not
known in advance. A model on one device, without links, measures the sum of these effects.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config.fields import change
from moejax.config.schema import Config, PlanConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.plan.cluster.device import Device
from moejax.plan.price.cost import alone
from moejax.plan.probe.timer import Stopwatch
from moejax.plan.trace.reader import read
from moejax.plan.trace.schedule import walk
from moejax.step.train_step import TrainStep, build_step

# Large enough to fill a device, with attention larger than its caches, and quickly compiled.
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
    "data.sequence_length": 256,
    "train.batch_sequences": 4,
}
LARGE = SMALL | {
    "model.vocab_size": 8192,
    "model.width": 2048,
    "model.num_heads": 16,
    "model.num_kv_heads": 16,
    "model.head_width": 128,
    "model.dtype": "bfloat16",
    "moe.num_experts": 8,
    "moe.expert_hidden": 4096,
    "data.sequence_length": 2048,
}
SECONDS = 1.5  # approximate time of a timed run
SCATTER = 7919  # a prime, so that neighbouring tokens have distant ids
MODELS = {"cpu": SMALL, "gpu": LARGE, "tpu": LARGE}


def probe_program(watch: Stopwatch, device: Device) -> float:
    """Returns measured over priced seconds of forward and backward, on all devices at once.

    Process 0 alone traces and prices the program.

    Args:
      device: the rates measured so far.
    """
    # A device of this process, so that the right kernels are selected.
    train_step = _train_step(device.platform, watch.mesh.local_devices[0])
    layout = train_step.layout
    inside = Stopwatch(watch.processes, watch.mesh.devices, [name for name, _ in layout.sizes])

    measured = inside.seconds(
        lambda arguments: train_step.gradients_of_device(*arguments),
        lambda: _arguments(train_step),
        aim_s=SECONDS,
    )
    if not watch.processes.first:
        return 0.0
    traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
    priced = sum(times * alone(op, device) for op, times in walk(read(traced.jaxpr)))
    return measured / priced


def _train_step(platform: str, device: Any) -> TrainStep:
    mesh = dict.fromkeys(("mesh.replica", "mesh.fsdp", "mesh.expert", "mesh.tensor"), 1)
    cfg = change(Config(plan=PlanConfig(mode="hand")), mesh | MODELS[platform])
    return build_step(cfg, build_mesh(build_layout(cfg.mesh), [device]), platform)


def _arguments(train_step: TrainStep) -> Any:
    """Returns a state with weights of the usual size, and a batch of scattered tokens.

    Without random numbers, whose code takes long to compile.
    """
    size = train_step.cfg.model.init_deviation

    def weights(x: Any) -> jax.Array:
        places = jnp.arange(math.prod(x.shape), dtype=jnp.float32).reshape(x.shape)
        return (size * math.sqrt(2) * jnp.sin(places)).astype(x.dtype)

    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), train_step.abstract)
    batch = jax.tree.map(lambda x: jnp.full(x.shape, -1, x.dtype), train_step.abstract_batch())
    places = jnp.arange(math.prod(batch.token_BT.shape), dtype=jnp.int32)
    token_BT = (places * SCATTER % train_step.cfg.model.vocab_size).reshape(batch.token_BT.shape)
    segment_BT = jnp.zeros(batch.token_BT.shape, jnp.int32)
    batch = batch._replace(token_BT=token_BT, target_BT=token_BT, segment_BT=segment_BT)
    return state._replace(params=jax.tree.map(weights, train_step.abstract.params)), batch
