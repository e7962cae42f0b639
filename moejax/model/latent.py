"""Latent attention: queries, keys and values of all heads come from narrow latents.

Source: DeepSeek-V2 (2024), section 2.1. This is the form for training, which expands keys and
values for every head. One key of R channels that rotate is shared by all heads.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm.activations import enter_tensor_together
from moejax.comm.weights.gather import gather_weight
from moejax.config.schema import ModelConfig
from moejax.kernels.attention import attention
from moejax.layout.spec import StepSpec
from moejax.model.attention import project_from_heads, project_to_heads
from moejax.model.layers import RMSNorm
from moejax.model.rope import Angles, rotate, score_factor

# Epsilon of the norms of latents: DeepSeek's code has it whatever the model's other norms take.
LATENT_EPSILON = 1e-6


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
        out = jax.nn.initializers.normal(cfg.init_deviation / math.sqrt(2 * cfg.num_layers))
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

    def __call__(
        self, x_BtD: Float[Array, "B t D"], segment_BT: Int[Array, "B T"], angles: Angles
    ) -> Float[Array, "B t D"]:
        """Takes and returns activations in the layout between blocks."""
        cfg, spec = self.cfg, self.spec
        parts = (self._query_source(x_BtD), *self._key_value_source(x_BtD))
        q_BTZ, kv_BTZ, rotated_BTR = enter_tensor_together(parts, spec.layout)
        w_q = self.w_q if cfg.q_latent is None else self.w_uq
        q_BTHC = project_to_heads(q_BTZ, w_q, spec)
        expanded_BSHC = project_to_heads(kv_BTZ, self.w_ukv, spec)
        k_BSHC, v_BSHC = split_last(expanded_BSHC, cfg.value_channels)
        y_BTHC = attention(
            rotate_last(q_BTHC, angles),
            join_rotated(k_BSHC, rotated_BTR, angles),
            v_BSHC,
            segment_BT,
            window=self.window,
            scale=score_factor(cfg.rope) / math.sqrt(cfg.head_width),
            implementation=spec.attention,
        )
        return project_from_heads(y_BTHC, self.w_o, spec)

    def _query_source(self, x_BtD: jax.Array) -> jax.Array:
        """What queries are projected from: their latent, at own positions, or x itself."""
        if self.cfg.q_latent is None:
            return x_BtD
        return self.q_norm(x_BtD @ gather_weight(self.w_dq, self.spec))

    def _key_value_source(self, x_BtD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The latent of keys and values, and the key that rotates, at own positions."""
        down_BtZ = x_BtD @ gather_weight(self.w_dkv, self.spec)
        latent_BtZ, rotated_BtR = split_last(down_BtZ, self.cfg.rotated_channels)
        return self.kv_norm(latent_BtZ), rotated_BtR


def split_last(x: jax.Array, count: int) -> list[jax.Array]:
    """Returns the channels before the last `count`, and those."""
    # JAX 0.10 has no splits that count from the end.
    return jnp.split(x, [x.shape[-1] - count], axis=-1)


def rotate_last(q_BTHC: Float[Array, "B T H C"], angles: Angles) -> Float[Array, "B T H C"]:
    """Rotates the last channels of each head, as many as there are angles for."""
    plain, rotated = split_last(q_BTHC, 2 * angles[0].shape[-1])
    return jnp.concatenate([plain, rotate(rotated, angles)], axis=-1)


def join_rotated(
    k_BSHC: Float[Array, "B S H _"], rotated_BSR: Float[Array, "B S R"], angles: Angles
) -> Float[Array, "B S H C"]:
    """Rotates the key that all heads share, and appends it to the channels of each."""
    # In float32, because its gradient is a sum over heads.
    shared_BS1R = rotate(rotated_BSR[:, :, None].astype(jnp.float32), angles)
    shared_BSHR = jnp.broadcast_to(shared_BS1R, (*k_BSHC.shape[:3], shared_BS1R.shape[-1]))
    return jnp.concatenate([k_BSHC, shared_BSHR.astype(k_BSHC.dtype)], axis=-1)
