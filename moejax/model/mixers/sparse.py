"""Sparse attention: latent attention of each query to the keys that a small indexer chooses for it.

Source: DeepSeek-V3.2 (2025), section 2.1, there "DeepSeek sparse attention" with a "lightning
indexer". Up to as many keys as are chosen it is latent attention; past that all heads attend in the
latent, to the entries chosen. Letters as in `kernels.attention.chosen`; t own positions.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.comm.activations import (
    enter_tensor,
    enter_tensor_together,
    leave_replicated,
    leave_tensor,
    own_positions,
    split_positions,
)
from moejax.comm.context import Reach, positions
from moejax.comm.weights.adapters import product
from moejax.comm.weights.gather import gather_float32, gather_weight, replicated_weight
from moejax.config.schema import ModelConfig
from moejax.kernels.attention import chosen
from moejax.kernels.attention.ranged import ranges
from moejax.kernels.costs import causal_pairs
from moejax.kernels.kept import ATTENDED, PLACES
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec
from moejax.model import context
from moejax.model.mixers.attention import project_from_heads
from moejax.model.mixers.interface import CacheArray, CacheSize
from moejax.model.mixers.latent import (
    LATENT_EPSILON,
    LatentAttention,
    Projected,
    into_latent,
    kept_of,
    out_of_latent,
    split_last,
    split_weight,
)
from moejax.model.rope import Angles, Turns, rotate


class Indexer(nnx.Module):
    """Scores keys for queries: sum over heads of weight * relu(query . key), one key for all heads.

    No tensor rank has a part of it. Each scores keys for the queries of its own positions.
    """

    def __init__(self, cfg: ModelConfig, spec: StepSpec, rngs: nnx.Rngs):
        heads, width = cfg.indexer.heads, cfg.indexer.width
        assert cfg.q_latent is not None, "checks.attention refuses it"
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        self.cfg, self.spec = cfg, spec
        self.w_q = nnx.Param(normal(rngs.params(), (cfg.q_latent, heads, width)), dims="ZIJ")
        self.w_k = nnx.Param(normal(rngs.params(), (cfg.width, width)), dims="DJ")
        self.w_weights = nnx.Param(normal(rngs.params(), (cfg.width, heads)), dims="DI")
        self.k_scale = nnx.Param(jnp.ones((width,)), dims="J")
        self.k_bias = nnx.Param(jnp.zeros((width,)), dims="J")

    def queries(self, q_BTZ: Float[Array, "B T Z"], turns: Turns) -> Float[Array, "B T I J"]:
        """Returns queries, of the latent of those of attention."""
        own = self.cfg.indexer
        q_BTY = product(q_BTZ, gather_weight(self.w_q, self.spec))
        return rotate(q_BTY.reshape(*q_BTY.shape[:2], own.heads, own.width), turns)

    def keys(self, x_BtD: Float[Array, "B t D"], turns: Turns) -> Float[Array, "B t J"]:
        """Returns the key of each position: normalised with its mean, and rotated."""
        k_BtJ = product(x_BtD, gather_weight(self.w_k, self.spec)).astype(jnp.float32)
        k_BtJ -= jnp.mean(k_BtJ, axis=-1, keepdims=True)
        k_BtJ *= lax.rsqrt(jnp.mean(k_BtJ**2, axis=-1, keepdims=True) + LATENT_EPSILON)
        k_BtJ = k_BtJ * replicated_weight(self.k_scale) + replicated_weight(self.k_bias)
        return rotate(k_BtJ.astype(x_BtD.dtype)[:, :, None], turns)[:, :, 0]

    def weights(self, x_BtD: Float[Array, "B t D"]) -> Float[Array, "B t I"]:
        """Returns the weights of the heads, in float32 as DeepSeek's code has them."""
        own, w_DI = self.cfg.indexer, gather_float32(self.w_weights, self.spec)
        weight_BtI = jnp.dot(x_BtD.astype(jnp.float32), w_DI, precision="highest")
        return weight_BtI / math.sqrt(own.heads * own.width)


