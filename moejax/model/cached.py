"""The model with a cache of keys and values: whole prompts, then one token of each row at a time.

Per device, inside shard_map. The blocks are those of training; only the call of their attention
differs. A row's positions are its places in the cache, from 0. Padding behind a shorter prompt is
not seen, and the row's own tokens replace it.

In a decoding step B rows have one token each. They run as one sequence of B tokens, so that the
tensor axis splits rows where it splits positions in training, and every route to the experts works.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.activations import enter_tensor
from moejax.model.rope import angles_at, tables
from moejax.model.transformer import Pattern, Transformer

# For each layer group and each block of its pattern: arrays [L, B, S, ...], L repeats.
Cache = list[list[tuple[jax.Array, ...]]]


class Cached(NamedTuple):
    """What a call with a cache returns."""

    logit_BV: Float[Array, "B V"]  # of the token after each row's last one, float32
    cache: Cache


def prefill(
    model: Transformer, token_BT: Int[Array, "B T"], length_B: Int[Array, " B"], capacity: int
) -> Cached:
    """Runs prompts, padded at their end, and begins a cache.

    Args:
      length_B: tokens of each row's prompt, at least one.
      capacity: S, positions that the cache has room for.
    """
    cfg, T = model.cfg, token_BT.shape[1]
    angles, segment_BT = tables(T, cfg.rotated_channels, cfg.rope), jnp.zeros_like(token_BT)
    weights = model.embedding.weights()
    x_BtD, cache = model.embedding.embed(token_BT, weights[0]), []

    def attend(attention: Any, h_BtD: jax.Array) -> tuple[jax.Array, Any]:
        return attention.prefill(h_BtD, segment_BT, angles)

    for group in model.groups:
        graph, stacked = nnx.split(group)

        def repeat(x_BtD: jax.Array, state: Any, graph: Any = graph) -> tuple[jax.Array, Any]:
            pattern, kept = nnx.merge(graph, state), []
            for block in pattern.blocks:
                x_BtD, _, own = block.run(x_BtD, attend)
                kept.append(own)
            return x_BtD, kept

        x_BtD, kept = jax.lax.scan(repeat, x_BtD, stacked, unroll=_unroll(model, stacked))
        cache.append(jax.tree.map(lambda a_LBT: _widened(a_LBT, capacity), kept))
    x_BTD = enter_tensor(model.norm(x_BtD), model.spec.layout)
    last_BD = jnp.take_along_axis(x_BTD, (length_B - 1)[:, None, None], axis=1)[:, 0]
    return Cached(_logits(model, last_BD, weights[1]), cache)


def decode(
    model: Transformer, token_B: Int[Array, " B"], position_B: Int[Array, " B"], cache: Cache
) -> Cached:
    """Runs one token of each row, and adds it to the cache.

    Args:
      position_B: of each row's token, below the cache's capacity.
    """
    cfg = model.cfg
    angles = angles_at(position_B, cfg.rotated_channels, cfg.rope)
    weights = model.embedding.weights()
    x_1tD, grown = model.embedding.embed(token_B[None], weights[0]), []
    for group, kept in zip(model.groups, cache, strict=True):
        graph, stacked = nnx.split(group)

        # The cache is carried, so that a step writes its own entries and copies no others.
        def repeat(carry: Any, scanned: Any, graph: Any = graph) -> tuple[Any, None]:
            (x_1tD, kept), (layer, state) = carry, scanned
            here = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, layer, 0, False), kept)
            x_1tD, own = _decode_pattern(nnx.merge(graph, state), x_1tD, here, position_B, angles)
            kept = jax.tree.map(partial(_put, layer=layer, position_B=position_B), kept, own)
            return (x_1tD, kept), None

        layers = jnp.arange(_repeats(stacked))
        (x_1tD, kept), _ = jax.lax.scan(
            repeat, (x_1tD, kept), (layers, stacked), unroll=_unroll(model, stacked)
        )
        grown.append(kept)
    x_1BD = enter_tensor(model.norm(x_1tD), model.spec.layout)
    return Cached(_logits(model, x_1BD[0], weights[1]), grown)


def _decode_pattern(
    pattern: Pattern, x_1tD: jax.Array, cache: Any, position_B: jax.Array, angles: Any
) -> tuple[jax.Array, Any]:
    """Runs the blocks of one repeat; returns what each adds to its cache, too."""
    added = []
    for block, kept in zip(pattern.blocks, cache, strict=True):

        def attend(attention: Any, h_1tD: jax.Array, kept: Any = kept) -> tuple[jax.Array, Any]:
            return attention.decode(h_1tD, kept, position_B, angles)

        x_1tD, _, own = block.run(x_1tD, attend)
        added.append(own)
    return x_1tD, added


def _logits(model: Transformer, x_BD: jax.Array, w_Dv: jax.Array) -> jax.Array:
    """Wire: logits in float32, gathered over tensor."""
    logit_Bv = (x_BD @ w_Dv).astype(jnp.float32)
    return wire.all_gather(logit_Bv, model.spec.layout.tensor, dim=1)


def _widened(a_LBT: jax.Array, capacity: int) -> jax.Array:
    """Appends free positions: [L, B, T, ...] -> [L, B, S, ...]."""
    free = (0, capacity - a_LBT.shape[2])
    return jnp.pad(a_LBT, ((0, 0), (0, 0), free, *((0, 0),) * (a_LBT.ndim - 3)))


def _put(
    kept_LBS: jax.Array, own_B: jax.Array, *, layer: jax.Array, position_B: jax.Array
) -> jax.Array:
    """Returns a group's cache with each row's new entry of one layer at its position."""
    return kept_LBS.at[layer, jnp.arange(own_B.shape[0]), position_B].set(own_B)


def _repeats(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def _unroll(model: Transformer, stacked: Any) -> int:
    return 1 if model.cfg.scan_layers else _repeats(stacked)
