"""The model as a step sees it: its static part, and the spec that a config chooses."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from moejax.comm.weights.shard import attach
from moejax.config.compression import GRADIENTS, STAGES, Codecs, Compression, build_compression
from moejax.config.pattern import layer_groups
from moejax.config.schema import Config, MeshConfig
from moejax.errors import InputError
from moejax.kernels.select import hardware_of, select_kernels
from moejax.layout.layout import Layout, build_layout
from moejax.layout.route import build_route
from moejax.layout.spec import StepSpec
from moejax.model.transformer import Transformer
from moejax.moe.layer import RouterBias
from moejax.step.adapters import adapters_of
from moejax.step.state import Tree, flat


@dataclass(frozen=True)
class ModelDef:
    """The static part of a model: all but its arrays."""

    cfg: Config
    spec: StepSpec
    graph: nnx.GraphDef
    dims: Tree  # letters of the dimensions of each parameter that is trained
    layouts: Tree  # the layout of each parameter that is trained: see `layouts_of`
    frozen_dims: Tree = None  # and of each frozen weight; None if all weights are trained

    @property
    def layout(self) -> Layout:
        """The layout of arrays on the mesh."""
        return self.spec.layout

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens whose logits exist at one time."""
        vocabulary = self.cfg.model.vocab_size // self.layout.size(self.layout.tensor)
        return max(1, self.spec.logit_elements // vocabulary)

    def merge(
        self,
        params: Tree,
        router_bias: Tree,
        frozen: Tree = None,
        expert_BSLK: jax.Array | None = None,
        load_LE: jax.Array | None = None,
    ) -> Transformer:
        """Returns the model with these arrays; arguments as in `TrainState`.

        Weights and the factors of adapters are arrays or `Shard`s.

        Args:
          expert_BSLK: recorded experts, for `Transformer.use_recorded`; None: tokens choose.
          load_LE: for `Transformer.use_load`, where copies of experts are chosen by it.
        """
        weights = params if frozen is None else attach(frozen, adapters=params)
        transformer = nnx.merge(self.graph, weights, router_bias)
        if expert_BSLK is not None:
            transformer.use_recorded(expert_BSLK)
        if load_LE is not None:
            transformer.use_load(load_LE)
        return transformer

    def init(self) -> tuple[Tree, Tree]:
        """Returns all weights and the selection biases, drawn from the seed."""
        return _split(_build_model(self.cfg, self.spec))[1:]


def describe_model(cfg: Config, spec: StepSpec) -> tuple[ModelDef, Tree, Tree]:
    """Returns the model, and shapes of all weights and selection biases; allocates nothing.

    Raises:
      InputError: if `lora` does not fit the model.
    """
    model = nnx.eval_shape(lambda: _build_model(cfg, spec))
    graph, params, router_bias = _split(model)
    found = nnx.to_flat_state(nnx.state(model, nnx.Param))
    dims = nnx.to_pure_dict(
        nnx.from_flat_state([(path, v.replace(v.get_metadata("dims"))) for path, v in found])
    )
    if cfg.lora.rank is None:
        return ModelDef(cfg, spec, graph, dims, layouts_of(params, cfg, spec)), params, router_bias
    adapters = adapters_of(cfg.lora, dims, params)
    layouts = layouts_of(adapters, cfg, spec)
    return ModelDef(cfg, spec, graph, adapters, layouts, dims), params, router_bias


def layouts_of(tree: Tree, cfg: Config, spec: StepSpec) -> Tree:
    """Returns the layout of each leaf of a tree that is named like the model's arrays.

    Stages hold the last layer groups, one a chunk; all else is sharded over them, as data is.
    """
    groups = len(layer_groups(cfg.model, stacked=spec.stacked))
    staged = [["groups", group] for group in range(groups - cfg.model.stage_chunks, groups)]

    def layout(path: Any, _: Any) -> Layout:
        names = [getattr(entry, "key", None) for entry in path[:2]]
        return spec.layout.inside if names in staged else spec.layout

    return jax.tree_util.tree_map_with_path(layout, tree)


def check_adapters(cfg: Config) -> None:
    """Raises InputError if `lora` does not fit the model's parameters; touches no device."""
    if cfg.lora.rank is None:
        return
    layout = build_layout(MeshConfig())
    model, _, _ = describe_model(cfg, StepSpec(layout, build_route("split", layout)))
    chunks = cfg.model.stage_chunks
    groups = model.dims["groups"]
    first, *others = (groups[group] for group in sorted(groups)[-chunks:])
    if any(group != first for group in others):
        raise InputError(
            f"`lora.targets` fits other matrices in some of the {chunks} chunks of "
            "`model.stage_chunks` than in others. All chunks run one program. Name matrices "
            "without their place, such as attention.w_*, or set model.stage_chunks=1."
        )


def build_spec(
    cfg: Config,
    mesh: Mesh | AbstractMesh,
    platform: str,
    codecs: Codecs | None,
    *,
    stacked: bool = True,
    gathered: bool = False,
    rounds: bool = True,
    documents: float = 1.0,
    tables: bool = False,
) -> StepSpec:
    """Returns the spec for a config and its devices; arguments as in `build_step`."""
    layout = build_layout(cfg.mesh, gathered=gathered)
    kernels = select_kernels(cfg, hardware_of(mesh, platform)).items()
    chosen = {name: choice.implementation for name, choice in kernels}
    compression = _compression(cfg, chosen)
    codecs = codecs or compression.at(0)
    return StepSpec(
        layout=layout,
        route=build_route(
            cfg.route,
            layout,
            chunks=cfg.route_chunks,
            chunks_backward=cfg.route_chunks_backward or cfg.route_chunks,
            trim=cfg.route_trim,
            codecs=codecs,
        ),
        barriers=platform != "cpu",
        scatter_rows=platform == "tpu",
        dtype=cfg.model.dtype,
        gradient_dtype=cfg.train.gradient_dtype,
        compression=compression,
        codecs=codecs,
        gather_dense=cfg.mesh.gather_dense,
        gather_across=cfg.mesh.gather_across,
        context_exchange=cfg.mesh.context_exchange,
        micro_bytes=cfg.train.reduction_bytes,
        adapter_scale=cfg.lora.scale,
        index_loss=cfg.train.indexer_loss / (cfg.train.batch_sequences * cfg.data.sequence_length),
        experts=chosen.get("experts", "blocked"),
        attention=chosen["attention"],
        sliced_attention=chosen.get("sliced_attention", "blocked"),
        stacked=stacked,
        rounds=rounds,
        residuals_on_host=cfg.memory.residuals == "host" and not layout.stage,
        documents=documents,
        tables=tables,
        logit_elements=2**21 if platform == "cpu" else 2**27,
    )


def _compression(cfg: Config, kernels: dict[str, str]) -> Compression:
    """Returns the codecs of classes of traffic that the config's step has, by chosen kernels."""
    compression = build_compression(cfg.compression)
    if "quantize" in kernels:
        rows = kernels.get("quantized_rows", "separate")
        compression = compression.with_kernels(kernels["quantize"], rows)
    if cfg.lora.rank is not None:
        compression = compression.without(GRADIENTS)
    if cfg.mesh.stage == 1:
        compression = compression.without(STAGES)
    return compression


def parameter_sizes(dims: Tree, params: Tree) -> dict[str, tuple[str, int]]:
    """Returns name -> (letters of the dimensions, elements) of each parameter."""
    pairs = zip(flat(params).items(), jax.tree.leaves(dims), strict=True)
    return {name: (letters, math.prod(x.shape)) for (name, x), letters in pairs}


def _build_model(cfg: Config, spec: StepSpec) -> Transformer:
    # Inside a stage modules find their weights gathered: see `comm.weights.stage_weights`.
    inside = replace(spec, layout=spec.layout.inside)
    return Transformer(cfg.model, cfg.moe, inside, nnx.Rngs(params=cfg.train.seed))


def _split(model: Transformer) -> tuple[nnx.GraphDef, Tree, Tree]:
    graph, params, router_bias = nnx.split(model, nnx.Param, RouterBias)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(router_bias)
