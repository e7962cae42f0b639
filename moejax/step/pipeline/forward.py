"""The forward pass alone through pipeline stages: as `step.forward`.

Per device, inside the shard_map of the training mesh.

Letters: those of `layout.layout`; P stages, V virtual stages on each, M micro-batches, J = M / P
local ones, k a micro-batch, t a tick.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import context, links, wire
from moejax.model.layers import logits
from moejax.step.loss import sum_nll, target_nll
from moejax.step.model import ModelDef
from moejax.step.pipeline.loss import OutputHead
from moejax.step.pipeline.model import StagedModel
from moejax.step.pipeline.stage import Layers
from moejax.step.pipeline.transfers import Activations, ActivationTransfers
from moejax.step.state import Batch, TrainState


def _staged(model: ModelDef, state: TrainState, batch: Batch, micro_batches: int) -> StagedModel:
    return StagedModel(model, state, batch, state.params, micro_batches, training=False)


def forward_through_stages(staged: StagedModel, head: Callable[[jax.Array, jax.Array], Any]) -> Any:
    """Runs all micro-batches forward. Returns the results of `head`, stacked in the order of k.

    Args:
      head: function of (this stage's share of the last stage's output [B, t / P, D], k).
    """
    transfers, layers = ActivationTransfers(staged), Layers(staged)
    P, V = staged.stages, staged.virtual_stages

    def forward(activations: Activations, t: jax.Array, *, boundary: bool) -> Any:
        x_BtD, inbound = transfers.receive(activations, t, boundary=boundary)
        y_BtD = layers.run(x_BtD, staged.forward_task(t))
        return transfers.send(y_BtD, inbound), None

    def forward_and_head(activations: Activations, t: jax.Array) -> tuple[Activations, Any]:
        y_BtD = transfers.last_output(activations)
        k = staged.schedule.micro_batch(t) - P
        return forward(activations, t, boundary=True)[0], head(y_BtD, k)

    def cycle(activations: Activations, start: jax.Array) -> tuple[Activations, Any]:
        # The other virtual stages, and then the head of the last one's output.
        ticks = start + jnp.arange(P, V * P)
        activations, _ = lax.scan(partial(forward, boundary=False), activations, ticks)
        return lax.scan(forward_and_head, activations, start + V * P + jnp.arange(P))

    warm_up = partial(forward, boundary=True)
    activations, _ = lax.scan(warm_up, transfers.initial, jnp.arange(P))
    if V == 1:
        ticks = jnp.arange(P, P + staged.micro_batches)
        return lax.scan(forward_and_head, activations, ticks)[1]
    starts = V * P * jnp.arange(staged.local_micro_batches)
    results = lax.scan(cycle, activations, starts)[1]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)


def _nats(staged: StagedModel, function: Callable[..., jax.Array]) -> jax.Array:
    """Applies `sum_nll` or `target_nll` to each micro-batch; results are stacked."""
    head, model = OutputHead(staged), staged.model

    def nats(y_BtD: jax.Array, k: jax.Array) -> jax.Array:
        x_BTD, w_Dv = head.final(y_BtD)
        form = {"chunk_tokens": model.chunk_tokens, "cap": model.cfg.model.logit_cap}
        return function(x_BTD, w_Dv, head.targets(k, jnp.int32(0)), model.layout, **form)

    return forward_through_stages(staged, nats)


def sum_over_targets(model: ModelDef, state: TrainState, batch: Batch) -> jax.Array:
    """As `step.forward.sum_over_targets`."""
    staged = _staged(model, state, batch, model.cfg.train.micro_batches)
    return wire.all_reduce(jnp.sum(_nats(staged, sum_nll)), model.layout.token_axes)


def nll_of_targets(model: ModelDef, state: TrainState, batch: Batch) -> jax.Array:
    """As `step.forward.nll_of_targets`."""
    staged, layout = _staged(model, state, batch, model.cfg.train.micro_batches), model.layout
    B, T = batch.target_BT.shape
    nll = _nats(staged, target_nll)  # [M, B of a micro-batch, T / P]
    nll = links.gather_positions(nll.reshape(-1, nll.shape[-1]), layout)
    nll = context.gather(nll, layout)
    # Consecutive micro-batches are of consecutive stages: [J, P, ...] -> [P, J, ...].
    local, stages = staged.local_micro_batches, staged.stages
    nll = nll.reshape(local, stages, -1, T).swapaxes(0, 1).reshape(stages, B, T)
    # P B T -> P (B of all token ranks inside a stage) T
    return wire.all_gather(nll[:, None], layout.inside.row_axes, dim=1).reshape(-1, T)


def logits_after(
    model: ModelDef, state: TrainState, token_BT: jax.Array, length: jax.Array
) -> jax.Array:
    """As `step.forward.logits_after`."""
    layout, none = model.layout, jnp.zeros_like(token_BT)
    batch = Batch(token_BT, none, none)
    staged = _staged(model, state, batch, layout.size(layout.stage))
    head = OutputHead(staged)
    position_T = context.positions(token_BT.shape[1], layout)
    position_BT = jnp.broadcast_to(position_T, (len(token_BT), position_T.size))
    is_last_BT = links.share_of_positions(position_BT, layout) == length - 1

    def last_logits(y_BtD: jax.Array, _: jax.Array) -> jax.Array:
        x_BTD, w_Dv = head.final(y_BtD)
        last_BD = jnp.sum(jnp.where(is_last_BT[..., None], x_BTD, 0), axis=1)
        last_BD = wire.all_reduce(last_BD, layout.stage + layout.context, tag=None)
        return logits(last_BD, w_Dv, model.cfg.model.logit_cap)

    logits_PBv = forward_through_stages(staged, last_logits)
    logits_Bv = jax.lax.dynamic_index_in_dim(logits_PBv, staged.stage_index, keepdims=False)
    return wire.all_gather(logits_Bv, layout.tensor, dim=1)  # B v -> B V
