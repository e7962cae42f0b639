"""The forward pass alone: the loss of held-out text, and the logits after a prompt.

Per device, inside the shard_map of the training mesh. All process no more rows at a time than the
step, so that a run whose steps fit in memory can evaluate and sample too.
"""

import jax
import jax.numpy as jnp

from moejax.comm import context, wire
from moejax.model.layers import logits
from moejax.step.loss import sum_nll, target_nll
from moejax.step.model import ModelDef
from moejax.step.state import Batch, TrainState


def split_micro_batches(batch: Batch, count: int) -> Batch:
    """Splits this device's rows into `count` micro-batches: [count, rows of one, ...]."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)


def sum_over_targets(model: ModelDef, state: TrainState, batch: Batch) -> jax.Array:
    """Returns nats summed over the valid targets of the full batch, by micro-batches."""
    layout, micro_batches = model.layout, model.cfg.train.micro_batches
    form = {"chunk_tokens": model.chunk_tokens, "cap": model.cfg.model.logit_cap}

    def add(total: jax.Array, rows: Batch) -> tuple[jax.Array, None]:
        transformer = model.merge(state.params, state.router_bias, state.frozen)
        x_BTD, w_Dv, _ = transformer(rows.token_BT, rows.segment_BT)
        target_BT = context.own(rows.target_BT, layout)
        nats = sum_nll(x_BTD, w_Dv, target_BT, layout, **form)
        return total + nats, None

    if micro_batches == 1:
        total, _ = add(jnp.zeros(()), batch)
    else:
        total, _ = jax.lax.scan(add, jnp.zeros(()), split_micro_batches(batch, micro_batches))
    return wire.all_reduce(total, layout.token_axes)


def nll_of_targets(model: ModelDef, state: TrainState, batch: Batch) -> jax.Array:
    """Returns nats of each target of the full batch, by micro-batches; 0 where there is none.

    Wire: beside the model's, 4 bytes a position of the batch, gathered over the token axes.
    """
    layout = model.layout
    form = {"chunk_tokens": model.chunk_tokens, "cap": model.cfg.model.logit_cap}

    def of_rows(nothing: None, rows: Batch) -> tuple[None, jax.Array]:
        transformer = model.merge(state.params, state.router_bias, state.frozen)
        x_BTD, w_Dv, _ = transformer(rows.token_BT, rows.segment_BT)
        target_BT = context.own(rows.target_BT, layout)
        nll = target_nll(x_BTD, w_Dv, target_BT, layout, **form)
        return nothing, context.gather(nll, layout)

    split = split_micro_batches(batch, model.cfg.train.micro_batches)
    _, nll = jax.lax.scan(of_rows, None, split)
    return wire.all_gather(nll.reshape(batch.target_BT.shape), layout.row_axes, dim=0)


def logits_after(
    model: ModelDef, state: TrainState, token_BT: jax.Array, length: jax.Array
) -> jax.Array:
    """Returns logits_BV after the first `length` tokens, float32, and of no other position."""
    transformer = model.merge(state.params, state.router_bias, state.frozen)
    x_BTD, w_Dv, _ = transformer(token_BT, jnp.zeros_like(token_BT))
    layout = model.layout
    is_last_T = context.positions(token_BT.shape[1], layout) == length - 1
    last_BD = jnp.sum(jnp.where(is_last_T[:, None], x_BTD, 0), axis=1)
    last_BD = wire.all_reduce(last_BD, layout.context, tag=None)
    logit_Bv = logits(last_BD, w_Dv, model.cfg.model.logit_cap)
    return wire.all_gather(logit_Bv, layout.tensor, dim=1)
