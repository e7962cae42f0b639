"""The compiled functions of a run: the train step, gradients alone, evaluation, sampling.

Each is one `jax.shard_map` of per-device code over the full mesh.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm.cpu import gloo
from moejax.comm.host import is_on_host, on_host, zeros_on_host
from moejax.comm.weights.path import reduction_hops
from moejax.comm.weights.residuals import residual_shapes, residual_specs
from moejax.config.compression import NO_CODECS, Codecs
from moejax.config.fields import change
from moejax.config.schema import Config
from moejax.layout.layout import Layout, is_product
from moejax.layout.spec import StepSpec
from moejax.runtime.compiler import Options, compiler_options, known_options
from moejax.step import forward
from moejax.step.adapters import adapter_shapes, init_adapters, matrices_in
from moejax.step.loss import LossParts
from moejax.step.model import ModelDef, build_spec, describe_model, layouts_of, parameter_sizes
from moejax.step.optimizer import Optimizer
from moejax.step.outer import build_outer, own_step, site_step, with_sites
from moejax.step.per_device import gradients_of, sum_shares, train_step
from moejax.step.pipeline import forward as staged_forward
from moejax.step.state import Batch, TrainState, Tree, first_sites, sites_at, sites_to_read


@dataclass(frozen=True)
class TrainStep:
    """The compiled functions of a run, and the shardings of their arguments."""

    model: ModelDef
    mesh: Mesh | AbstractMesh
    platform: str  # "cpu", "gpu" or "tpu"
    abstract: TrainState  # shapes, dtypes and shardings of the state
    # The model as the step of one site sees it; `model` without an outer loop.
    site: ModelDef

    @property
    def cfg(self) -> Config:
        """The run's config."""
        return self.model.cfg

    @property
    def spec(self) -> StepSpec:
        """The step's static spec."""
        return self.model.spec

    @property
    def layout(self) -> Layout:
        """The layout of arrays on the mesh."""
        return self.model.layout

    @property
    def dims(self) -> Tree:
        """Letters of the dimensions of each parameter that is trained."""
        return self.model.dims

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of each array of a batch."""
        return NamedSharding(self.mesh, self.layout.token_spec())

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Sequences of a batch, and their length."""
        return self.cfg.train.batch_sequences, self.cfg.data.sequence_length

    def abstract_batch(self, *, training: bool = True) -> Batch:
        """Shapes of one step's batch.

        Args:
          training: False for held-out text, whose experts are not recorded.
        """

        def array(*further: int) -> jax.ShapeDtypeStruct:
            shape = (*self.batch_shape, *further)
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)

        experts = None
        if training and self.cfg.data.source == "routing":
            experts = array(self.cfg.model.expert_layers, self.cfg.moe.experts_per_token)
        return Batch(array(), array(), array(), experts)

    def abstract_prompt(self) -> tuple[jax.ShapeDtypeStruct, int]:
        """Returns the shapes that `next_logits` takes: a sequence on each device, and a length."""
        shape = (self.layout.size(self.layout.row_axes), self.cfg.data.sequence_length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding), 1

    def parameter_sizes(self) -> dict[str, tuple[str, int]]:
        """Returns name -> (letters of the dimensions, elements) of each weight of the model."""
        if self.abstract.frozen is None:
            return parameter_sizes(self.dims, self.abstract.params)
        return parameter_sizes(self.model.frozen_dims, self.abstract.frozen)

    def adapter_sizes(self) -> dict[str, tuple[str, int]]:
        """Returns the same for each adapter's factors; empty if all weights are trained."""
        if self.abstract.frozen is None:
            return {}
        return parameter_sizes(self.dims, self.abstract.params)

    def argument_bytes(self) -> dict[str, int]:
        """Returns the bytes of a step's arguments on one device by kind, without counters.

        "weights" are the trained weights; gradients are as large. With an outer loop these are the
        outer weights, and "outer loop" is what it adds. See `host_bytes` for the rest.
        """
        state, sites = self.abstract, self.abstract.sites
        moments = state.optimizer if sites is None else sites.optimizer
        own = None if sites is None else (sites._replace(optimizer=None), state.momentum)
        return {
            "weights": local_bytes(state.params),
            **({} if state.frozen is None else {"frozen weights": local_bytes(state.frozen)}),
            "optimizer": local_bytes(moments),
            **({} if own is None else {"outer loop": local_bytes(own)}),
            "codec memory": local_bytes(state.reduction),
            "batch": local_bytes(self.abstract_batch()),
        }

    def host_bytes(self) -> int:
        """Returns the bytes of a step's arguments that one device has in its host's memory."""
        return local_bytes(self.abstract, on_host=True)

    def init(self) -> TrainState:
        """Returns the first state, drawn from the seed, each device making its own shards.

        The values depend on the seed alone, not on the mesh. A run with adapters has its frozen
        weights from elsewhere: see `first_state`.
        """

        def build() -> TrainState:
            weights, router_bias = self.model.init()
            if (like := self.abstract.sites) is not None:
                first = self._first(weights)
                sites = first_sites(like, weights, router_bias, first.optimizer)
                momentum = jax.tree.map(jnp.zeros_like, weights)
                more = {"router_bias": router_bias, "sites": sites, "momentum": momentum}
                return first._replace(optimizer=(), **more)
            if self.abstract.frozen is None:
                return self._first(weights)._replace(router_bias=router_bias)
            frozen = jax.tree.map(lambda x, a: x.astype(a.dtype), weights, self.abstract.frozen)
            return self._first(self._adapters())._replace(router_bias=router_bias, frozen=frozen)

        return self._build(build, self.abstract)

    def first_state(self, frozen: Tree, router_bias: Tree) -> TrainState:
        """Returns the first state of a run with adapters on these weights: adapters are drawn."""
        trained = self.abstract._replace(frozen=None, router_bias=None)
        state = self._build(lambda: self._first(self._adapters()), trained)
        return state._replace(frozen=frozen, router_bias=router_bias)

    def _first(self, params: Tree) -> TrainState:
        """The state before the first step, without frozen weights and selection biases."""
        zero, moments = jnp.zeros((), jnp.int32), self._optimizer.init(params)
        load = self.abstract.load_LE
        load_LE = None if load is None else jnp.zeros(load.shape, load.dtype)
        reduction = self._empty_reduction()
        return TrainState(zero, zero, params, None, moments, reduction, load_LE=load_LE)

    @property
    def num_sites(self) -> int:
        """Number of sites of an outer loop in this program."""
        return self.layout.size(self.site.layout.sites)

    def of_sites(self, count: int) -> TrainState:
        """Returns the abstract state that this run reads of a checkpoint of so many sites."""
        like = self.abstract.sites
        assert like is not None, "the run has an outer loop"
        return self.abstract._replace(sites=sites_to_read(like, count, self.site.layout.sites))

    def at_sites(self, state: TrainState) -> TrainState:
        """Returns the state with its weights at every site, and the mean of the sites' moments.

        Without an outer loop it is returned as it is.
        """
        like, sites = self.abstract.sites, state.sites
        if like is None or sites is None:
            return state
        jax.tree.map(lambda x: x.delete(), sites._replace(optimizer=None))
        begin = jax.jit(partial(sites_at, like), out_shardings=_shardings(like))
        return state._replace(sites=begin(state.params, state.router_bias, sites.optimizer))

    def _adapters(self) -> Tree:
        return init_adapters(self.cfg.train.seed, self.dims, self.abstract.params)

    def _build(self, build: Callable[[], TrainState], abstract: TrainState) -> TrainState:
        # Runs once, so low optimization on CPU saves seconds of compilation.
        quick = {"xla_backend_optimization_level": 0} if self.platform == "cpu" else None
        found, tree = jax.tree_util.tree_flatten_with_path(abstract)
        shapes = [shape for _, shape in found]

        def made(indices: list[int]) -> dict[int, jax.Array]:
            def some() -> dict[int, jax.Array]:
                leaves = jax.tree.leaves(build())
                return {index: leaves[index] for index in indices}

            shardings = {index: shapes[index].sharding for index in indices}
            return jax.jit(some, out_shardings=shardings, compiler_options=quick)()

        arrays = made([index for index, shape in enumerate(shapes) if not is_on_host(shape)])
        # A device may not hold all that is on its host: moments, which begin as zeros, never are
        # on it, and weights one at a time.
        for index, (path, shape) in enumerate(found):
            if is_on_host(shape):
                zero = path[0] == jax.tree_util.GetAttrKey("optimizer")
                arrays |= {index: zeros_on_host(shape)} if zero else made([index])
        return jax.tree.unflatten(tree, [arrays[index] for index in range(len(shapes))])

    def at(self, codecs: Codecs) -> "TrainStep":
        """Returns the same run with other codecs, for the same state."""
        return self if codecs == self.spec.codecs else self._built(self.cfg, codecs)

    def _built(self, cfg: Config, codecs: Codecs) -> "TrainStep":
        return build_step(
            cfg,
            self.mesh,
            self.platform,
            codecs,
            stacked=self.spec.stacked,
            gathered=self.layout.gathered,
            tables=self.spec.tables,
            rounds=self.spec.rounds,
            documents=self.spec.documents,
        )

    @cached_property
    def plain(self) -> "TrainStep":
        """The same run without codecs and without forced routing, for evaluation."""
        if self.cfg.moe.router.forced == "none":
            return self.at(NO_CODECS)
        return self._built(by_scores(self.cfg), NO_CODECS)

    def of_weights(self, dtype: str | None = None) -> "TrainStep":
        """Returns the same functions for a state of weights alone, which is enough to evaluate.

        Args:
          dtype: dtype of trained matrices; None: as in training.
        """
        gone = {"optimizer": (), "sites": None, "momentum": None}
        weights = self.abstract._replace(reduction=None, load_LE=None, **gone)
        if dtype is not None and weights.frozen is None:
            weights = weights._replace(params=matrices_in(dtype, self.dims, weights.params))
        return replace(self, abstract=weights)

    def first_reduction(self) -> Tree:
        """Returns the first state of gradient codecs: zeros."""
        shardings = _shardings(self.abstract.reduction)
        return jax.jit(self._empty_reduction, out_shardings=shardings)()

    def _empty_reduction(self) -> Tree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.abstract.reduction)

    @cached_property
    def step(self) -> Any:
        """The jitted step: (state, batch) -> (state, metrics). Donates the state."""
        body = partial(train_step, self.model, self._optimizer)
        if self.abstract.sites is not None:
            optimizer = _build_optimizer(self.site)
            body = partial(own_step, self.site, optimizer)
            if self.cfg.outer.hub is None:
                body = partial(site_step, self.site, optimizer, build_outer(self.cfg, self.site))
        return self._jitted(body, (self._state_specs, P()), donate_argnums=0)

    @cached_property
    def gradients(self) -> Any:
        """The jitted (state, batch) -> (gradients, loss parts); gradients shard like parameters."""
        return self._jitted(self.gradients_of_device, (self._state_specs.params, P()))

    def gradients_of_device(self, state: TrainState, batch: Batch) -> tuple[Tree, LossParts]:
        """The per-device code of `gradients`, for use inside a shard_map with the mesh's axes."""
        gradients, parts, _ = gradients_of(self.model, state, batch)
        parts = sum_shares(parts, [], self.layout)[0]
        return gradients, parts._replace(needed_LEQ=None)  # of one device, and large

    @cached_property
    def evaluate(self) -> Any:
        """The jitted (state, batch) -> summed nats over the batch's valid targets; no codecs."""
        return self._jitted(partial(self._forward.sum_over_targets, self.plain.model), P())

    @cached_property
    def target_nll(self) -> Any:
        """The jitted (state, batch) -> nll_BT, nats of each target of the batch; no codecs."""
        return self._jitted(partial(self._forward.nll_of_targets, self.plain.model), P())

    @cached_property
    def next_logits(self) -> Any:
        """The jitted (state, (token_BT, length)) -> logits_BV after the first `length` tokens."""
        model, tokens = self.plain.model, self.layout.token_spec()

        def body(state: TrainState, prompt: tuple[jax.Array, jax.Array]) -> jax.Array:
            return self._forward.logits_after(model, state, *prompt)

        return self._jitted(body, tokens, (tokens, P()))

    @cached_property
    def options(self) -> Options:
        """Compiler options; empty if the step is only traced."""
        if not isinstance(self.mesh, Mesh):
            return {}
        # Of several micro-batches only the last sums over copies.
        once = self.cfg.train.micro_batches == 1
        options = compiler_options(
            self.platform,
            hops=len(self.spec.route.hops),
            reduction_hops=reduction_hops("DHC", self.site.layout) if once else 1,
            stages=self.layout.size(self.layout.stage),
            ring=self.spec.context_exchange == "ring",
        )
        return known_options(options, self.mesh.local_devices[0])

    @property
    def _forward(self) -> Any:
        """The module with the forward pass of this layout."""
        return staged_forward if self.layout.stage else forward

    @property
    def _optimizer(self) -> Optimizer:
        return _build_optimizer(self.model)

    @property
    def _state_specs(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding.spec, self.abstract)

    def _jitted(self, body: Any, out_specs: Any, batch: Any = None, **options: Any) -> Any:
        """Maps per-device code over the mesh: (state, batch) -> results sharded by `out_specs`."""
        in_specs = (self._state_specs, batch or self.layout.token_spec())
        # Stages have collectives of several axes under way at a time. On CPU, devices that start
        # them in different orders wait for each other for ever.
        ordered = self.platform == "cpu" and bool(self.layout.stage)
        mapped = gloo.shard_map(body, self.mesh, in_specs, out_specs, ordered=ordered)
        return jax.jit(mapped, compiler_options=self.options or None, **options)


