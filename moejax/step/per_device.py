"""The per-device code of a train step: loss, gradients, codec state, update.

Runs inside the shard_map of the training mesh. Each device computes its share of the loss; the sum
over devices is the loss. `comm.wire` explains the transposes of collectives under this rule.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moejax.comm import context, wire
from moejax.comm.host import add as add_arrays
from moejax.comm.weights.gather import empty_totals, gather_once
from moejax.comm.weights.residuals import attach_residuals, detach_residuals
from moejax.comm.weights.shard import attach
from moejax.config.schema import Config
from moejax.layout.layout import Layout
from moejax.model.ahead import targets_ahead
from moejax.moe.router import Noise
from moejax.step.balance import move_biases, moves_bias
from moejax.step.forward import split_micro_batches
from moejax.step.full_batch import (
    NumTargets,
    count_own_targets,
    count_targets,
    noise_key,
    reduce_replicated_gradients,
)
from moejax.step.loss import AheadTargets, LossParts, next_token_loss
from moejax.step.model import ModelDef
from moejax.step.optimizer import Optimizer, square_share
from moejax.step.pipeline import ticks
from moejax.step.state import Batch, Metrics, TrainState, Tree


def train_step(
    model: ModelDef, optimizer: Optimizer, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Runs one optimizer step. An update that is not finite is counted and not applied."""
    layout = model.layout
    gradients, loss_parts, reduction = gradients_of(model, state, batch)
    with jax.named_scope("update"):
        squares = square_share(gradients, model.dims, model.layouts)
        shares = [squares, *count_own_targets(model, batch)]
        loss_parts, (squares, *targets) = sum_shares(loss_parts, shares, layout)
        norm = jnp.sqrt(squares)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss_parts.nll)
        if loss_parts.ahead is not None:
            finite &= jnp.isfinite(loss_parts.ahead)
        params, moments = optimizer.update(
            gradients, state.optimizer, state.params, norm=norm, finite=finite
        )
    router_bias = state.router_bias
    if moves_bias(model.cfg.moe.router):
        router_bias = move_biases(model, router_bias, loss_parts)
    load_LE = None if state.load_LE is None else loss_parts.load_LE
    router_bias, reduction, load_LE = jax.tree.map(
        partial(jnp.where, finite),
        (router_bias, reduction, load_LE),
        (state.router_bias, state.reduction, state.load_LE),
    )
    skipped = state.skipped + jnp.where(finite, 0, 1)
    state = TrainState(
        state.step + 1, skipped, params, router_bias, moments, reduction, state.frozen, load_LE
    )
    return state, Metrics(
        loss=loss_parts.nll,
        balance=loss_parts.balance,
        router_entropy=loss_parts.entropy,
        load_LE=loss_parts.load_LE,
        uneven_L3=loss_parts.uneven_L3,
        gradient_norm=norm,
        skipped=skipped,
        ahead=loss_parts.ahead,
        has_targets=jnp.stack(targets) > 0,
        replayed_L2=loss_parts.replayed_L2,
    )


def sum_shares(
    loss_parts: LossParts, others: list[jax.Array], layout: Layout
) -> tuple[LossParts, list[jax.Array]]:
    """Sums the loss's shares and other scalars over all devices. Wire: one sum."""
    ahead = [] if loss_parts.ahead is None else [loss_parts.ahead]
    shares = jnp.stack([loss_parts.nll, loss_parts.balance, loss_parts.entropy, *others, *ahead])
    nll, balance, entropy, *sums = wire.all_reduce(shares, layout.mesh_axes)
    if ahead:
        loss_parts = loss_parts._replace(ahead=sums.pop())
    return loss_parts._replace(nll=nll, balance=balance, entropy=entropy), sums


def gradients_of(model: ModelDef, state: TrainState, batch: Batch) -> tuple[Tree, LossParts, Tree]:
    """Returns gradients, loss parts and codec state, with or without pipeline stages."""
    of = ticks.loss_gradients if model.layout.stage else loss_gradients
    return of(model, state, batch)


def loss_gradients(
    model: ModelDef, state: TrainState, batch: Batch
) -> tuple[Tree, LossParts, Tree]:
    """Returns gradients of the full batch, the loss's parts, and the new codec state.

    `nll`, `balance` and `entropy` are this device's shares. The caller sums them over devices.
    """
    micro_batches = model.cfg.train.micro_batches
    if state.frozen is None:
        gathered = gather_once(state.params, model.dims, model.spec)
    else:
        gathered = gather_once(state.frozen, model.frozen_dims, model.spec)
    loss = partial(_loss_of, model, state, count_targets(model, batch), gathered)
    params = attach_residuals(state.params, state.reduction, model.dims, state.step)
    if micro_batches == 1:
        gradients, loss_parts = jax.grad(loss, has_aux=True)(params, 0, batch)
    else:
        split_batch = split_micro_batches(batch, micro_batches)
        totals, earlier = _add_up(model, state, loss, split_batch)
        last = jax.tree.map(lambda x: x[-1], split_batch)
        # Else the last's forward may run first, and its residuals stay while the others run.
        totals, last = jax.lax.optimization_barrier((totals, last))

        def last_loss(params: Tree) -> tuple[jax.Array, LossParts]:
            return loss(attach(params, totals=totals), micro_batches - 1, last)

        gradients, loss_parts = jax.grad(last_loss, has_aux=True)(params)
        loss_parts = jax.tree.map(jnp.add, earlier, loss_parts)
    gradients, residuals = detach_residuals(gradients, model.dims)
    gradients = reduce_replicated_gradients(model, gradients)
    return gradients, loss_parts, residuals


