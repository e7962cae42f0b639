"""What a run's program is made of, before anything is allocated: choices, model, state's shapes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm.weights.states import describe_state, state_specs
from moejax.config.compression import GRADIENTS, Codecs, build_compression
from moejax.config.schema import Config
from moejax.kernels.select import place_of, select_kernels
from moejax.layout.layout import Layout, build_layout
from moejax.layout.route import build_route
from moejax.layout.spec import Program
from moejax.model.transformer import Transformer
from moejax.moe.layer import RouterBias
from moejax.step.optimizer import Optimizer
from moejax.step.state import Reduction, TrainState, Tree


def build_program(
    cfg: Config, mesh: Mesh | AbstractMesh, platform: str, codecs: Codecs | None
) -> Program:
    """What a device runs; arguments as of `build_trainer`."""
    layout = build_layout(cfg.mesh)
    chosen = {
        name: one.implementation
        for name, one in select_kernels(cfg, place_of(mesh, platform)).items()
    }
    compression = build_compression(cfg.compression)
    if "quantize" in chosen:
        rows = chosen.get("quantized_rows", "separate")
        compression = compression.with_kernels(chosen["quantize"], rows)
    codecs = codecs or compression.at(0)
    return Program(
        layout=layout,
        route=build_route(
            cfg.route,
            layout,
            chunks=cfg.route_chunks,
            chunks_backward=cfg.route_chunks_backward or cfg.route_chunks,
            trim=cfg.route_trim,
            codecs=codecs,
        ),
        pin=platform != "cpu",
        dtype=cfg.model.dtype,
        gradient_dtype=cfg.train.gradient_dtype,
        compression=compression,
        codecs=codecs,
        micro_bytes=cfg.train.reduction_bytes,
        experts=chosen.get("experts", "blocked"),
        attention=chosen["attention"],
        logit_elements=2**21 if platform == "cpu" else 2**27,
    )


def describe(
    cfg: Config, program: Program, params: Any, balance: Any, dims: Any
) -> tuple[TrainState, TrainState]:
    """The state's shapes, and how each array lies over the mesh."""
    layout, adaptive = program.layout, program.compression.adaptive
    optimizer = build_optimizer(cfg, dims, layout)
    moments = jax.eval_shape(optimizer.init, params)
    kept = jax.tree.map(partial(describe_state, program), params, dims)
    rungs = jax.ShapeDtypeStruct((len(GRADIENTS),), jnp.int32) if adaptive else None
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    abstract = TrainState(scalar, scalar, params, balance, moments, Reduction(kept, rungs))
    specs = jax.tree.map(lambda x, d: layout.param_spec(d, x.ndim), params, dims)
    opt_specs = optimizer.specs(params, moments, specs)
    none = jax.tree.map(lambda _: P(), balance)
    reduction = Reduction(state_specs(kept, params, dims, layout), P() if adaptive else None)
    return abstract, TrainState(P(), P(), specs, none, opt_specs, reduction)


def build_model(cfg: Config, program: Program) -> Transformer:
    """The model, its weights drawn from the seed."""
    return Transformer(cfg.model, cfg.moe, program, nnx.Rngs(params=cfg.train.seed))


def split_model(model: Transformer) -> tuple[nnx.GraphDef, Tree, Tree]:
    """Its structure, its parameters, and its selection biases."""
    graph, params, balance = nnx.split(model, nnx.Param, RouterBias)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(balance)


def build_optimizer(cfg: Config, dims: Tree, layout: Layout) -> Optimizer:
    """The update of parameters that are named by the letters of their dimensions."""
    return Optimizer(cfg.optimizer, dims, layout, cfg.train.num_steps)
