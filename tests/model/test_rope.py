"""Rotary positions: relative, norm-preserving, and stretched as their sources say."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config.schema import FullAttentionConfig, ModelConfig, RopeConfig
from moejax.model.rope import angles_at, angles_of, frequencies, rotate, score_factor

GOLDEN = Path(__file__).parents[1] / "golden/from_transformers.json"


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))
    angles = angles_at(jnp.arange(12), 8, RopeConfig())
    turned_q = rotate(jnp.tile(q, (1, 12, 1, 1)), angles)
    turned_k = rotate(jnp.tile(k, (1, 12, 1, 1)), angles)
    score = np.einsum("btc,bsc->ts", turned_q[:, :, 0], turned_k[:, :, 0])
    np.testing.assert_allclose(np.diag(score, -3), score[3, 0], rtol=1e-4)
    norms = np.linalg.norm(turned_q, axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(q), rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    plain, _ = frequencies(16, RopeConfig())
    scaled, factor = frequencies(16, RopeConfig(scaling="linear", factor=4.0))
    np.testing.assert_allclose(scaled, plain / 4)
    assert factor == 1.0


def test_the_scale_lies_on_cos_and_sin_alike():
    """A rotated pair keeps its angle, and is as much longer as the scale says."""
    cfg = RopeConfig(scaling="yarn", factor=40.0)
    scale = frequencies(64, cfg)[1]
    cos, sin = map(np.asarray, angles_at(jnp.arange(12), 64, cfg))
    # Both are float32 and each square adds twice its rounding.
    np.testing.assert_allclose(cos**2 + sin**2, scale**2, rtol=1e-6)


WANTED = json.loads(GOLDEN.read_text())["rope"]


@pytest.mark.parametrize("kind", WANTED)
def test_stretched_frequencies_are_transformers(kind):
    """Llama 3.1's at 128 channels; DeepSeek-V3's, gpt-oss's and Kimi-K2's at 64: every pair."""
    wanted = WANTED[kind]
    names = {
        "rope_theta": "theta",
        "factor": "factor",
        "original_max_position_embeddings": "trained_length",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    }
    options = {ours: wanted[theirs] for theirs, ours in names.items() if theirs in wanted}
    scaling = kind.partition("_")[0]
    got, scale = frequencies(wanted["head_dim"], RopeConfig(scaling=scaling, **options))
    # A float32 power theta**-x is off by some log(theta) steps, here at most 14 of 6e-8; how far a
    # pair is blended depends on it, at most 4 / 3 times as strongly (llama3). Twice for both sides.
    np.testing.assert_allclose(got, wanted["frequencies"], rtol=2 * (1 + 4 / 3) * 14 * 6e-8)
    assert scale == pytest.approx(wanted["scale"])


def test_mscale_moves_yarns_factor_from_cos_and_sin_to_the_scores():
    """DeepSeek-V3's scores are 1.8739 times as large, and its cos and sin as without scaling."""
    yarn = {"scaling": "yarn", "factor": 40.0}
    v3 = RopeConfig(**yarn, mscale=1.0, mscale_all_dim=1.0)
    assert frequencies(64, v3)[1] == 1.0
    assert score_factor(v3) == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert score_factor(v3) == pytest.approx(1.8739, abs=5e-5)
    off = RopeConfig(**yarn, mscale=1.0, mscale_all_dim=0.0)
    assert (frequencies(64, off)[1], score_factor(off)) == (0.1 * math.log(40) + 1, 1.0)
    for cfg in (RopeConfig(), RopeConfig(**yarn), RopeConfig(**yarn, attention_factor=2.0)):
        assert score_factor(cfg) == 1.0


def test_channels_beyond_the_rotated_ones_pass():
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 10)).astype(np.float32)
    angles = angles_at(jnp.arange(5), 6, RopeConfig())
    turned = np.asarray(rotate(jnp.asarray(x), angles))
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])
    # A pair is a complex number, which its position multiplies by a turn.
    turn = np.exp(1j * np.arange(5)[:, None] * 10_000.0 ** (-np.arange(3) / 3))[:, None]
    wanted = (x[..., :3] + 1j * x[..., 3:6]) * turn
    np.testing.assert_allclose(turned[..., :3], wanted.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 3:6], wanted.imag, atol=1e-5)


def test_blocks_without_a_window_may_turn_some_pairs_of_a_whole_head():
    """Gemma 4: pairs (c, c + 4) of 8 channels, by the frequencies of 8; the slow ones stand."""
    own = FullAttentionConfig(head_width=8, theta=300.0, turned_channels=4)
    cfg = ModelConfig(head_width=6, sliding_window=3, full_attention_every=2, full_attention=own)
    angles = angles_of(jnp.arange(5), cfg)
    (cos, sin), position_T1 = map(np.asarray, angles.full), np.arange(5)[:, None]
    wanted = position_T1 * np.array([1.0, 300.0**-0.25, 0.0, 0.0])
    np.testing.assert_allclose(cos, np.cos(wanted), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(wanted), atol=1e-6)
    usual = angles_at(jnp.arange(5), 6, RopeConfig())
    np.testing.assert_array_equal(angles.with_window, usual)
    assert angles.of(3) is angles.with_window
    assert angles.of(None) is angles.full
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), angles.full))
    still = [2, 3, 6, 7]
    np.testing.assert_array_equal(turned[..., still], x[..., still])
    wanted = (x[..., 1] + 1j * x[..., 5]) * np.exp(1j * 300.0**-0.25 * position_T1)
    np.testing.assert_allclose(turned[..., 1], wanted.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 5], wanted.imag, atol=1e-5)


def test_queries_grow_with_each_trained_length_behind_them():
    cfg = ModelConfig(head_width=4, rope=RopeConfig(query_growth=0.1, trained_length=3))
    angles = angles_of(jnp.arange(8), cfg)
    wanted = [1 + 0.1 * math.log(n) for n in (1, 1, 1, 2, 2, 2, 3, 3)]
    q_BTHC = np.random.default_rng(0).standard_normal((2, 8, 3, 4)).astype(np.float32)
    grown = np.asarray(angles.grown(jnp.asarray(q_BTHC)))
    np.testing.assert_allclose(grown, q_BTHC * np.array(wanted)[:, None, None], rtol=1e-6)
    narrow = jnp.asarray(q_BTHC, jnp.bfloat16)
    assert angles.grown(narrow).dtype == jnp.bfloat16
    assert angles_of(jnp.arange(8), ModelConfig()).grown(narrow) is narrow


def test_blocks_without_a_window_may_have_no_positions():
    cfg = ModelConfig(head_width=4, sliding_window=3, full_attention_every=2, positions="window")
    angles = angles_of(jnp.arange(5), cfg)
    np.testing.assert_array_equal(angles.of(3), angles_at(jnp.arange(5), 4, RopeConfig()))
    x = jnp.ones((1, 5, 2, 4))
    np.testing.assert_array_equal(rotate(x, angles.of(None)), x)
