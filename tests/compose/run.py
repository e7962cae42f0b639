"""Runs one combination: two steps beside the one-device oracle, and traces for other hardware.

The oracle (`tests.oracle`) takes the loss of each micro-batch, with the rows that the mesh puts
into it. Its gradients follow from JAX's differentiation of it, and its update from the optimizer on
one device. A step's own gradients are read from the first moment, which after one step holds them
clipped and scaled.

A clamped activation or the choice of experts has kinks: where a token stands at one, gradients jump
with the last bit of a weight, the oracle's own too. So a step that is far from the oracle is
compared with the oracle for weights whose last bit differs, and the nearest counts. AdamW has one
where a gradient is next to nothing: it moves such a weight by anything up to a whole step. If the
loss after the update is far from the oracle's, the updates are compared, and then the loss with the
oracle's for the very weights that the step made.
"""

import dataclasses
import functools
import math
import time
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from moejax.comm.weights.adapters import Adapter
from moejax.config.schema import Config, MeshConfig
from moejax.errors import InputError
from moejax.moe.router import update_bias
from moejax.plan.price.candidate import trace_config
from moejax.step.state import Batch
from moejax.step.train_step import TrainStep
from tests.cases import place, random_batch, spread, step_for
from tests.compose import choices
from tests.compose.features import Combination, check_combination, enlarged, is_rounded
from tests.oracle import Noise, oracle_loss

PLATFORMS = ("gpu", "tpu")
FAR = 2e-5  # relative difference above which a kink is looked for
BITS = 30  # how often the oracle takes other last bits, at most
UPDATES = 0.02  # norm of the difference of two updates over that of one: a few weights at a kink


@dataclass(frozen=True)
class Outcome:
    """What a combination came to.

    Attributes:
      loss: difference of the first loss from the oracle's, over it.
      gradient: norm of the difference of all gradients over that of the oracle's.
      leaf: the largest difference of an array of gradients, over its largest value, and its name.
      second: difference of the loss after an update, over it.
      bias: the largest difference of a selection bias after an update.
      moved: whether it was right only beside a kink.
      traced: platform -> "traced", or the line that refuses it.
      error: what went wrong; empty if nothing did.
    """

    loss: float = math.nan
    gradient: float = math.nan
    leaf: tuple[float, str] = (math.nan, "")
    second: float = math.nan
    bias: float = math.nan
    moved: bool = False
    traced: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    refused: str = ""
    error: str = ""


def run(combination: Combination) -> Outcome:
    """Returns what a combination came to; never raises."""
    began = time.perf_counter()
    try:
        cfg = check_combination(combination)
        outcome = _compared(cfg, rounds=is_rounded(combination))
        outcome = dataclasses.replace(outcome, traced=trace(combination))
    except InputError as error:
        outcome = Outcome(refused=str(error))
    except Exception as error:  # a page says which combination broke, and how
        outcome = Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0][:300])
    return dataclasses.replace(outcome, seconds=time.perf_counter() - began)


def trace(combination: Combination) -> dict[str, str]:
    """Traces the step in sizes for kernels, for hardware that is not here."""
    found, cfg = {}, enlarged(check_combination(combination))
    for platform in PLATFORMS:
        try:
            trace_config(cfg, platform)
            found[platform] = "traced"
        except InputError as error:
            found[platform] = str(error)
    return found


def _compared(cfg: Config, *, rounds: bool) -> Outcome:
    """Trains two steps beside the oracle, to whose last bits a step that rounds is not held."""
    train_step, oracle = step_for(cfg), Oracle(cfg)
    state, given = oracle.state, random_batch(cfg)
    if cfg.data.source == "routing":
        given = choices.recorded(cfg, given)
    batch, replicated = given, train_step.spec.route.replicated
    if cfg.moe.router.forced != "none":
        batch = choices.in_turn(cfg, given, replicated=replicated)
    wanted = oracle.step(state, batch)
    after = oracle.step(wanted.state, batch)
    # What codecs of gradients have not sent yet belongs to a mesh, and a load to copies.
    load_LE = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), train_step.abstract.load_LE)
    start = state._replace(reduction=train_step.first_reduction(), load_LE=load_LE)
    got, first = train_step.step(spread(start, train_step), place(train_step, given))
    gradients = first_gradients(got.optimizer, train_step)
    made = got._replace(reduction=state.reduction, load_LE=None)
    made = jax.tree.map(np.asarray, made)
    _, second = train_step.step(got, place(train_step, given))
    beside = False
    if not rounds and _relative(second.loss, after.loss) > FAR:
        updates = (jax.tree.map(np.subtract, x.params, state.params) for x in (made, wanted.state))
        if _distance(*updates) < UPDATES:
            after, beside = oracle.step(made, batch), True
    nearest = wanted.gradients
    rng = np.random.default_rng(0)
    for _ in range(0 if rounds else BITS):
        if _distance(gradients, nearest) < FAR:
            break
        other = oracle.step(_with_other_bits(state, rng), batch).gradients
        nearest = min((nearest, other), key=lambda one: _distance(gradients, one))
    return Outcome(
        loss=_relative(first.loss, wanted.loss),
        gradient=_distance(gradients, nearest),
        leaf=max(_differences(gradients, nearest)),
        second=_relative(second.loss, after.loss),
        bias=_furthest(made.router_bias, wanted.state.router_bias),
        moved=beside or nearest is not wanted.gradients,
    )


