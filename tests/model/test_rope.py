"""Rotary positions: relative, norm-preserving, and stretched as their sources say."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import RopeConfig
from moejax.model.rope import frequencies, rotate, tables


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