def by_scores(cfg: Config) -> Config:
    """Returns the config with experts that scores choose: `moe.router.forced` is off."""
    return change(cfg, {"moe.router.forced": "none"})


def build_step(
    cfg: Config,
    mesh: Mesh | AbstractMesh,
    platform: str,
    codecs: Codecs | None = None,
    *,
    stacked: bool = True,
    gathered: bool = False,
    rounds: bool = True,
    documents: float = 1.0,
    tables: bool = False,
) -> TrainStep:
    """Describes a run's compiled functions on a mesh; allocates nothing.

    Args:
      mesh: an AbstractMesh is enough to trace the step.
      platform: "cpu", "gpu" or "tpu"; decides the kernels, together with the devices.
      codecs: codecs of its steps; by default those of the first step.
      stacked: whether the repeats of a layer group share arrays, as in a checkpoint.
      gathered: as in `Layout`; for functions without gradients.
      rounds: as in `StepSpec`.
      documents: as in `StepSpec`.
      tables: as in `StepSpec`; for functions without gradients.
    """
    form = {"stacked": stacked, "gathered": gathered, "rounds": rounds, "documents": documents}
    spec = build_spec(cfg, mesh, platform, codecs, tables=tables, **form)
    model, weights, router_bias = describe_model(cfg, spec)
    site = model
    if cfg.outer.every is not None and cfg.outer.hub is None:
        site, _, _ = describe_model(cfg, replace(spec, layout=spec.layout.site))
    shapes, specs = _describe_state(site, weights, router_bias)
    if cfg.outer.every is not None:
        shapes, specs = with_sites(site, shapes, specs)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
        shapes,
        specs,
    )
    return TrainStep(model, mesh, platform, _placed(model, abstract), site)