def _add_up(
    model: ModelDef, state: TrainState, loss: Callable[..., Any], split_batch: Batch
) -> tuple[Tree, LossParts]:
    """Adds up gradients and loss of all micro-batches but the last.

    Gradients cross copies of a shard in the last micro-batch alone: see `Shard.total`.

    Args:
      loss: function of (parameters as `Shard`s, micro-batch, rows).
    """

    def add(carried: Any, scanned: Any) -> tuple[Any, None]:
        totals, earlier = carried
        index, rows = scanned

        def own_loss(totals: Tree) -> tuple[jax.Array, LossParts]:
            return loss(attach(state.params, totals=totals, last=False), index, rows)

        own = jax.grad(own_loss, has_aux=True)(totals)
        return jax.tree.map(add_arrays, (totals, earlier), own), None

    rest = jax.tree.map(lambda x: x[:-1], split_batch)
    indices = jnp.arange(model.cfg.train.micro_batches - 1)
    totals = empty_totals(state.params, model.dims, model.spec)
    none = _no_parts(state, model.cfg, recorded=rest.expert_BTLK is not None)
    (totals, earlier), _ = jax.lax.scan(add, (totals, none), (indices, rest))
    return totals, earlier


def _no_parts(state: TrainState, cfg: Config, *, recorded: bool) -> LossParts:
    """Zeros to which the parts of micro-batches' losses are added.

    Args:
      recorded: whether experts are.
    """
    biases = jax.tree.leaves(state.router_bias)  # [L, E] of each layer group with experts
    L, E = sum(map(len, biases)), biases[0].shape[1] if biases else 1
    zero = jnp.zeros((), jnp.float32)
    load_LE, uneven_L3 = jnp.zeros((L, E), jnp.int32), jnp.zeros((L, 3), jnp.int32)
    ahead, bins = zero if cfg.model.predict_ahead else None, cfg.moe.router.quantile_bins
    needed_LEQ = None if bins is None else jnp.zeros((L, E, bins), jnp.int32)
    replayed_L2 = jnp.zeros((L, 2), jnp.int32) if recorded else None
    return LossParts(zero, zero, zero, load_LE, uneven_L3, ahead, needed_LEQ, replayed_L2)


def _loss_of(
    model: ModelDef,
    state: TrainState,
    num_targets: NumTargets,
    gathered: Tree,
    params: Tree,
    index: Any,
    rows: Batch,
) -> tuple[jax.Array, LossParts]:
    """Returns this device's share of a micro-batch's loss, and its parts.

    Args:
      gathered: `Shard.gathered` of each weight, or None.
      params: `Shard`s, with residuals and totals.
      index: the micro-batch, counted from zero.
    """
    cfg, num_rows, frozen, ahead = model.cfg, len(rows.token_BT), state.frozen, None
    # Global index of this micro-batch's first row on this device.
    first_row = (wire.index(model.layout.row_axes) * cfg.train.micro_batches + index) * num_rows
    noise = None
    if cfg.moe.router.jitter:
        position_T = context.positions(cfg.data.sequence_length, model.layout)
        noise = Noise(noise_key(model, state), first_row, position_T)
    if frozen is None:
        params = attach(params, gathered=gathered)
    else:
        frozen = attach(frozen, gathered=gathered)
    arrays = state.router_bias, frozen, rows.expert_BTLK, state.load_LE
    transformer = model.merge(params, *arrays)
    if num_targets.ahead is None:
        x_BTD, w_Dv, stats = transformer(rows.token_BT, rows.segment_BT, noise)
    else:
        found = transformer.look_ahead(rows.token_BT, rows.segment_BT, noise)
        x_BTD, w_Dv, stats, ahead_BTD = found
        target_BT = context.own(targets_ahead(rows.target_BT, rows.segment_BT), model.layout)
        coefficient = cfg.train.predict_ahead_loss
        ahead = AheadTargets(ahead_BTD, target_BT, num_targets.ahead, coefficient)
    with jax.named_scope("loss"):
        return next_token_loss(
            x_BTD,
            w_Dv,
            context.own(rows.target_BT, model.layout),
            stats,
            moe=cfg.moe,
            num_targets=num_targets.next,
            micro_batches=cfg.train.micro_batches,
            layout=model.layout,
            **{"chunk_tokens": model.chunk_tokens, "cap": cfg.model.logit_cap},
            ahead=ahead,
        )
