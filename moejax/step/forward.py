"""The model forward alone: what held-out text costs, and what comes after a prompt.

Per device, inside the shard_map of the training mesh. Neither takes more rows at a time than the
step does, so that a run whose steps fit evaluates and samples too.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.comm import wire
from moejax.layout.layout import Layout
from moejax.step.loss import sum_nll
from moejax.step.state import Batch, TrainState


def cut(batch: Batch, parts: int) -> Batch:
    """This device's rows in `parts` equal parts, in order: [parts, rows of a part, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)


def sum_over_targets(
    graph: nnx.GraphDef,
    layout: Layout,
    state: TrainState,
    batch: Batch,
    *,
    micro_batches: int,
    chunk_tokens: int,
) -> jax.Array:
    """Summed nats over the valid targets of the whole batch.

    Args:
      micro_batches: parts that the rows are taken in, one after the other.
      chunk_tokens: tokens whose logits exist at one time, at most.
    """

    def add(total: jax.Array, rows: Batch) -> tuple[jax.Array, None]:
        model = nnx.merge(graph, state.params, state.balance)
        x_BTD, w_Dv, _ = model(rows.token_BT, rows.segment_BT)
        nats = sum_nll(x_BTD, w_Dv, rows.target_BT, layout, chunk_tokens=chunk_tokens)
        return total + nats, None

    if micro_batches == 1:
        total, _ = add(jnp.zeros(()), batch)
    else:
        total, _ = jax.lax.scan(add, jnp.zeros(()), cut(batch, micro_batches))
    return wire.all_reduce(total, layout.token_axes)


def logits_after(
    graph: nnx.GraphDef, layout: Layout, state: TrainState, token_BT: jax.Array, length: jax.Array
) -> jax.Array:
    """logits_BV after the first `length` tokens, float32; of no other position."""
    model = nnx.merge(graph, state.params, state.balance)
    x_BTD, w_Dv, _ = model(token_BT, jnp.zeros_like(token_BT))
    last_BD = jax.lax.dynamic_index_in_dim(x_BTD, length - 1, axis=1, keepdims=False)
    logits_Bv = last_BD @ w_Dv
    return wire.all_gather(logits_Bv.astype(jnp.float32), layout.tensor, dim=1)
