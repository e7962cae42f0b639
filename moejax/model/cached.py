"""The model with a cache of keys and values: whole prompts, then one token of each row at a time.

Per device, inside shard_map. The blocks are the same as in training; only the call of their
attention differs. A row's positions are its places in the cache, from 0. Padding behind a shorter
prompt is not seen, and the row's own tokens replace it.

In a decoding step B rows have one token each. They run as one sequence of B tokens, so that the
tensor axis splits rows where it splits positions in training, and every route to the experts works.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm import context, wire
from moejax.comm.activations import enter_tensor
from moejax.comm.weights.adapters import Weight
from moejax.model.block import Pattern
from moejax.model.layers import logits
from moejax.model.rope import angles_at
from moejax.model.transformer import Transformer

# For each layer group, of one repeat, and each block of its pattern: arrays [B, S, ...].
Cache = list[list[tuple[jax.Array, ...]]]


class Cached(NamedTuple):
    """The result of a call with a cache."""

    logit_BV: Float[Array, "B V"]  # of the token after each row's last one, float32
    cache: Cache


def prefill(
    model: Transformer, token_BT: Int[Array, "B T"], length_B: Int[Array, " B"], capacity: int
) -> Cached:
    """Runs prompts, padded at their end, and begins a cache.

    Devices that share sequences have all their rows, and a part of the cache of each. The logits
    are of a device's own rows, as in `decode`.

    Args:
      length_B: tokens of each row's prompt, at least one.
      capacity: S, positions that the cache has room for.
    """
    cfg, T = model.cfg, token_BT.shape[1]
    layout, position_T = model.spec.layout, context.positions(T, model.spec.layout)
    angles = angles_at(position_T, cfg.rotated_channels, cfg.rope)
    weights, segment_BT = model.embedding.weights(), jnp.zeros_like(token_BT)
    x_BtD, cache = model.embedding.embed(context.own(token_BT, layout), weights[0]), []
    room = capacity // layout.size(layout.context)

    def attend(attention: Any, h_BtD: jax.Array) -> tuple[jax.Array, Any]:
        return attention.prefill(h_BtD, segment_BT, angles)

    for group in model.groups:
        kept = []
        for block in _only_repeat(group).blocks:
            x_BtD, _, own = block.run(x_BtD, attend)
            kept.append(tuple(_widened(a_BT, room) for a_BT in own))
        cache.append(kept)
    x_BTD = enter_tensor(model.norm(x_BtD), layout)
    is_last_BT = position_T == (length_B - 1)[:, None]
    last_BD = jnp.sum(jnp.where(is_last_BT[..., None], x_BTD, 0), axis=1)
    last_BD = context.own_rows(wire.all_reduce(last_BD, layout.context, tag=None), layout)
    return Cached(_logits(model, last_BD, weights[1]), cache)


def decode(
    model: Transformer, token_B: Int[Array, " B"], position_B: Int[Array, " B"], cache: Cache
) -> Cached:
    """Runs one token of each row, and adds it to the cache.

    Args:
      position_B: position of each row's token, below the cache's capacity.
    """
    cfg = model.cfg
    angles = angles_at(position_B, cfg.rotated_channels, cfg.rope)
    weights = model.embedding.weights()
    x_1tD, grown = model.embedding.embed(token_B[None], weights[0]), []
    for group, group_cache in zip(model.groups, cache, strict=True):
        kept_blocks = []
        for block, kept in zip(_only_repeat(group).blocks, group_cache, strict=True):

            def attend(attention: Any, h_1tD: jax.Array, kept: Any = kept) -> tuple[Any, Any]:
                return attention.decode(h_1tD, kept, position_B, angles)

            x_1tD, _, kept = block.run(x_1tD, attend)
            kept_blocks.append(kept)
        grown.append(kept_blocks)
    x_1BD = enter_tensor(model.norm(x_1tD), model.spec.layout)
    return Cached(_logits(model, x_1BD[0], weights[1]), grown)


def _only_repeat(group: Pattern) -> Pattern:
    """Returns a group's pattern with its weights of the only repeat."""
    graph, stacked = nnx.split(group)
    return nnx.merge(graph, jax.tree.map(lambda w_1: w_1.squeeze(0), stacked))


def _logits(model: Transformer, x_BD: jax.Array, w_Dv: Weight) -> jax.Array:
    """Wire: logits in float32, gathered over tensor."""
    return wire.all_gather(logits(x_BD, w_Dv), model.spec.layout.tensor, dim=1)


def _widened(a_BT: jax.Array, capacity: int) -> jax.Array:
    """Appends free positions: [B, T, ...] -> [B, S, ...]."""
    return jnp.pad(a_BT, ((0, 0), (0, capacity - a_BT.shape[1]), *((0, 0),) * (a_BT.ndim - 2)))