class SparseAttention(LatentAttention):
    """Latent attention to as many keys of each query as `model.indexer.keys`.

    The choice has no gradient: the indexer is trained by `train.indexer_loss`, or not at all.
    """

    def __init__(self, cfg: ModelConfig, window: int | None, spec: StepSpec, rngs: nnx.Rngs):
        super().__init__(cfg, window, spec, rngs)
        self.indexer = Indexer(cfg, spec, rngs)

    @staticmethod
    def cache(cfg: ModelConfig, size: CacheSize, layout: Layout) -> tuple[CacheArray, ...]:
        """Returns latents, and keys of the indexer [N, 1, S, J] if there is room to choose.

        Then devices that share sequences keep whole texts, each those of its own rows.
        """
        latents = LatentAttention.cache(cfg, size, layout)
        if size.positions <= cfg.indexer.keys:
            return latents
        widths = latents[0].shape[-1], cfg.indexer.width
        shapes = [(size.slots, 1, size.positions, width) for width in widths]
        return tuple(CacheArray(shape, cfg.dtype, (layout.token_axes,)) for shape in shapes)

    @staticmethod
    def flops(cfg: ModelConfig, length: int, window: int | None) -> int:
        """Returns the FLOPs of chosen pairs in the latent, and of the indexer, which sees all.

        The indexer has no backward: a third of its FLOPs counts, as backward has twice as many.
        """
        if length <= cfg.indexer.keys:
            return LatentAttention.flops(cfg, length, window)
        assert cfg.kv_latent is not None
        channels = cfg.num_heads * (2 * cfg.kv_latent + cfg.rotated_channels)
        indexed = cfg.indexer.heads * cfg.indexer.width * causal_pairs(length, None)
        return 2 * (channels * causal_pairs(length, cfg.indexer.keys) + indexed // 3)

    def __call__(
        self, x_BtD: Float[Array, "B t D"], segment_BS: Int[Array, "B S"], angles: Angles
    ) -> Float[Array, "B t D"]:
        """As of `LatentAttention`.

        Wire, over tensor: keys of the indexer besides, and the places of chosen keys, K int32 a
        position; where the indexer is trained, the weights of chosen keys in float32 too. Over
        context: all entries and keys of the indexer.
        """
        length, layout = segment_BS.shape[1], self.spec.layout
        if length <= self.cfg.indexer.keys and not self.spec.index_loss:
            return super().__call__(x_BtD, segment_BS, angles)
        q_BtZ, turns = self._query_source(x_BtD), own_turns(angles, layout)
        q_BTHC, entry_BSZ, k_BSJ = self._seen(x_BtD, q_BtZ, angles)
        index = (*self._scoring(x_BtD, q_BtZ, turns), k_BSJ)
        position_t = leave_replicated(positions(length, layout)[None], layout)[0]
        seen, count = ranges(segment_BS, position_t, None), min(length, self.cfg.indexer.keys)
        place_BtK = checkpoint_name(chosen.choose(*index, *seen, count), PLACES)
        # In float32, because the gradient of an entry is a sum over queries.
        entry_BSZ = entry_BSZ.astype(jnp.float32)
        place_BTK = enter_tensor(place_BtK, layout)
        y_BTHV, share_BTK = self._attend_chosen(q_BTHC, place_BTK, entry_BSZ)
        y_BtD = project_from_heads(y_BTHV, self.w_o, self.spec)
        if share_BTK is None:
            return y_BtD
        share_BtK = leave_tensor(lax.stop_gradient(share_BTK), layout)
        return with_loss(y_BtD, self._loss(index, place_BtK, share_BtK), self.spec.index_loss)

    def extend(
        self,
        x_1tD: Float[Array, "1 t D"],
        cache: tuple[jax.Array, ...],
        rows: context.Rows,
        angles: Angles,
    ) -> tuple[Float[Array, "1 t D"], tuple[jax.Array, ...]]:
        """As of `LatentAttention`; the cache has the indexer's keys too, if it has room to choose.

        Every tensor rank scores for all queries: rows do not end where the ranks' positions do.
        """
        if len(cache) == 1:
            return super().extend(x_1tD, cache, rows, angles)
        T, layout = rows.length, self.spec.layout
        projected, k_1MJ, q_1MZ = self._enter(x_1tD, self._query_source(x_1tD), angles)
        q_1MIJ = self.indexer.queries(q_1MZ, angles.full)
        weight_1MI = enter_tensor(self.indexer.weights(x_1tD), layout)

        def by_row(x_1M: jax.Array) -> jax.Array:
            return x_1M[0].reshape(-1, T, *x_1M.shape[2:])

        own = (by_row(x)[:, :, None] for x in (kept_of(projected, angles), k_1MJ))
        cache = context.put_own(cache, tuple(own), rows, replace(layout, context=()))
        entry_RSZ, k_RSJ = ((x if rows.every else x[rows.slot_R])[:, 0] for x in cache)
        position_RT = rows.position_RT
        seen, count = (jnp.zeros_like(position_RT), position_RT), self.cfg.indexer.keys
        index = by_row(q_1MIJ), by_row(weight_1MI), k_RSJ
        place_RTK = chosen.choose(*index, *seen, count)
        y_RTHV, _ = self._attend_chosen(by_row(projected.q_BTHC), place_RTK, entry_RSZ)
        y_1MHV = y_RTHV.reshape(1, -1, *y_RTHV.shape[2:])
        return project_from_heads(y_1MHV, self.w_o, self.spec), cache

    def _seen(
        self, x_BtD: jax.Array, q_BtZ: jax.Array, angles: Angles
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, and entries and keys of the indexer of all that they may see."""
        layout = self.spec.layout
        if not layout.context:
            projected, k_BTJ, _ = self._enter(x_BtD, q_BtZ, angles)
            return projected.q_BTHC, kept_of(projected, angles), k_BTJ
        cos, sin = (own_positions(a[None], layout)[0] for a in angles.full)
        own_BtD = lax.stop_gradient(split_positions(x_BtD, layout))
        k_BtJ = self.indexer.keys(own_BtD, (cos, sin))
        own_BtY = jnp.concatenate([self._own_entries(x_BtD, angles), k_BtJ], axis=-1)
        seen_BSY = context.see(own_BtY, Reach(None), self.spec, over_tensor=True)
        q_BTHC = self._queries(enter_tensor(q_BtZ, layout), angles)
        entry_BSZ, k_BSJ = split_last(seen_BSY, k_BtJ.shape[-1])
        return q_BTHC, entry_BSZ, k_BSJ

    def _enter(
        self, x_BtD: jax.Array, q_BtZ: jax.Array, angles: Angles
    ) -> tuple[Projected, jax.Array, jax.Array]:
        """As `_project`; returns the indexer's keys and the source of queries too."""
        layout = self.spec.layout
        k_BtJ = self.indexer.keys(lax.stop_gradient(x_BtD), own_turns(angles, layout))
        parts = (q_BtZ, *self._key_value_source(x_BtD), k_BtJ)
        q_BTZ, latent_BTZ, rotated_BTR, k_BTJ = enter_tensor_together(parts, layout)
        return Projected(self._queries(q_BTZ, angles), latent_BTZ, rotated_BTR), k_BTJ, q_BTZ

    def _scoring(
        self, x_BtD: jax.Array, q_BtZ: jax.Array, turns: Turns
    ) -> tuple[jax.Array, jax.Array]:
        """Returns queries and weights of the indexer, whose inputs get no gradient."""
        x_BtD, q_BtZ = lax.stop_gradient((x_BtD, q_BtZ))
        return self.indexer.queries(q_BtZ, turns), self.indexer.weights(x_BtD)

    def _attend_chosen(
        self, q_BTHC: jax.Array, place_BTK: jax.Array, entry_BSZ: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the heads' results, and where the indexer is trained sums of heads' weights."""
        cfg, dtype, trains = self.cfg, q_BTHC.dtype, self.spec.index_loss > 0
        w_ZHC = gather_weight(self.w_ukv, self.spec)
        # In float32, because their gradient is a sum over blocks of queries.
        weights = jax.tree.map(jnp.float32, split_weight(w_ZHC, cfg.value_channels))

        def block(q_QHC: jax.Array, place_QK: jax.Array, entry_SZ: jax.Array) -> Any:
            w_uk_ZHC, w_uv_ZHV = jax.tree.map(lambda w: w.astype(dtype), weights)
            plain_QHC, rotated_QHR = split_last(q_QHC, cfg.rotated_channels)
            q_QHZ = jnp.concatenate([into_latent(plain_QHC, w_uk_ZHC), rotated_QHR], axis=-1)
            form = {"values": cfg.kv_latent, "scale": self._scale}
            y_QHZ, p_QHK = chosen.attend_chosen(q_QHZ, entry_SZ, place_QK, **form)
            y_QHV = out_of_latent(y_QHZ.astype(dtype), w_uv_ZHV)
            return y_QHV, jnp.sum(p_QHK, axis=1) if trains else None

        y_BTHV, share_BTK = chosen.by_blocks(block, (q_BTHC, place_BTK), (entry_BSZ,))
        return checkpoint_name(y_BTHV, ATTENDED), share_BTK

    def _loss(
        self, index: tuple[jax.Array, ...], place_BtK: jax.Array, share_BtK: jax.Array
    ) -> jax.Array:
        """Returns this device's share of the divergence of the indexer from attention.

        Both are distributions over the keys chosen; attention's is the mean of its heads. Source:
        DeepSeek-V3.2 (2025), equation 4.
        """
        *scoring, k_BTJ = index
        value_BtK = share_BtK / jnp.sum(share_BtK, axis=-1, keepdims=True)

        def block(q_QIJ, weight_QI, place_QK, value_QK, k_SJ):
            score_QK = chosen.index_scores(q_QIJ, weight_QI, k_SJ, place_QK)
            log_QK = jax.nn.log_softmax(score_QK, axis=-1)
            return jnp.sum(jax.scipy.special.xlogy(value_QK, value_QK) - value_QK * log_QK, axis=-1)

        arrays = (*scoring, place_BtK, value_BtK)
        total = jnp.sum(chosen.by_blocks(block, arrays, (k_BTJ.astype(jnp.float32),)))
        layout = self.spec.layout
        # Ranks that have all positions have the same sum: each contributes a share.
        return total if layout.sequence_sharded else total / layout.size(layout.tensor)


def own_turns(angles: Angles, layout: Layout) -> Turns:
    """Returns cos and sin of positions in the layout between blocks."""
    cos, sin = (leave_replicated(a[None], layout)[0] for a in angles.full)
    return cos, sin


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def with_loss(y: jax.Array, loss: jax.Array, factor: float) -> jax.Array:
    """Returns y; in backward the loss, which nothing else reads, has this factor in the step's."""
    del loss, factor
    return y


with_loss.defvjp(
    lambda y, loss, factor: (y, None),
    lambda factor, _, dy: (dy, jnp.float32(factor)),
)