def _with_other_bits(state: Any, rng: np.random.Generator) -> Any:
    """Returns the state with weights that are half a last bit more, less, or the same."""

    def rounded(weight: np.ndarray) -> np.ndarray:
        return (weight * (1 + rng.choice((-6e-8, 0, 6e-8), weight.shape))).astype(weight.dtype)

    return state._replace(
        params=jax.tree.map(rounded, state.params), frozen=jax.tree.map(rounded, state.frozen)
    )


def _distance(got: Any, wanted: Any) -> float:
    """Norm of the difference of two trees, over that of the second."""
    return _norm(jax.tree.map(np.subtract, got, wanted)) / _norm(wanted)


@dataclass(frozen=True)
class OracleStep:
    """A step of the oracle: mean nats, clipped gradients, and the state after it."""

    loss: float
    gradients: Any
    state: Any


class Oracle:
    """The train step on one device, from plain jax.numpy."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        train = dataclasses.replace(cfg.train, micro_batches=1)
        plain = {"route": "split", "route_chunks": 1, "route_chunks_backward": None}
        moe = dataclasses.replace(cfg.moe, capacity_factor=None, slots=0, slots_from="now")
        one = dataclasses.replace(
            cfg,
            **plain,
            mesh=MeshConfig(),
            moe=moe,
            train=train,
            route_trim=False,
            compression=type(cfg.compression)(),
            model=dataclasses.replace(cfg.model, dtype="float32"),
        )
        self.one: TrainStep = step_for(one)
        self.state = jax.tree.map(np.asarray, self.one.init())

    def step(self, state: Any, batch: Batch) -> OracleStep:
        """Returns loss, gradients and the next state: a micro-batch after the other."""
        cfg, targets, found, needed = self.cfg, _targets(batch), None, []
        for rows in choices.micro_batch_rows(cfg):
            part = jax.tree.map(itemgetter(rows), batch)
            shares = tuple(own / whole for own, whole in zip(_targets(part), targets, strict=True))
            key = jax.random.fold_in(jax.random.key(cfg.train.seed), state.step)
            one = self._graded(state.params, state, part, shares, jax.random.split(key)[0], rows)
            needed.append(one[0][1].pop("needed"))
            found = one if found is None else jax.tree.map(jnp.add, found, one)
        (_, parts), gradients = found
        norm, limit = _norm(gradients), cfg.optimizer.clip_norm
        params, moments = self._updated(gradients, state, jnp.float32(norm))
        scale = 1.0 if limit is None else min(1.0, limit / norm)
        following = state._replace(
            step=state.step + 1,
            params=params,
            optimizer=moments,
            router_bias=_moved(state.router_bias, parts["load"], needed, cfg),
        )
        clipped = jax.tree.map(lambda g: np.asarray(g) * scale, gradients)
        return OracleStep(float(parts["nll"]), clipped, jax.tree.map(np.asarray, following))

    @functools.cached_property
    def _graded(self) -> Any:
        return jax.jit(jax.value_and_grad(self._loss, has_aux=True))

    @functools.cached_property
    def _updated(self) -> Any:
        """The optimizer on one device: (gradients, state, their norm) -> parameters, moments."""

        def update(gradients: Any, state: Any, norm: Any) -> Any:
            kept = state.optimizer, state.params
            return self.one._optimizer.update(gradients, *kept, norm=norm, finite=jnp.array(True))

        mapped = jax.shard_map(
            update, mesh=self.one.mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        return jax.jit(mapped)

    def _loss(self, params: Any, state: Any, part: Batch, shares: Any, key: Any, rows: Any) -> Any:
        """A micro-batch's part of the loss: targets count alike, router losses are means."""
        cfg = self.cfg
        weights = params if state.frozen is None else self._merged(state.frozen, params)
        noise = Noise(key, rows) if cfg.moe.router.jitter else None
        whole, parts = oracle_loss(weights, state.router_bias, part, cfg, noise)
        ahead = 0.0 if parts.ahead is None else cfg.train.predict_ahead_loss * parts.ahead
        router = (whole - parts.nll - ahead) / cfg.train.micro_batches
        nll = parts.nll * shares[0]
        told = {"nll": nll, "load": parts.load, "needed": parts.needed}
        return nll + ahead * shares[1] + router, told

    def _merged(self, frozen: Any, adapters: Any) -> Any:
        """The weights with their adapters added: a product over the rank, layer by layer."""
        scale = self.cfg.lora.scale
        letters = self.one.model.frozen_dims

        def merged(weight: Any, dims: str, of: str | None, own: Adapter | None) -> Any:
            if own is None:
                return weight
            product = jnp.einsum(f"...{of.a},...{of.b}->...{dims}", own.a, own.b)
            return weight + scale * product

        return jax.tree.map(merged, frozen, letters, self.one.dims, adapters)


