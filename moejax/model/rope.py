"""Rotary position embeddings, and their scaling past the trained length."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Float
from moejax.config.pattern import settings_of
from moejax.config.schema import ModelConfig, RopeConfig

Turns = tuple[jax.Array, jax.Array]  # cos and sin, from `angles_at`


class Angles(NamedTuple):
    """The angles of the same positions in blocks with a window, and in those without.

    Attributes:
      growth_T: factor on queries at each position, float32; None: one.
    """

    with_window: Turns
    full: Turns
    growth_T: jax.Array | None = None

    def of(self, window: int | None) -> Turns:
        """Returns those of blocks with that window; None: without one."""
        return self.full if window is None else self.with_window

    def grown(self, q_BTHC: Float[Array, "B T H C"]) -> Float[Array, "B T H C"]:
        """Returns queries times the factor of their positions, by a product in float32."""
        if self.growth_T is None:
            return q_BTHC
        return (q_BTHC * self.growth_T[:, None, None]).astype(q_BTHC.dtype)


def frequencies(channels: int, cfg: RopeConfig) -> tuple[jax.Array, float]:
    """Returns the angle per position of each channel pair, and a factor for cos and sin.

    Sources: linear, Chen et al. 2023; llama3, the Llama 3.1 model card; yarn, Peng et al. 2023.
    """
    exponent = jnp.arange(0, channels, 2, dtype=jnp.float32) / channels
    base = cfg.theta**-exponent
    if cfg.scaling == "linear":
        return base / cfg.factor, 1.0
    if cfg.scaling == "llama3":
        return _llama3(base, cfg), 1.0
    if cfg.scaling == "yarn":
        return _yarn(base, channels, cfg), _yarn_factor(cfg)
    return base, 1.0


def scale_of_scores(cfg: ModelConfig) -> float:
    """Returns the factor of attention's scores before softmax."""
    if cfg.score_scale is not None:
        return score_factor(cfg.rope) * cfg.score_scale
    return score_factor(cfg.rope) / math.sqrt(cfg.head_width)


def score_factor(cfg: RopeConfig) -> float:
    """Returns the factor of rotary scaling on attention's scores.

    Source: DeepSeek-V2's modeling code, where cos and sin stay near one and yarn's factor is on
    the scores: in latent attention only some channels of a head rotate.
    """
    if cfg.scaling != "yarn" or cfg.mscale_all_dim is None:
        return 1.0
    return _magnitude(cfg.mscale_all_dim, cfg) ** 2


def _yarn_factor(cfg: RopeConfig) -> float:
    if cfg.attention_factor is not None:
        return cfg.attention_factor
    if cfg.mscale is None or cfg.mscale_all_dim is None:
        return _magnitude(1.0, cfg)
    return _magnitude(cfg.mscale, cfg) / _magnitude(cfg.mscale_all_dim, cfg)


def _magnitude(scale: float, cfg: RopeConfig) -> float:
    return 0.1 * scale * math.log(cfg.factor) + 1.0


def _llama3(base: jax.Array, cfg: RopeConfig) -> jax.Array:
    """Stretches long wavelengths, keeps short wavelengths, and blends between them."""
    rotations = cfg.trained_length * base / (2 * math.pi)
    span = cfg.high_frequency_factor - cfg.low_frequency_factor
    keep = jnp.clip((rotations - cfg.low_frequency_factor) / span, 0, 1)
    return keep * base + (1 - keep) * base / cfg.factor


def _yarn(base: jax.Array, channels: int, cfg: RopeConfig) -> jax.Array:
    """Stretches pairs that rotate less than beta_slow times; keeps pairs above beta_fast."""

    def pair_of(rotations: float) -> float:
        inverse_frequency = cfg.trained_length / (rotations * 2 * math.pi)
        return channels * math.log(inverse_frequency) / (2 * math.log(cfg.theta))

    low, high = pair_of(cfg.beta_fast), pair_of(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    stretch = jnp.clip((jnp.arange(channels // 2) - low) / max(high - low, 1e-3), 0, 1)
    return stretch * base / cfg.factor + (1 - stretch) * base


def rotate(x_BTHC: Float[Array, "B T H C"], turns: Turns) -> Float[Array, "B T H C"]:
    """Rotates channel pairs (c, c + R/2) by their angle, in float32.

    The first R channels of a head rotate, and the others pass.

    Args:
      turns: cos and sin, each [T, R/2], from `angles_at`.
    """
    C, R = x_BTHC.shape[-1], 2 * turns[0].shape[-1]
    if R == 0:
        return x_BTHC
    if R < C:
        first, passed = jnp.split(x_BTHC, [R], axis=-1)
        return jnp.concatenate([rotate(first, turns), passed], axis=-1)
    cos, sin = (a[None, :, None, :] for a in turns)
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)


def angles_of(position_T: jax.Array, cfg: ModelConfig) -> Angles:
    """Returns the angles of these positions in a model's blocks; of no channels if none turns."""

    def in_blocks(window: int | None) -> Turns:
        own = settings_of(cfg, window)
        turned = own.full_attention.turned_channels
        channels = own.rotated_channels if own.rotates else 0
        return angles_at(position_T, channels, own.rope, turned=turned)

    full = in_blocks(None)
    differ = settings_of(cfg, None) != settings_of(cfg, 1)
    return Angles(in_blocks(1) if differ else full, full, _growth(position_T, cfg.rope))


def _growth(position_T: jax.Array, cfg: RopeConfig) -> jax.Array | None:
    """Returns the factor on queries at each position; None: one.

    Source: the Llama 4 model card (2025) for models whose texts are longer than trained ones.
    """
    if not cfg.query_growth:
        return None
    times_T = (position_T // cfg.trained_length).astype(jnp.float32)
    return 1 + cfg.query_growth * jnp.log1p(times_T)


def angles_at(
    position_T: jax.Array, channels: int, cfg: RopeConfig, *, turned: int | None = None
) -> Turns:
    """Returns cos and sin of the angles of these positions, each [T, channels / 2], float32.

    Args:
      turned: channels that turn, by the fastest frequencies; None: all.
    """
    frequency, scale = frequencies(channels, cfg)
    if turned is not None:
        frequency = jnp.where(jnp.arange(channels // 2) < turned // 2, frequency, 0.0)
    angle = position_T.astype(jnp.float32)[:, None] * frequency
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale
