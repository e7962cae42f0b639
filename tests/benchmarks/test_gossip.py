"""The control that gossips: one round of a ring against NumPy, and what is sent."""

import numpy as np
import pytest

from benchmarks.learning.gossip import approach, matrices


def test_matrices_of_a_parameter():
    assert matrices(np.zeros((3, 4, 5, 6)), "EDF") == (12, 5, 6)  # stacked layers in front
    assert matrices(np.zeros((4, 5, 6)), "EDF") == (4, 5, 6)
    assert matrices(np.zeros((3, 5, 2, 7)), "DHC") == (3, 5, 14)


def test_what_is_no_matrix_takes_the_mean_of_a_site_and_its_neighbours():
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    found = np.asarray(approach(x, None, (0, 0, 0))[0])
    wanted = (x + np.roll(x, 1, axis=0) + np.roll(x, -1, axis=0)) / 3
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounds", [1, 40])
def test_differences_of_rank_one_are_found_whole_and_others_in_time(rounds):
    rng = np.random.default_rng(1)
    base = rng.standard_normal((2, 6, 5))
    u, v = rng.standard_normal((2, 6)), rng.standard_normal((2, 5))
    scale = rng.standard_normal(4)
    x = base + np.einsum("r,bm,bn->rbmn", scale, u, v)
    if rounds > 1:  # differences of full rank
        x = rng.standard_normal((4, 2, 6, 5))
    mean = x.mean(0)
    q = rng.standard_normal((4, 2, 5)).astype(np.float32)
    found = x.astype(np.float32)
    for _ in range(rounds):
        found, q = approach(found, q, (2, 6, 5))
    found = np.asarray(found)
    np.testing.assert_allclose(found.mean(0), mean, rtol=1e-4, atol=1e-5)  # nothing is lost
    if rounds == 1:
        wanted = (x + np.roll(x, 1, axis=0) + np.roll(x, -1, axis=0)) / 3
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    else:
        assert np.abs(found - mean).max() < 0.05 * np.abs(x - mean).max()