def _targets(batch: Batch) -> tuple[int, int]:
    """Numbers of next tokens and of tokens after the next that are predicted."""
    within = batch.segment_BT[:, 1:] == batch.segment_BT[:, :-1]
    ahead = (batch.target_BT[:, 1:] >= 0) & within
    return max(1, int(np.sum(batch.target_BT >= 0))), max(1, int(np.sum(ahead)))


def _moved(router_bias: Any, load_LE: Any, needed: list[Any], cfg: Config) -> Any:
    """Selection biases after a step. A layer group's blocks take turns, as often as it repeats.

    Args:
      needed: of each micro-batch, `Parts.needed`.
    """
    router = cfg.moe.router
    if not router.bias_update_rate and router.quantile_bins is None:
        return router_bias
    moved, layer = jax.tree.map(np.array, router_bias), 0
    groups = [moved["groups"][index] for index in sorted(moved["groups"])]
    for group in [*groups, *([moved["predict_ahead"]] if "predict_ahead" in moved else [])]:
        for rows in zip(*jax.tree.leaves(group), strict=True):
            for bias_E in rows:
                if router.quantile_bins is None:
                    bias_E[:] = update_bias(bias_E, load_LE[layer], router.bias_update_rate)
                else:
                    needed_NE = np.concatenate([one[layer] for one in needed])
                    bias_E[:] = _quantiles(needed_NE, bias_E, cfg)
                layer += 1
    assert layer == len(load_LE)
    return moved


def _quantiles(needed_NE: np.ndarray, bias_E: np.ndarray, cfg: Config) -> np.ndarray:
    """The K / E quantile of the biases that tokens need, of each expert, less their mean.

    From a histogram of asinh(E x), as even inside a bin.
    """
    E, K, bins = cfg.moe.num_experts, cfg.moe.experts_per_token, cfg.moe.router.quantile_bins
    ends = np.arcsinh(E * (np.min(bias_E) - 1.0)), np.arcsinh(E * (np.max(bias_E) + 1.0))
    found = []
    for needed_N in np.arcsinh(E * np.asarray(needed_NE, np.float64)).T:
        counts, edges = np.histogram(needed_N, bins, ends)
        wanted, upto = len(needed_N) * K / E, np.cumsum(counts)
        own = int(np.searchsorted(upto, wanted))
        share = 1 - (upto[own] - wanted) / counts[own]
        found.append(np.sinh(edges[own] + share * (edges[own + 1] - edges[own])) / E)
    return np.array(found) - np.mean(found)


def first_gradients(optimizer: Any, train_step: TrainStep) -> Any:
    """Returns the clipped gradients of the first step, from the moments after it."""
    kept = 1 - train_step.cfg.optimizer.beta1

    def of(state: Any) -> np.ndarray:
        for part in jax.tree.leaves(state, is_leaf=_holds_moment):
            if isinstance(part, optax.ScaleByAdamState):
                return np.asarray(part.mu) / kept
            if isinstance(part, optax.TraceState):
                return np.asarray(part.trace)
        raise ValueError("no first moment")

    structure = jax.tree.structure(train_step.abstract.params)
    states = structure.flatten_up_to(optimizer)
    return jax.tree.unflatten(structure, [of(state) for state in states])


def _holds_moment(part: Any) -> bool:
    return isinstance(part, optax.ScaleByAdamState | optax.TraceState)


def _differences(got: Any, wanted: Any) -> list[tuple[float, str]]:
    found = []
    for (path, want), have in zip(
        jax.tree_util.tree_flatten_with_path(wanted)[0], jax.tree.leaves(got), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        size = max(float(np.max(np.abs(want))), 1e-6)
        found.append((float(np.max(np.abs(np.asarray(have) - want))) / size, name))
    return found


def _furthest(got: Any, wanted: Any) -> float:
    """The largest difference of two trees; 0 if they are empty."""
    pairs = zip(*map(jax.tree.leaves, (got, wanted)), strict=True)
    return max((float(np.max(np.abs(g - w))) for g, w in pairs), default=0.0)


def _relative(got: Any, wanted: float) -> float:
    return abs(float(got) - wanted) / abs(wanted)


def _norm(tree: Any) -> float:
    squares = [np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)]
    return math.sqrt(sum(squares))
