"""Latent attention: queries, keys and values of all heads come from narrow latents.

Source: DeepSeek-V2 (2024), section 2.1. Training and prefill expand keys and values for every head;
decoding attends in the latent. One key of R channels that rotate is shared by all heads.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm.activations import (
    enter_tensor,
    enter_tensor_together,
    own_positions,
    split_positions,
)
from moejax.comm.context import reach_of
from moejax.comm.weights.adapters import AdaptedWeight, Adapter, Weight, product
from moejax.comm.weights.gather import gather_weight
from moejax.config.schema import ModelConfig
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec
from moejax.model import context
from moejax.model.layers import RMSNorm
from moejax.model.mixers.attention import Attention, project_from_heads, project_to_heads
from moejax.model.mixers.interface import CacheArray, CacheSize
from moejax.model.rope import Angles, Turns, rotate, scale_of_scores

# Epsilon of the norms of latents: DeepSeek's code has it whatever the model's other norms take.
LATENT_EPSILON = 1e-6


class Projected(NamedTuple):
    """Projections of the tokens, before keys and values are expanded."""

    q_BTHC: Float[Array, "B T H C"]  # rotated
    latent_BTZ: Float[Array, "B T Z"]  # of keys and values, normalised
    rotated_BTR: Float[Array, "B T R"]  # the key that rotates, before it does


class LatentAttention(nnx.Module):
    """Attention whose keys and values are expanded from a latent, and queries if `q_latent` is set.

    The channels of a head of queries or keys are those that do not rotate, then R that do.

    Attributes:
      window: positions that a query sees back, itself included; None: all.
    """

    def __init__(self, cfg: ModelConfig, window: int | None, spec: StepSpec, rngs: nnx.Rngs):
        D, H, C, R = cfg.width, cfg.num_heads, cfg.head_width, cfg.rotated_channels
        assert cfg.kv_latent is not None, "checks.attention refuses it"
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.out_deviation)
        self.cfg, self.window, self.spec = cfg, window, spec
        if cfg.q_latent is None:
            self.w_q = nnx.Param(normal(rngs.params(), (D, H, C)), dims="DHC")
        else:
            self.w_dq = nnx.Param(normal(rngs.params(), (D, cfg.q_latent)), dims="DZ")
            self.q_norm = RMSNorm(cfg.q_latent, LATENT_EPSILON, dims="Z")
            self.w_uq = nnx.Param(normal(rngs.params(), (cfg.q_latent, H, C)), dims="ZHC")
        # The latent of keys and values, then the key that rotates.
        self.w_dkv = nnx.Param(normal(rngs.params(), (D, cfg.kv_latent + R)), dims="DZ")
        self.kv_norm = RMSNorm(cfg.kv_latent, LATENT_EPSILON, dims="Z")
        # For each head the channels of keys that do not rotate, then those of values.
        expanded = (cfg.kv_latent, H, C - R + cfg.value_channels)
        self.w_ukv = nnx.Param(normal(rngs.params(), expanded), dims="ZHC")
        self.w_o = nnx.Param(out(rngs.params(), (H, cfg.value_channels, D)), dims="HCD")

    @staticmethod
    def cache(cfg: ModelConfig, size: CacheSize, layout: Layout) -> tuple[CacheArray, ...]:
        """Returns what a cache holds of a block: latents [N, 1, S, Z], on every tensor rank."""
        assert cfg.kv_latent is not None
        shape = size.slots, 1, size.positions, cfg.kv_latent + cfg.rotated_channels
        return (CacheArray(shape, cfg.dtype, (layout.row_axes, (), layout.context)),)

    flops, channels = Attention.flops, Attention.channels

    def __call__(
        self, x_BtD: Float[Array, "B t D"], segment_BS: Int[Array, "B S"], angles: Angles
    ) -> Float[Array, "B t D"]:
        """Takes and returns activations in the layout between blocks."""
        if self.spec.layout.context:
            return self._in_context(x_BtD, segment_BS, angles)
        projected = self._project(x_BtD, angles)
        attend = partial(context.attend, segment=segment_BS, spec=self.spec)
        return self._attend(projected.q_BTHC, self._keys(projected, angles), attend)

    def keys(self, x_BtD: Float[Array, "B t D"], angles: Angles) -> tuple[jax.Array, ...]:
        """Returns the keys and values of these positions, [B, T, H, C] and [B, T, H, V]."""
        return self._keys(self._project(x_BtD, angles), angles)

    def in_slice(
        self, x_BtD: Float[Array, "B t D"], angles: Angles, attend: Callable[..., jax.Array]
    ) -> tuple[Float[Array, "B t D"], tuple[jax.Array, ...]]:
        """As `Attention.in_slice`; keys and values are kept expanded."""
        projected = self._project(x_BtD, angles)
        keys_values = self._keys(projected, angles)
        attend = partial(attend, implementation=self.spec.sliced_attention)
        return self._attend(projected.q_BTHC, keys_values, attend), keys_values

    def extend(
        self,
        x_1tD: Float[Array, "1 t D"],
        cache: tuple[jax.Array, ...],
        rows: context.Rows,
        angles: Angles,
    ) -> tuple[Float[Array, "1 t D"], tuple[jax.Array, ...]]:
        """Attends from the new tokens of rows, which stand in x one row after the other.

        Queries are taken into the latent, so that no key or value is expanded: all heads attend to
        one key, the latent with the key that rotates, whose value is the latent.

        Args:
          cache: (kept_N1SZ,), the latents of positions with their keys that rotate.
          angles: angles of the tokens' positions.
        Returns:
          The result of `__call__`, and the cache with the tokens' own latents.
        """
        cfg, T, layout = self.cfg, rows.length, self.spec.layout
        projected = self._project(x_1tD, angles)
        own_MZ, Z = kept_of(projected, angles)[0], projected.latent_BTZ.shape[-1]
        w_uk_ZHC, w_uv_ZHV = split_weight(gather_weight(self.w_ukv, self.spec), cfg.value_channels)
        plain_MHC, rotated_MHR = split_last(projected.q_BTHC[0], cfg.rotated_channels)
        q_MHZ = jnp.concatenate([into_latent(plain_MHC, w_uk_ZHC), rotated_MHR], axis=-1)
        own_RT1Z = own_MZ.reshape(-1, T, 1, own_MZ.shape[-1])
        (kept_N1SZ,) = context.put_own(cache, (own_RT1Z,), rows, layout)
        y_RTHZ = context.attend_cached(
            q_MHZ.reshape(-1, T, *q_MHZ.shape[1:]),
            kept_N1SZ,
            kept_N1SZ[..., :Z],
            rows,
            layout,
            window=self.window,
            scale=self._scale,
        )
        y_MHV = out_of_latent(y_RTHZ.reshape(-1, *y_RTHZ.shape[2:]), w_uv_ZHV)
        return project_from_heads(y_MHV[None], self.w_o, self.spec), (kept_N1SZ,)

    @property
    def _scale(self) -> float:
        return scale_of_scores(self.cfg)

    def _project(self, x_BtD: jax.Array, angles: Angles) -> Projected:
        """Returns rotated queries, and the sources of keys and values, at all positions."""
        parts = (self._query_source(x_BtD), *self._key_value_source(x_BtD))
        q_BTZ, latent_BTZ, rotated_BTR = enter_tensor_together(parts, self.spec.layout)
        return Projected(self._queries(q_BTZ, angles), latent_BTZ, rotated_BTR)

    def _queries(self, q_BTZ: jax.Array, angles: Angles) -> jax.Array:
        """Returns rotated queries of their source."""
        w_q = self.w_q if self.cfg.q_latent is None else self.w_uq
        q_BTHC = rotate_last(project_to_heads(q_BTZ, w_q, self.spec), angles.full)
        return angles.grown(q_BTHC)

    def _in_context(self, x_BtD: jax.Array, segment_BS: jax.Array, angles: Angles) -> jax.Array:
        """`__call__` where devices share sequences: they exchange latents, expand those seen."""
        spec, layout = self.spec, self.spec.layout
        q_BTHC = self._queries(enter_tensor(self._query_source(x_BtD), layout), angles)
        own_BtZ = self._own_entries(x_BtD, angles)
        seen_BSZ = context.see(own_BtZ, reach_of(self.window, layout), spec, over_tensor=True)
        latent_BSZ, key_BSR = split_last(seen_BSZ, self.cfg.rotated_channels)
        attend = partial(context.attend_seen, segment=segment_BS, spec=spec)
        return self._attend(q_BTHC, self._expand(latent_BSZ, key_BSR), attend)

    def _own_entries(self, x_BtD: jax.Array, angles: Angles) -> jax.Array:
        """Returns latents with their rotated keys, of this tensor rank's part of the positions."""
        layout = self.spec.layout
        latent_BtZ, rotated_BtR = self._key_value_source(split_positions(x_BtD, layout))
        cos, sin = (own_positions(a[None], layout)[0] for a in angles.full)
        key_BtR = rotate(rotated_BtR[:, :, None], (cos, sin))[:, :, 0]
        return jnp.concatenate([latent_BtZ, key_BtR], axis=-1)

    def _attend(
        self, q_BTHC: jax.Array, keys_values: tuple[jax.Array, jax.Array], attend: Callable
    ) -> jax.Array:
        y_BTHV = attend(q_BTHC, *keys_values, window=self.window, scale=self._scale)
        return project_from_heads(y_BTHV, self.w_o, self.spec)

    def _keys(self, projected: Projected, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Expands keys, rotated, and values for every head."""
        # In float32, because its gradient is a sum over heads.
        rotated_BT1R = projected.rotated_BTR[:, :, None].astype(jnp.float32)
        return self._expand(projected.latent_BTZ, rotate(rotated_BT1R, angles.full)[:, :, 0])

    def _expand(self, latent_BSZ: jax.Array, key_BSR: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Expands keys and values for every head; the rotated key is appended to each head's."""
        expanded_BSHC = project_to_heads(latent_BSZ, self.w_ukv, self.spec)
        k_BSHC, v_BSHV = split_last(expanded_BSHC, self.cfg.value_channels)
        return append_key(k_BSHC, key_BSR), v_BSHV

    def _query_source(self, x_BtD: jax.Array) -> jax.Array:
        """Returns the source of queries: their latent, at own positions, or x itself."""
        if self.cfg.q_latent is None:
            return x_BtD
        return self.q_norm(product(x_BtD, gather_weight(self.w_dq, self.spec)))

    def _key_value_source(self, x_BtD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The latent of keys and values, and the key that rotates, at own positions."""
        down_BtZ = product(x_BtD, gather_weight(self.w_dkv, self.spec))
        latent_BtZ, rotated_BtR = split_last(down_BtZ, self.cfg.rotated_channels)
        return self.kv_norm(latent_BtZ), rotated_BtR


def kept_of(projected: Projected, angles: Angles) -> jax.Array:
    """Returns the cache's entry for each position: the latent, then the rotated key."""
    rotated_BT1R = rotate(projected.rotated_BTR[:, :, None], angles.full)
    return jnp.concatenate([projected.latent_BTZ, rotated_BT1R[:, :, 0]], axis=-1)


def split_weight(w_ZHC: Weight, count: int) -> tuple[Weight, Weight]:
    """Splits a weight into parts for the channels before the last `count`, and for these."""
    if not isinstance(w_ZHC, AdaptedWeight):
        before, last = split_last(w_ZHC, count)
        return before, last
    (before, last), (a_ZA, b_AHC) = split_last(w_ZHC.weight, count), w_ZHC.adapter
    b_before, b_last = split_last(b_AHC, count)
    adapters = Adapter(a_ZA, b_before), Adapter(a_ZA, b_last)
    return AdaptedWeight(before, adapters[0]), AdaptedWeight(last, adapters[1])


def into_latent(q_BHC: jax.Array, w_ZHC: Weight) -> jax.Array:
    """Multiplies each head's channels by its matrix, transposed; of an adapter by both factors."""
    if not isinstance(w_ZHC, AdaptedWeight):
        return jnp.einsum("bhc,zhc->bhz", q_BHC, w_ZHC)
    a_ZA, b_AHC = w_ZHC.adapter
    return into_latent(q_BHC, w_ZHC.weight) + into_latent(q_BHC, b_AHC) @ a_ZA.T


def out_of_latent(y_BHZ: jax.Array, w_ZHC: Weight) -> jax.Array:
    """Multiplies each head's latent by its matrix; of an adapter by both factors."""
    if not isinstance(w_ZHC, AdaptedWeight):
        return jnp.einsum("bhz,zhc->bhc", y_BHZ, w_ZHC)
    a_ZA, b_AHC = w_ZHC.adapter
    return out_of_latent(y_BHZ, w_ZHC.weight) + out_of_latent(y_BHZ @ a_ZA, b_AHC)


def split_last(x: jax.Array, count: int) -> list[jax.Array]:
    """Splits channels into those before the last `count`, and the last `count`."""
    # JAX 0.10 has no splits that count from the end.
    return jnp.split(x, [x.shape[-1] - count], axis=-1)


def rotate_last(q_BTHC: Float[Array, "B T H C"], turns: Turns) -> Float[Array, "B T H C"]:
    """Rotates the last channels of each head, as many as there are angles for."""
    plain, rotated = split_last(q_BTHC, 2 * turns[0].shape[-1])
    return jnp.concatenate([plain, rotate(rotated, turns)], axis=-1)


def append_key(
    k_BSHC: Float[Array, "B S H _"], key_BSR: Float[Array, "B S R"]
) -> Float[Array, "B S H C"]:
    """Appends the rotated key that all heads share to the channels of each."""
    # In float32, because its gradient is a sum over heads.
    shared_BS1R = key_BSR[:, :, None].astype(jnp.float32)
    shared_BSHR = jnp.broadcast_to(shared_BS1R, (*k_BSHC.shape[:3], shared_BS1R.shape[-1]))
    return jnp.concatenate([k_BSHC, shared_BSHR.astype(k_BSHC.dtype)], axis=-1)
