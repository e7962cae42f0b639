"""An expert layer forward and backward, and a whole train step, both of the trainer itself."""

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks.gpu.case import Case, Reporter
from benchmarks.gpu.shapes import DEEPSEEK, MIXTRAL, OLMOE, QWEN3, TINY, Shape
from benchmarks.gpu.timing import jax_form
from moejax.comm.cpu import gloo
from moejax.config.load import load_config
from moejax.config.schema import Config
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.layout.route import Route
from moejax.model.count import count
from moejax.model.remat import REMAT_POLICIES
from moejax.moe.layer import MoE, RouterBias
from moejax.step.state import Batch
from moejax.step.train_step import TrainStep, build_step

LAYER, STEP = "MoE layer, forward + backward", "train step"
CONFIG = Path(__file__).with_name("config.yaml")
SMALL = ["model.width=64", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1"]
SMALL += ["model.head_width=32", "model.vocab_size=512", "moe.expert_hidden=64"]
SMALL += ["data.sequence_length=32", "train.batch_sequences=4", "train.micro_batches=1"]


def small_config() -> Config:
    """The step's config, of a size for a CPU."""
    return load_config(CONFIG, SMALL)


def one_device_step(cfg: Config, devices: Any) -> TrainStep:
    """The trainer of a run on one device."""
    mesh = build_mesh(build_layout(cfg.mesh), devices[:1])
    return build_step(cfg, mesh, devices[0].platform)


def layer_config(shape: Shape) -> Config:
    """A run whose layers have the experts of a shape; gradients in the dtype of compute."""
    cfg = load_config(CONFIG, ["train.gradient_dtype=bfloat16", "moe.router.balance_loss=0.01"])
    model = dataclasses.replace(cfg.model, width=shape.D)
    moe = dataclasses.replace(
        cfg.moe, num_experts=shape.G, experts_per_token=shape.K, expert_hidden=shape.F
    )
    return dataclasses.replace(cfg, model=model, moe=moe)


class Layer(NamedTuple):
    """A layer as the trainer runs it.

    Attributes:
      forward: jitted (params, bias, x_BTD) -> y_BTD.
      both_ways: jitted (params, bias, x_BTD, dy_BTD) -> (y_BTD, gradients).
      params, bias: their shapes. Experts' weights are in the dtype of compute, the router's in
        float32.
      deviation: of the weights that a run begins with.
    """

    forward: Any
    both_ways: Any
    params: Any
    bias: Any
    deviation: float


def build_layer(
    train_step: TrainStep, *, remat: str = "none", route: Route | None = None, **choices: str
) -> Layer:
    """The layer of a trainer on one device.

    Args:
      remat: what backward keeps, as `model.remat`.
      route: in place of the trainer's.
      choices: other fields of the trainer's `StepSpec`.
    """
    cfg = train_step.cfg
    spec = dataclasses.replace(train_step.spec, route=route or train_step.spec.route, **choices)
    layer = nnx.eval_shape(lambda: MoE(cfg.model, cfg.moe, spec, nnx.Rngs(params=0)))
    graph, params, bias = nnx.split(layer, nnx.Param, RouterBias)
    params, bias = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
    compute = {name: "float32" if name == "w_router" else spec.dtype for name in params}
    params = {name: jax.ShapeDtypeStruct(x.shape, compute[name]) for name, x in params.items()}

    def forward(params: Any, bias: Any, x: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, params, bias)
        return layer(x, layer.weights())[0]

    def both_ways(params: Any, bias: Any, x: jax.Array, dy: jax.Array) -> Any:
        kept = forward
        if remat != "none":
            kept = jax.checkpoint(forward, policy=REMAT_POLICIES[remat])
        y, pull = jax.vjp(lambda params, x: kept(params, bias, x), params, x)
        return y, pull(dy)

    whole, mesh = P(), train_step.mesh
    run = gloo.shard_map(forward, mesh, (whole,) * 3, whole)
    both = gloo.shard_map(both_ways, mesh, (whole,) * 4, (whole, (whole, whole)))
    return Layer(jax.jit(run), jax.jit(both), params, bias, cfg.model.init_deviation)


def draw_weights(report: Reporter, layer: Layer) -> tuple[Any, Any]:
    """Weights of the size that a run begins with, and zeros for the router's bias."""
    params = {
        name: report.draw(i, *x.shape, dtype=x.dtype) * jnp.asarray(layer.deviation, x.dtype)
        for i, (name, x) in enumerate(layer.params.items())
    }
    return params, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layer.bias)


