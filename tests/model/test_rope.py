"""Rotary positions: relative, norm-preserving, and stretched as their sources say."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config.schema import RopeConfig
from moejax.model.rope import frequencies, rotate, tables

GOLDEN = Path(__file__).parents[1] / "golden/from_transformers.json"


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))
    angles = tables(12, 8, RopeConfig())
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


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_long_waves_are_stretched_and_short_ones_kept(scaling):
    cfg = RopeConfig(theta=500_000.0, scaling=scaling, factor=8.0, trained_length=8192)
    plain, _ = frequencies(128, RopeConfig(theta=500_000.0))
    scaled, _ = frequencies(128, cfg)
    np.testing.assert_allclose(scaled[:4], plain[:4], rtol=1e-6)
    np.testing.assert_allclose(scaled[-4:], plain[-4:] / 8, rtol=1e-6)
    ratio = np.asarray(scaled / plain)
    assert np.all(np.diff(ratio) <= 1e-6), "the stretch grows with the wavelength"


def test_yarn_scales_attention_by_the_log_of_the_factor():
    _, scale = frequencies(64, RopeConfig(scaling="yarn", factor=40.0))
    assert scale == pytest.approx(0.1 * np.log(40) + 1)


def test_the_scale_lies_on_cos_and_sin_alike():
    """A rotated pair keeps its angle, and is as much longer as the scale says."""
    cfg = RopeConfig(scaling="yarn", factor=40.0)
    scale = frequencies(64, cfg)[1]
    cos, sin = map(np.asarray, tables(12, 64, cfg))
    # Both are float32 and each square adds twice its rounding.
    np.testing.assert_allclose(cos**2 + sin**2, scale**2, rtol=1e-6)


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_stretched_frequencies_are_transformers(scaling):
    """Llama 3.1's at 128 channels and DeepSeek-V3's at 64: every pair, the blend between too."""
    wanted = json.loads(GOLDEN.read_text())["rope"][scaling]
    names = {
        "rope_theta": "theta",
        "factor": "factor",
        "original_max_position_embeddings": "trained_length",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    }
    options = {ours: wanted[theirs] for theirs, ours in names.items() if theirs in wanted}
    got, scale = frequencies(wanted["head_dim"], RopeConfig(scaling=scaling, **options))
    # A float32 power theta**-x is off by some log(theta) steps, here at most 14 of 6e-8; how far a
    # pair is blended depends on it, at most 4 / 3 times as strongly (llama3). Twice for both sides.
    np.testing.assert_allclose(got, wanted["frequencies"], rtol=2 * (1 + 4 / 3) * 14 * 6e-8)
    assert scale == pytest.approx(wanted["scale"])