def _placed(model: ModelDef, state: TrainState) -> TrainState:
    """Returns the state with the arrays in the host's memory that the config says."""

    def place(x: jax.ShapeDtypeStruct, host: bool) -> jax.ShapeDtypeStruct:
        return x.update(sharding=on_host(x.sharding)) if host else x

    def experts(weights: Tree, dims: Tree) -> Tree:
        if model.cfg.memory.experts == "device":
            return weights
        return jax.tree.map(lambda x, d: place(x, d[0] == "E" and is_product(d)), weights, dims)

    if state.sites is not None:  # `checks.mesh` refuses the host's memory
        return state
    moments = _build_optimizer(model).on_host(state.params, state.optimizer)
    state = state._replace(optimizer=jax.tree.map(place, state.optimizer, moments))
    if state.frozen is None:
        return state._replace(params=experts(state.params, model.dims))
    return state._replace(frozen=experts(state.frozen, model.frozen_dims))


def _describe_state(
    model: ModelDef, weights: Tree, router_bias: Tree
) -> tuple[TrainState, TrainState]:
    dims = model.dims
    params, frozen = weights, None
    if model.frozen_dims is not None:
        params = adapter_shapes(model.cfg.lora, dims, model.frozen_dims, weights)
        frozen = matrices_in(model.cfg.lora.base_dtype, model.frozen_dims, weights)
    optimizer, scalar = _build_optimizer(model), jax.ShapeDtypeStruct((), jnp.int32)
    moments = jax.eval_shape(optimizer.init, params)
    residuals = jax.tree.map(partial(residual_shapes, model.spec), params, dims, model.layouts)
    load, moe = None, model.cfg.moe
    if moe.slots and moe.slots_from == "last":
        layers = sum(len(bias.shape) and bias.shape[0] for bias in jax.tree.leaves(router_bias))
        load = jax.ShapeDtypeStruct((layers, moe.num_experts), jnp.int32)
    shapes = TrainState(scalar, scalar, params, router_bias, moments, residuals, frozen, load)

    def sharded(params: Tree, dims: Tree) -> Tree:
        layouts = layouts_of(params, model.cfg, model.spec)
        return jax.tree.map(lambda x, d, own: own.param_spec(d, x.ndim), params, dims, layouts)

    param_specs = sharded(params, dims)
    specs = TrainState(
        step=P(),
        skipped=P(),
        params=param_specs,
        router_bias=jax.tree.map(
            lambda own: P(own.stacked) if own.stacked else P(),
            layouts_of(router_bias, model.cfg, model.spec),
        ),
        optimizer=optimizer.specs(params, moments, param_specs),
        reduction=residual_specs(residuals, params, dims, model.layouts),
        frozen=sharded(frozen, model.frozen_dims),
        load_LE=None if load is None else P(),
    )
    return shapes, specs


def _build_optimizer(model: ModelDef) -> Optimizer:
    cfg, host = model.cfg, model.cfg.memory.optimizer == "host"
    return Optimizer(cfg.optimizer, model.dims, model.layouts, cfg.train.num_steps, host)


def _shardings(abstract: Tree) -> Tree:
    return jax.tree.map(lambda x: x.sharding, abstract)


def local_bytes(tree: Any, *, on_host: bool = False) -> int:
    """Bytes of one device's shards of abstract arrays, in its memory or in its host's."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if is_on_host(x) == on_host
    )