def time_layer(report: Reporter, shape: Shape, tokens: int) -> None:
    """Times the layer on `tokens` tokens of one device."""
    train_step = one_device_step(layer_config(shape), jax.devices())
    layer = build_layer(train_step)
    params, bias = draw_weights(report, layer)
    x, dy = (report.draw(seed, 1, tokens, shape.D) for seed in (10, 11))
    flops = 18.0 * tokens * shape.K * shape.D * shape.F
    form = partial(jax_form, layer.both_ways, params, bias, x, dy)
    report.compare(LAYER, {train_step.spec.experts: form}, flops=flops)


def layer_cases(*, small: bool) -> list[Case]:
    """Layers of published models, those of the targets first."""
    sizes = [(MIXTRAL, 16384), (QWEN3, 32768), (MIXTRAL, 4096), (QWEN3, 8192), (OLMOE, 32768)]
    sizes = [(TINY, 64)] if small else [*sizes, (DEEPSEEK, 16384)]
    return [
        Case(f"{shape.model}, {tokens} tokens", partial(time_layer, shape=shape, tokens=tokens))
        for shape, tokens in sizes
    ]


def time_steps(report: Reporter) -> None:
    """Times steps of the trainer on tokens drawn at random, and looks at their losses."""
    cfg = small_config() if report.small else load_config(CONFIG)
    train_step = one_device_step(cfg, jax.devices())
    B, T = cfg.train.batch_sequences, cfg.data.sequence_length

    def run() -> dict[str, Any]:
        return timed_steps(train_step, count=2 if report.small else 12)

    found = report.attempt(STEP, train_step.spec.experts, run)
    if found is None:
        return
    counts = count(cfg, train_step.parameter_sizes())
    report.row(
        STEP,
        train_step.spec.experts,
        **found,
        flops=float(counts.flops_per_token * B * T),
        tokens=B * T,
        parameters=counts.total,
        active=counts.active,
        attention=train_step.spec.attention,
    )


def noise(train_step: TrainStep) -> Batch:
    """A batch of tokens drawn at random, on the devices."""
    cfg = train_step.cfg
    shape = cfg.train.batch_sequences, cfg.data.sequence_length
    token_BT = np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    batch = Batch(token_BT, np.roll(token_BT, -1, axis=1), np.zeros(shape, np.int32))
    return jax.device_put(batch, train_step.batch_sharding)


def timed_steps(train_step: TrainStep, count: int) -> dict[str, Any]:
    """Seconds of each of `count` steps on noise, of compilation, and what the losses were."""
    batch = noise(train_step)
    began = time.perf_counter()
    step = train_step.step.lower(train_step.abstract, train_step.abstract_batch()).compile()
    compiled = time.perf_counter() - began
    memory = step.memory_analysis()
    state, seconds, losses = train_step.init(), [], []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    for _ in range(count):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        seconds.append(time.perf_counter() - began)
    if not all(np.isfinite(losses)):
        raise RuntimeError(f"losses are {losses}")
    peak = memory.peak_memory_in_bytes if memory else None
    return {"seconds": seconds, "losses": losses, "compile_s": compiled, "peak_bytes": peak}


def step_cases(*, small: bool) -> list[Case]:
    """One whole step."""
    return [Case(CONFIG.stem if not small else "tiny", time_steps)]
