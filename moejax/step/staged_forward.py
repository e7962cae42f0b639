"""The forward pass alone through pipeline stages: as `step.forward`.

Per device, inside the shard_map of the training mesh.

Letters: those of `layout.layout`; P stages, M micro-batches.
"""

import jax
import jax.numpy as jnp

from moejax.comm import stages, wire
from moejax.comm.weights.enter import enter_weights
from moejax.step.loss import sum_nll, target_nll
from moejax.step.model import ModelDef
from moejax.step.staged_model import StagedModel
from moejax.step.stages import forward_through_stages
from moejax.step.state import Batch, TrainState


def _staged(model: ModelDef, state: TrainState, batch: Batch, micro_batches: int) -> StagedModel:
    entered = enter_weights(state.params, model.dims, model.layouts, model.spec)
    return StagedModel(model, state, batch, entered, micro_batches)


def sum_over_targets(model: ModelDef, state: TrainState, batch: Batch) -> jax.Array:
    """As `step.forward.sum_over_targets`."""
    staged = _staged(model, state, batch, model.cfg.train.micro_batches)

    def answer(y_BtD: jax.Array, k: jax.Array) -> jax.Array:
        x_BTD, w_Dv = staged.end(staged.head_of(staged.outer), y_BtD)
        chunk_tokens = model.chunk_tokens
        return sum_nll(
            x_BTD, w_Dv, staged.targets(k, jnp.int32(0)), model.layout, chunk_tokens=chunk_tokens
        )

    total = jnp.sum(forward_through_stages(staged, answer))
    return wire.all_reduce(total, model.layout.token_axes)


def nll_of_targets(model: ModelDef, state: TrainState, batch: Batch) -> jax.Array:
    """As `step.forward.nll_of_targets`."""
    staged, layout = _staged(model, state, batch, model.cfg.train.micro_batches), model.layout
    B, T = batch.target_BT.shape

    def answer(y_BtD: jax.Array, k: jax.Array) -> jax.Array:
        x_BTD, w_Dv = staged.end(staged.head_of(staged.outer), y_BtD)
        chunk_tokens = model.chunk_tokens
        return target_nll(
            x_BTD, w_Dv, staged.targets(k, jnp.int32(0)), layout, chunk_tokens=chunk_tokens
        )

    nll = stages.join_positions(forward_through_stages(staged, answer), layout)  # [M, rows, T]
    # Stages have the micro-batches in turn.
    nll = nll.reshape(staged.each, staged.stages, -1, T).swapaxes(0, 1).reshape(staged.stages, B, T)
    return wire.all_gather(nll[:, None], layout.inside.token_axes, dim=1).reshape(-1, T)


def logits_after(
    model: ModelDef, state: TrainState, token_BT: jax.Array, length: jax.Array
) -> jax.Array:
    """As `step.forward.logits_after`."""
    layout, none = model.layout, jnp.zeros_like(token_BT)
    batch = Batch(token_BT, none, none)
    staged = _staged(model, state, batch, layout.size(layout.stage))
    every = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)
    here_BT = stages.own_positions(every, layout) == length - 1

    def answer(y_BtD: jax.Array, k: jax.Array) -> jax.Array:
        x_BTD, w_Dv = staged.end(staged.head_of(staged.outer), y_BtD)
        last_BD = jnp.sum(jnp.where(here_BT[..., None], x_BTD, 0), axis=1)
        return wire.all_reduce(last_BD, layout.stage, tag=None) @ w_Dv

    logits_PBv = forward_through_stages(staged, answer)
    logits_Bv = jax.lax.dynamic_index_in_dim(logits_PBv, staged.stage, keepdims=False)
    return wire.all_gather(logits_Bv.astype(jnp.float32), layout.tensor, dim=1)
