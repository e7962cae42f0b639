"""The forward pass alone through pipeline stages: as `step.forward`.

Per device, inside the shard_map of the training mesh.

Letters: those of `layout.layout`; P stages, M micro-batches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import links, wire
from moejax.model.layers import logits
from moejax.step.loss import sum_nll, target_nll
from moejax.step.model import ModelDef
from moejax.step.pipeline.inputs import build_feed
from moejax.step.pipeline.loss import Answers
from moejax.step.pipeline.model import StagedModel
from moejax.step.pipeline.residuals import Layers
from moejax.step.pipeline.visits import (
    Moving,
    first_moving,
    sent,
    stage_input,
    to_answer,
    visit_forward,
)
from moejax.step.state import Batch, TrainState


def _staged(model: ModelDef, state: TrainState, batch: Batch, micro_batches: int) -> StagedModel:
    return StagedModel(model, state, batch, state.params, micro_batches, trains=False)


def forward_through_stages(
    staged: StagedModel, answer: Callable[[jax.Array, jax.Array], Any]
) -> Any:
    """Runs all micro-batches forward alone. Returns their answers, stacked in the order of k.

    Args:
      answer: of (this stage's share of the positions of what the last stage left, k).
    """
    feed, layers, P = build_feed(staged), Layers(staged), staged.stages
    x_BtD, fed = feed.first()
    ahead, chunks = staged.link("stage", x_BtD), staged.chunks
    interleaved = chunks > 1

    def forward(moving: Moving, t: jax.Array, *, enter: bool) -> tuple[Moving, None]:
        x_BtD, fed = stage_input(staged, feed, moving, t, enter=enter)
        y_BtD = layers.keep_nothing(x_BtD, visit_forward(staged, t))
        return sent(ahead, y_BtD, fed, interleaved=interleaved), None

    def both(moving: Moving, t: jax.Array) -> tuple[Moving, Any]:
        y_BtD = to_answer(ahead, moving, interleaved=interleaved)
        k = staged.schedule.micro_batch(t) - P
        return forward(moving, t, enter=True)[0], answer(y_BtD, k)

    def turn(moving: Moving, start: jax.Array) -> tuple[Moving, Any]:
        # Other chunks, and then what the last one of them left.
        ticks = start + jnp.arange(P, chunks * P)
        moving, _ = lax.scan(partial(forward, enter=False), moving, ticks)
        return lax.scan(both, moving, start + chunks * P + jnp.arange(P))

    start = first_moving(x_BtD, fed, P, interleaved=interleaved)
    moving, _ = lax.scan(partial(forward, enter=True), start, jnp.arange(P))
    if chunks == 1:
        return lax.scan(both, moving, jnp.arange(P, P + staged.micro_batches))[1]
    answers = lax.scan(turn, moving, chunks * P * jnp.arange(staged.each))[1]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), answers)


def sum_over_targets(model: ModelDef, state: TrainState, batch: Batch) -> jax.Array:
    """As `step.forward.sum_over_targets`."""
    staged = _staged(model, state, batch, model.cfg.train.micro_batches)
    answers = Answers(staged)

    def answer(y_BtD: jax.Array, k: jax.Array) -> jax.Array:
        x_BTD, w_Dv = answers.end(y_BtD)
        target_BT, chunk_tokens = answers.targets(k, jnp.int32(0)), model.chunk_tokens
        return sum_nll(x_BTD, w_Dv, target_BT, model.layout, chunk_tokens=chunk_tokens)

    total = jnp.sum(forward_through_stages(staged, answer))
    return wire.all_reduce(total, model.layout.token_axes)


def nll_of_targets(model: ModelDef, state: TrainState, batch: Batch) -> jax.Array:
    """As `step.forward.nll_of_targets`."""
    staged, layout = _staged(model, state, batch, model.cfg.train.micro_batches), model.layout
    B, T = batch.target_BT.shape
    answers = Answers(staged)

    def answer(y_BtD: jax.Array, k: jax.Array) -> jax.Array:
        x_BTD, w_Dv = answers.end(y_BtD)
        target_BT, chunk_tokens = answers.targets(k, jnp.int32(0)), model.chunk_tokens
        return target_nll(x_BTD, w_Dv, target_BT, layout, chunk_tokens=chunk_tokens)

    nll = forward_through_stages(staged, answer)  # [M, rows, a share of T]
    nll = links.join_positions(nll.reshape(-1, nll.shape[-1]), layout)
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
    answers = Answers(staged)
    every = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)
    here_BT = links.own_positions(every, layout) == length - 1

    def answer(y_BtD: jax.Array, k: jax.Array) -> jax.Array:
        x_BTD, w_Dv = answers.end(y_BtD)
        last_BD = jnp.sum(jnp.where(here_BT[..., None], x_BTD, 0), axis=1)
        return logits(wire.all_reduce(last_BD, layout.stage, tag=None), w_Dv)

    logits_PBv = forward_through_stages(staged, answer)
    logits_Bv = jax.lax.dynamic_index_in_dim(logits_PBv, staged.stage, keepdims=False)
    return wire.all_gather(logits_Bv, layout.tensor, dim=1)
