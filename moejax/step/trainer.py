"""The train step: loss, gradients, reduction and update as one `jax.shard_map` over the whole mesh.

Everything inside is per-device code. The loss of a device is its share, so that the sum over all
devices is the loss; see `comm.wire` for what that makes of the collectives' transposes.
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm import gloo, wire
from moejax.comm.codecs.adaptive import choose
from moejax.comm.codecs.build import build_codec
from moejax.comm.codecs.codec import EncodeContext
from moejax.comm.weights.reduce import reduce_whole
from moejax.comm.weights.residuals import attach_residuals, detach_residuals
from moejax.comm.weights.states import sum_energies
from moejax.config.compression import GRADIENTS, NO_CODECS, Codecs
from moejax.config.schema import Config
from moejax.layout.layout import Layout
from moejax.layout.spec import Program
from moejax.moe.router import Noise, update_bias
from moejax.runtime.compiler import Options, compiler_options, known_options
from moejax.step.describe import (
    build_model,
    build_optimizer,
    build_program,
    describe,
    split_model,
)
from moejax.step.forward import cut, logits_after, sum_over_targets
from moejax.step.loss import LossParts, next_token_loss
from moejax.step.optimizer import Optimizer, square_share
from moejax.step.state import Batch, Metrics, Reduction, TrainState, Tree


@dataclass(frozen=True)
class Trainer:
    """The compiled functions of a run and the shardings of what they take."""

    cfg: Config
    mesh: Mesh | AbstractMesh
    program: Program
    platform: str  # "cpu", "gpu" or "tpu"
    graph: nnx.GraphDef
    dims: Tree  # letters of each parameter's dimensions
    abstract: TrainState  # shapes, dtypes and shardings of the state

    @property
    def layout(self) -> Layout:
        """Where arrays live."""
        return self.program.layout

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits exist at one time."""
        vocabulary = self.cfg.model.vocab_size // self.layout.size(self.layout.tensor)
        return max(1, self.program.logit_elements // vocabulary)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of each array of a batch."""
        return NamedSharding(self.mesh, self.layout.token_spec())

    def abstract_batch(self) -> Batch:
        """Shapes of one step's batch."""
        shape = (self.cfg.train.batch_sequences, self.cfg.data.sequence_length)
        array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        return Batch(array, array, array)

    def abstract_prompt(self) -> tuple[jax.ShapeDtypeStruct, int]:
        """Shapes of what `next_logits` takes: one sequence on each device, and a length."""
        shape = (self.layout.size(self.layout.token_axes), self.cfg.data.sequence_length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding), 1

    def parameter_sizes(self) -> dict[str, tuple[str, int]]:
        """Path -> (letters of the dimensions, elements) of each parameter."""
        leaves = jax.tree_util.tree_flatten_with_path(self.abstract.params)[0]
        letters = jax.tree.leaves(self.dims)
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): (dims, math.prod(x.shape))
            for (path, x), dims in zip(leaves, letters, strict=True)
        }

    def given_bytes(self) -> dict[str, int]:
        """Bytes of one device of what a step is given, by kind; its counters are left out."""
        state = self.abstract
        return {
            "weights": _local_bytes(state.params),
            "optimizer": _local_bytes(state.optimizer),
            "codec memory": _local_bytes(state.reduction),
            "batch": _local_bytes(self.abstract_batch()),
        }

    def init(self) -> TrainState:
        """Returns the first state, drawn from the seed, each device making its own shards.

        The values depend on the seed alone, not on the mesh.
        """
        optimizer = build_optimizer(self.cfg, self.dims, self.layout)

        def build() -> TrainState:
            params, balance = split_model(build_model(self.cfg, self.program))[1:]
            zero = jnp.zeros((), jnp.int32)
            moments = optimizer.init(params)
            return TrainState(zero, zero, params, balance, moments, self._empty_reduction())

        # Runs once, so on CPU it asks LLVM for little: seconds of compilation saved.
        quick = {"xla_backend_optimization_level": 0} if self.platform == "cpu" else None
        return jax.jit(build, out_shardings=_shardings(self.abstract), compiler_options=quick)()

    def at(self, codecs: Codecs) -> "Trainer":
        """The trainer of steps with these codecs; the same state fits."""
        if codecs == self.program.codecs:
            return self
        return build_trainer(self.cfg, self.mesh, self.platform, codecs)

    @cached_property
    def plain(self) -> "Trainer":
        """The trainer without codecs: what is held out is not measured through them."""
        return self.at(NO_CODECS)

    def first_reduction(self) -> Reduction:
        """What codecs of gradients remember at first: nothing."""
        shardings = _shardings(self.abstract.reduction)
        return jax.jit(self._empty_reduction, out_shardings=shardings)()

    def _empty_reduction(self) -> Reduction:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.abstract.reduction)

    @cached_property
    def step(self) -> Any:
        """The jitted step: (state, batch) -> (state, metrics). Takes the state's memory over."""
        body = partial(_train_step, self, build_optimizer(self.cfg, self.dims, self.layout))
        return self._jitted(body, (self._state_specs, P()), donate_argnums=0)

    @cached_property
    def gradients(self) -> Any:
        """The jitted (state, batch) -> (gradients, loss parts); gradients shard like parameters."""
        return self._jitted(self.gradients_of_device, (self._state_specs.params, P()))

    def gradients_of_device(self, state: TrainState, batch: Batch) -> tuple[Tree, LossParts]:
        """The per-device code of `gradients`, for use inside a shard_map with the mesh's axes."""
        gradients, report, _ = _gradients(self, state, batch)
        shares = jnp.stack([report.nll, report.balance])
        nll, balance = wire.all_reduce(shares, self.layout.mesh_axes)
        return gradients, report._replace(nll=nll, balance=balance)

    @cached_property
    def evaluate(self) -> Any:
        """The jitted (state, batch) -> summed nats over the batch's valid targets; no codecs."""
        body = partial(
            sum_over_targets,
            self.plain.graph,
            self.layout,
            micro_batches=self.cfg.train.micro_batches,
            chunk_tokens=self.chunk_tokens,
        )
        return self._jitted(body, P())

    @cached_property
    def next_logits(self) -> Any:
        """The jitted (state, (token_BT, length)) -> logits_BV after the first `length` tokens."""
        graph, layout, tokens = self.plain.graph, self.layout, self.layout.token_spec()

        def body(state: TrainState, prompt: tuple[jax.Array, jax.Array]) -> jax.Array:
            return logits_after(graph, layout, state, *prompt)

        return self._jitted(body, tokens, (tokens, P()))

    @cached_property
    def options(self) -> Options:
        """What is asked of the compiler; nothing where the program is only traced."""
        options = compiler_options(self.platform, hops=len(self.program.route.hops))
        if not isinstance(self.mesh, Mesh):
            return {}
        return known_options(options, self.mesh.local_devices[0])

    @property
    def _state_specs(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding.spec, self.abstract)

    def _jitted(self, body: Any, out_specs: Any, batch: Any = None, **options: Any) -> Any:
        """Maps per-device code over the mesh: (state, batch) -> results laid out by `out_specs`."""
        in_specs = (self._state_specs, batch or self.layout.token_spec())
        mapped = gloo.shard_map(body, self.mesh, in_specs, out_specs)
        return jax.jit(mapped, compiler_options=self.options or None, **options)


