"""The model with a cache of keys, values and states: rows of tokens, each behind a text in it.

Per device, inside shard_map. The blocks are the same as in training; only the call of their
attention differs. A text lies in a slot of the cache, at positions from 0.

R rows of T tokens run as one sequence of R * T tokens, so that the tensor axis splits rows where it
splits positions in training, and every route to the experts works. Tokens that pad a row reach no
expert and are not kept.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.activations import enter_tensor
from moejax.comm.host import fetch_after
from moejax.comm.weights.adapters import Weight
from moejax.config.pattern import BlockKind, layer_groups, settings_of
from moejax.config.schema import ModelConfig
from moejax.kernels.attention.cached_attention import KEYS
from moejax.layout.layout import Layout
from moejax.model.block import MIXERS, Pattern
from moejax.model.context import Rows
from moejax.model.layers import logits
from moejax.model.mixers.interface import CacheArray, CacheSize
from moejax.model.rope import angles_of
from moejax.model.transformer import Transformer
from moejax.moe.layer import MoEStats

# For each layer group, of one repeat, and each block of its pattern: the arrays of its mixer, of N
# slots: keys and values, latents, or a state.
Cache = list[list[tuple[Any, ...]]]


def cache_shapes(
    cfg: ModelConfig, layout: Layout, *, slots: int, positions: int, chunk: int
) -> Cache:
    """Returns the arrays of a cache for all devices, as `CacheArray`s.

    Layers with a window keep its positions alone: as many as the first token of a chunk sees behind
    its last one. Where devices share sequences they keep all. Linear attention keeps a state.

    Args:
      positions: of a slot's text.
      chunk: the most tokens of a row.
    """

    def of_block(kind: BlockKind) -> tuple[CacheArray, ...]:
        room = positions
        if kind.window is not None and not layout.context:
            room = min(room, kind.window - 1 + chunk)
        if room > KEYS and not layout.context:  # whole blocks of attention
            room = -(-room // KEYS) * KEYS
        own = settings_of(cfg, kind.window)
        return MIXERS[kind.mixer].cache(own, CacheSize(slots, room), layout)

    return [[of_block(kind) for kind in kinds] for kinds, _ in layer_groups(cfg, stacked=False)]


class Loads(NamedTuple):
    """How busy a call's experts were, of the L layers with experts; summed over devices."""

    load_LE: Int[Array, "L E"]  # choices of each expert
    overflowed_L: Int[Array, " L"]  # choices that went in overflow rounds
    rounds_L: Int[Array, " L"]  # number of these rounds


class Extended(NamedTuple):
    """The result of `extend`: final hidden states, the cache, and the experts of each token."""

    x_RTD: Float[Array, "R T D"]
    cache: Cache
    expert_RTLK: Int[Array, "R T L K"] | None  # of the L layers with experts
    loads: Loads | None = None  # where `StepSpec.tables`


def extend(
    model: Transformer,
    token_RT: Int[Array, "R T"],
    rows: Rows,
    cache: Cache,
    *,
    routing: bool = False,
) -> Extended:
    """Runs new tokens, and adds them to the cache.

    Args:
      routing: whether the experts of the tokens are returned. Wire: their ids, over tensor.
    """
    cfg = model.cfg
    angles = angles_of(rows.position_RT.reshape(-1), cfg)
    is_token_1M = rows.is_token_RT.reshape(1, -1)
    table_vD = model.embedding.weights()[0]
    x_1tD = model.embedding.embed(token_RT.reshape(1, -1), table_vD)
    grown, chosen = [], []
    layers = [nnx.split(group) for group in model.groups]
    for number, group_cache in enumerate(cache):
        if number + 1 < len(layers):  # weights on the host come while the layer before computes
            graph, following = layers[number + 1]
            x_1tD, following = fetch_after(x_1tD, following)
            layers[number + 1] = graph, following
        kept_blocks = []
        for block, kept in zip(_only_repeat(*layers[number]).blocks, group_cache, strict=True):

            def attend(attention: Any, h_1tD: jax.Array, kept: Any = kept) -> tuple[Any, Any]:
                return attention.extend(h_1tD, kept, rows, angles)

            x_1tD, stats, kept = block.run(x_1tD, attend, is_token_BT=is_token_1M)
            kept_blocks.append(kept)
            chosen += [] if stats is None else [stats]
        grown.append(kept_blocks)
    layout, expert_RTLK = model.spec.layout, None
    if routing:
        expert_MLK = jnp.stack([stats.expert_NK for stats in chosen], axis=1)
        expert_MLK = wire.all_gather(expert_MLK, layout.tensor, dim=0, tag=None)
        expert_RTLK = expert_MLK.reshape(*token_RT.shape, *expert_MLK.shape[1:])
    x_1MD = enter_tensor(model.norm(x_1tD), layout)
    loads = _loads(chosen, layout) if model.spec.tables else None
    return Extended(x_1MD.reshape(*token_RT.shape, -1), grown, expert_RTLK, loads)


def _loads(stats_L: list[MoEStats], layout: Layout) -> Loads:
    """Sums loads over devices. Wire: an integer for each expert, and one more, of each layer."""
    own = [jnp.append(stats.load_E, stats.overflowed) for stats in stats_L]
    all_LE = wire.all_reduce(jnp.stack(own), layout.mesh_axes, tag=None)
    rounds_L = jnp.stack([stats.rounds for stats in stats_L])
    return Loads(all_LE[:, :-1], all_LE[:, -1], rounds_L)


def _only_repeat(graph: Any, stacked: Any) -> Pattern:
    """Returns a group, of which `nnx.split` made these, with its weights of the only repeat."""
    return nnx.merge(graph, jax.tree.map(lambda w_1: w_1.squeeze(0), stacked))


def whole_logits(
    model: Transformer, x_ND: Float[Array, "N D"], w_Dv: Weight
) -> Float[Array, "N V"]:
    """Returns logits of the whole vocabulary. Wire: logits in float32, gathered over tensor."""
    logit_Nv = logits(x_ND, w_Dv, model.cfg.logit_cap)
    return wire.all_gather(logit_Nv, model.spec.layout.tensor, dim=1)


def cache_bytes(cache: Cache, layout: Layout) -> int:
    """Returns the bytes on each device of a cache of `CacheArray`s."""

    def of_array(array: CacheArray) -> int:
        shards = math.prod(layout.size(axes) for axes in array.axes)
        return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize // shards

    return sum(map(of_array, jax.tree.leaves(cache, is_leaf=is_cache_array)))


def is_cache_array(node: Any) -> bool:
    """Returns whether a node of a tree is a `CacheArray`, for `jax.tree.map`."""
    return isinstance(node, CacheArray)
