"""The per-device code of a train step: loss, gradients, codec state, update.

Runs inside the shard_map of the training mesh. Each device computes its share of the loss; the sum
over devices is the loss. `comm.wire` explains the transposes of collectives under this rule.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codecs.adaptive import choose_level
from moejax.comm.codecs.build import build_codec
from moejax.comm.codecs.codec import EncodeContext
from moejax.comm.weights.reduce import reduce_whole
from moejax.comm.weights.residuals import attach_residuals, detach_residuals
from moejax.comm.weights.states import sum_squared_errors
from moejax.config.compression import GRADIENTS
from moejax.moe.router import Noise, update_bias
from moejax.step.forward import cut
from moejax.step.loss import LossParts, next_token_loss
from moejax.step.model import ModelDef
from moejax.step.optimizer import Optimizer, square_share
from moejax.step.state import Batch, Metrics, Reduction, TrainState, Tree


def train_step(
    model: ModelDef, optimizer: Optimizer, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Runs one optimizer step. An update that is not finite is counted and not applied."""
    layout, rate = model.layout, model.cfg.moe.router.bias_update_rate
    gradients, parts, reduction = loss_gradients(model, state, batch)
    with jax.named_scope("update"):
        squares = square_share(gradients, model.dims, layout)
        shares = jnp.stack([parts.nll, parts.balance, squares])
        nll, balance, squares = wire.all_reduce(shares, layout.mesh_axes)
        norm = jnp.sqrt(squares)
        finite = jnp.isfinite(norm) & jnp.isfinite(nll)
        params, moments = optimizer.update(
            gradients, state.optimizer, state.params, norm=norm, finite=finite
        )
    router_bias = state.router_bias
    if rate:
        router_bias = _update_router_bias(router_bias, parts.load_LE, rate)
    router_bias, reduction = jax.tree.map(
        partial(jnp.where, finite), (router_bias, reduction), (state.router_bias, state.reduction)
    )
    skipped = state.skipped + jnp.where(finite, 0, 1)
    state = TrainState(
        state.step + 1, skipped, params, router_bias, moments, reduction, state.frozen
    )
    parts = parts._replace(nll=nll, balance=balance)
    return state, Metrics(*parts, gradient_norm=norm, skipped=skipped)


def loss_gradients(
    model: ModelDef, state: TrainState, batch: Batch
) -> tuple[Tree, LossParts, Reduction]:
    """Returns gradients of the whole batch, the loss's parts, and the new codec state.

    Of the loss's parts, `nll` and `balance` are this device's shares: the caller sums them over
    devices together with its other sums.
    """
    num_parts = model.cfg.train.micro_batches
    micro = partial(_micro_batch, model, state, _num_targets(model, batch))
    if num_parts == 1:
        gradients, codecs, parts = micro(0, batch, state.reduction.codecs)
    else:
        cut_batch = cut(batch, num_parts)
        first = (0, jax.tree.map(lambda x: x[0], cut_batch), state.reduction.codecs)
        gradient_shapes, _, part_shapes = jax.eval_shape(micro, *first)
        zeros = jax.tree.map(jnp.zeros_like, (gradient_shapes, part_shapes))

        def add(carried: Any, scanned: Any) -> tuple[Any, None]:
            total, codecs = carried
            part, rows = scanned
            gradients, codecs, parts = micro(part, rows, codecs)
            return (jax.tree.map(jnp.add, total, (gradients, parts)), codecs), None

        start = (zeros, state.reduction.codecs)
        scanned = (jnp.arange(num_parts), cut_batch)
        ((gradients, parts), codecs), _ = jax.lax.scan(add, start, scanned)
    gradients = _reduce_whole(model, gradients)
    return gradients, parts, _choose_levels(model, state.reduction, codecs)


def _num_targets(model: ModelDef, batch: Batch) -> jax.Array:
    """Returns the number of valid targets of the whole batch, at least 1."""
    num_targets = wire.all_reduce(jnp.sum(batch.target_BT >= 0), model.layout.token_axes)
    return jnp.maximum(num_targets, 1).astype(jnp.float32)


def _micro_batch(
    model: ModelDef, state: TrainState, num_targets: jax.Array, part: Any, rows: Batch, codecs: Tree
) -> tuple[Tree, Tree, LossParts]:
    """Returns gradients of one micro-batch, the new codec state, and the loss's parts.

    Args:
      num_targets: valid targets of the whole batch.
      part: index of the micro-batch.
      rows: this device's rows of the micro-batch.
      codecs: codec state after the previous micro-batch.
    """
    layout, cfg = model.layout, model.cfg
    key = jax.random.fold_in(jax.random.key(cfg.train.seed), state.step)
    noise_key, rounding_key = jax.random.split(key)
    context = EncodeContext(state.step, jax.random.fold_in(rounding_key, part), part)
    params = attach_residuals(state.params, codecs, model.dims, context, layout)
    # Global index of this micro-batch's first row on this device.
    device_rows = len(rows.token_BT) * cfg.train.micro_batches
    first_row = wire.index(layout.token_axes) * device_rows + part * len(rows.token_BT)
    noise = Noise(noise_key, first_row) if cfg.moe.router.jitter else None

    def loss(params: Tree) -> tuple[jax.Array, LossParts]:
        transformer = model.merge(params, state.router_bias, state.frozen)
        x_BTD, w_Dv, stats = transformer(rows.token_BT, rows.segment_BT, noise)
        with jax.named_scope("loss"):
            return next_token_loss(
                x_BTD,
                w_Dv,
                rows.target_BT,
                stats,
                moe=cfg.moe,
                num_targets=num_targets,
                micro_batches=cfg.train.micro_batches,
                layout=layout,
                chunk_tokens=model.chunk_tokens,
            )

    gradients, parts = jax.grad(loss, has_aux=True)(params)
    return *detach_residuals(gradients, model.dims), parts


def _reduce_whole(model: ModelDef, gradients: Tree) -> Tree:
    """Sums the gradients of parameters that every device holds whole, such as norm scales."""
    leaves, tree = jax.tree.flatten(gradients)
    whole = [i for i, d in enumerate(jax.tree.leaves(model.dims)) if model.layout.is_whole(d)]
    sums = reduce_whole([leaves[i] for i in whole], model.layout)
    for i, total in zip(whole, sums, strict=True):
        leaves[i] = total
    return jax.tree.unflatten(tree, leaves)


def _choose_levels(model: ModelDef, before: Reduction, codecs: Tree) -> Reduction:
    """Returns the new codec state; in measuring steps adaptive codecs choose their level."""
    if before.levels is None:
        return Reduction(codecs, None)
    levels = []
    for number, kind in enumerate(GRADIENTS):
        codec = getattr(model.spec.codecs, kind)
        if codec is None or not codec.measures:
            levels.append(before.levels[number])
            continue
        errors = sum_squared_errors(build_codec(codec), codecs, model.dims, kind)
        errors = wire.all_reduce(errors, model.layout.mesh_axes)
        levels.append(choose_level(errors, codec.argument))
    return Reduction(codecs, jnp.stack(levels))


def _update_router_bias(router_bias: Tree, load_LE: jax.Array, rate: float) -> Tree:
    """Moves each layer's selection bias; biases are stacked by layer group, in layer order."""
    leaves, tree = jax.tree.flatten(router_bias)
    first, moved = 0, []
    for bias_LE in leaves:
        layers = bias_LE.shape[0]
        moved.append(update_bias(bias_LE, load_LE[first : first + layers], rate))
        first += layers
    return jax.tree.unflatten(tree, moved)