def build_trainer(
    cfg: Config, mesh: Mesh | AbstractMesh, platform: str, codecs: Codecs | None = None
) -> Trainer:
    """Describes the run on a mesh; allocates nothing.

    Args:
      mesh: an AbstractMesh is enough to trace the step.
      platform: "cpu", "gpu" or "tpu", which chooses kernels, with what the devices are.
      codecs: of the steps it is for; those of the first step unless given.
    """
    program = build_program(cfg, mesh, platform, codecs)
    model = nnx.eval_shape(lambda: build_model(cfg, program))
    graph, params, balance = split_model(model)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    dims = nnx.to_pure_dict(
        nnx.from_flat_state([(path, v.replace(v.get_metadata("dims"))) for path, v in flat])
    )
    abstract, specs = describe(cfg, program, params, balance, dims)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
        abstract,
        specs,
    )
    return Trainer(cfg, mesh, program, platform, graph, dims, abstract)


def _shardings(abstract: Tree) -> Tree:
    return jax.tree.map(lambda x: x.sharding, abstract)


def _loss(
    trainer: Trainer, params: Tree, balance: Tree, batch: Batch, num_targets: Any, noise: Noise
) -> tuple[jax.Array, LossParts]:
    """This device's share of the loss on its rows."""
    model = nnx.merge(trainer.graph, params, balance)
    heard = noise if trainer.cfg.moe.router.jitter else None
    x_BTD, w_Dv, stats = model(batch.token_BT, batch.segment_BT, heard)
    with jax.named_scope("loss"):
        return next_token_loss(
            x_BTD,
            w_Dv,
            batch.target_BT,
            stats,
            moe=trainer.cfg.moe,
            num_targets=num_targets,
            micro_batches=trainer.cfg.train.micro_batches,
            layout=trainer.layout,
            chunk_tokens=trainer.chunk_tokens,
        )


def _gradients(
    trainer: Trainer, state: TrainState, batch: Batch
) -> tuple[Tree, LossParts, Reduction]:
    """Gradients of the whole batch, the loss's parts (shares of two of them), what codecs remember.

    The shares are left for the caller to add up, who has other things to send with them.
    """
    layout, parts = trainer.layout, trainer.cfg.train.micro_batches
    num_targets = wire.all_reduce(jnp.sum(batch.target_BT >= 0), layout.token_axes)
    num_targets = jnp.maximum(num_targets, 1).astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(trainer.cfg.train.seed), state.step)
    noise_key, rounding_key = jax.random.split(key)

    def micro(part: Any, rows: Batch, codecs: Tree) -> tuple[Tree, Tree, LossParts]:
        context = EncodeContext(state.step, jax.random.fold_in(rounding_key, part), part)
        carried = attach_residuals(state.params, codecs, trainer.dims, context, layout)
        # A part is the next of this device's rows, in order.
        before = wire.index(layout.token_axes) * len(batch.token_BT) + part * len(rows.token_BT)

        def loss(params):
            noise = Noise(noise_key, before)
            return _loss(trainer, params, state.balance, rows, num_targets, noise)

        gradients, report = jax.grad(loss, has_aux=True)(carried)
        return *detach_residuals(gradients, trainer.dims), report

    if parts == 1:
        gradients, codecs, report = micro(0, batch, state.reduction.codecs)
    else:
        cut_batch = cut(batch, parts)
        first = (0, jax.tree.map(lambda x: x[0], cut_batch), state.reduction.codecs)
        shapes = jax.eval_shape(micro, *first)
        zeros = jax.tree.map(jnp.zeros_like, (shapes[0], shapes[2]))

        def add(carried, scanned):
            total, codecs = carried
            part, rows = scanned
            gradients, codecs, report = micro(part, rows, codecs)
            return (jax.tree.map(jnp.add, total, (gradients, report)), codecs), None

        start = (zeros, state.reduction.codecs)
        ((gradients, report), codecs), _ = jax.lax.scan(add, start, (jnp.arange(parts), cut_batch))
    leaves, tree = jax.tree.flatten(gradients)
    whole = [i for i, d in enumerate(jax.tree.leaves(trainer.dims)) if len(d) == 1]
    for i, summed in zip(whole, reduce_whole([leaves[i] for i in whole], layout), strict=True):
        leaves[i] = summed
    return jax.tree.unflatten(tree, leaves), report, _climb(trainer, state.reduction, codecs)


def _climb(trainer: Trainer, before: Reduction, codecs: Tree) -> Reduction:
    """What codecs remember now, and in a step that measures the rungs of the adaptive ones."""
    if before.rungs is None:
        return Reduction(codecs, None)
    rungs = []
    for place, kind in enumerate(GRADIENTS):
        spec = getattr(trainer.program.codecs, kind)
        if spec is None or not spec.measures:
            rungs.append(before.rungs[place])
            continue
        energies = sum_energies(build_codec(spec), codecs, trainer.dims, kind)
        energies = wire.all_reduce(energies, trainer.layout.mesh_axes)
        rungs.append(choose(energies, spec.argument))
    return Reduction(codecs, jnp.stack(rungs))


def _train_step(
    trainer: Trainer, optimizer: Optimizer, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """One optimizer step; an update that is not finite is counted and not applied."""
    layout, rate = trainer.layout, trainer.cfg.moe.router.bias_update_rate
    gradients, report, reduction = _gradients(trainer, state, batch)
    with jax.named_scope("update"):
        squares = square_share(gradients, trainer.dims, layout)
        shares = jnp.stack([report.nll, report.balance, squares])
        nll, balance_loss, squares = wire.all_reduce(shares, layout.mesh_axes)
        norm = jnp.sqrt(squares)
        finite = jnp.isfinite(norm) & jnp.isfinite(nll)
        params, moments = optimizer.update(
            gradients, state.optimizer, state.params, norm=norm, finite=finite
        )
    balance = state.balance
    if rate:
        balance = _update_balance(balance, report.load_LE, rate)
    found, kept = (balance, reduction), (state.balance, state.reduction)
    balance, reduction = jax.tree.map(partial(jnp.where, finite), found, kept)
    skipped = state.skipped + jnp.where(finite, 0, 1)
    state = TrainState(state.step + 1, skipped, params, balance, moments, reduction)
    report = report._replace(nll=nll, balance=balance_loss)
    return state, Metrics(*report, gradient_norm=norm, skipped=skipped)


def _update_balance(balance: Tree, load_LE: jax.Array, rate: float) -> Tree:
    """Moves each layer's selection bias; biases are stacked per layer group, in layer order."""
    leaves, tree = jax.tree.flatten(balance)
    first, moved = 0, []
    for bias_LE in leaves:
        layers = bias_LE.shape[0]
        moved.append(update_bias(bias_LE, load_LE[first : first + layers], rate))
        first += layers
    return jax.tree.unflatten(tree, moved)


def _local_bytes(tree: Any) -> int:
    """Bytes of one device's shards of abstract arrays."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
