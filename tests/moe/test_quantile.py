"""Quantile balancing beside sorted numbers in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config.schema import RouterConfig
from moejax.moe import router
from moejax.moe.quantile import balanced_bias, count_needed

BINS = 4000


def exact_bias(score_NE, bias_E, k):
    """The biases by sorting, before their mean is taken off: the ceil(N k / E)-th difference."""
    score_NE, bias_E = np.asarray(score_NE, np.float64), np.asarray(bias_E, np.float64)
    N, E = score_NE.shape
    cut_N = np.sort(score_NE + bias_E, axis=1)[:, E - k - 1]
    return np.sort(cut_N[:, None] - score_NE, axis=0)[-(-N * k // E) - 1]


def widest_bin(bias_E, bins, about):
    """Largest width of a bin around some biases: bins are even in asinh(E x)."""
    E = len(bias_E)
    range_ = np.arcsinh(E * (np.max(bias_E) + 1)) - np.arcsinh(E * (np.min(bias_E) - 1))
    return 1.1 * range_ / bins * np.sqrt(1 + (E * np.max(np.abs(about))) ** 2) / E


def next_bias(score_NE, bias_E, k, bins=BINS):
    """The biases by the code, through the router's own choice."""
    cfg = RouterConfig(score="sigmoid", quantile_bins=bins)
    logit_NE = jnp.log(score_NE) - jnp.log1p(-score_NE)
    routing = router.route(logit_NE, bias_E, cfg, k=k)
    count_EQ = count_needed(routing.score_NE, routing.cut_N1, bias_E, bins)
    return count_EQ, balanced_bias(count_EQ[None], bias_E[None], k=k)[0]


@settings(max_examples=6, deadline=None)
@given(
    E=st.sampled_from([3, 64]),
    k=st.integers(1, 2),
    N=st.sampled_from([20, 57]),
    spread=st.sampled_from([0.1, 3.0]),
    seed=st.integers(0, 999),
)
def test_biases_are_the_quantiles_less_their_mean(E, k, N, spread, seed):
    rng = np.random.default_rng(seed)
    score_NE = jax.nn.softmax(jnp.asarray(rng.normal(0, spread, (N, E)), jnp.float32))
    bias_E = jnp.asarray(rng.normal(0, 0.1, E), jnp.float32)
    count_EQ, found_E = next_bias(score_NE, bias_E, k)
    assert np.all(np.sum(count_EQ, axis=1) == N)
    exact_E = exact_bias(score_NE, bias_E, k)
    width = widest_bin(bias_E, BINS, exact_E)
    np.testing.assert_allclose(found_E, exact_E - exact_E.mean(), atol=2 * width + 1e-5)
    assert abs(float(jnp.sum(found_E))) < 1e-5 * E


def test_two_experts_worked_out_by_hand():
    """Expert 0 is chosen thrice. It needs -0.8, -0.6, -0.4 and 0; half of the tokens by -0.6.

    Expert 1 needs -0.2 once and 0 thrice, so 0. Less the mean: -0.3 and 0.3.
    """
    first_N = jnp.array([0.9, 0.8, 0.7, 0.4])
    score_NE = jnp.stack([first_N, 1 - first_N], axis=1)
    _, bias_E = next_bias(score_NE, jnp.zeros(2), 1)
    np.testing.assert_allclose(bias_E, [-0.3, 0.3], atol=2e-3)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_skewed_router_is_even_after_few_steps(score):
    """Scores are fixed, and expert 0 has the best of each token at first."""
    N, E, k = 2048, 16, 4
    cfg = RouterConfig(score=score, quantile_bins=1000)
    logit_NE = jax.random.normal(jax.random.key(0), (N, E)) + 2.0 * jnp.arange(E)[::-1] / E
    bias_E = jnp.zeros(E)

    def load(bias_E):
        routing = router.route(logit_NE, bias_E, cfg, k=k)
        return routing, np.asarray(router.count_load(routing.expert_NK, E)) / (N * k / E)

    before = load(bias_E)[1]
    for _ in range(16):
        routing, _ = load(bias_E)
        count_EQ = count_needed(routing.score_NE, routing.cut_N1, bias_E, 1000)
        bias_E = balanced_bias(count_EQ[None], bias_E[None], k=k)[0]
    after = load(bias_E)[1]
    assert before.max() > 1.5
    assert after.max() < 1.03
    # Tokens whose cut an expert is need just its bias, so it may stay below by some of those.
    assert after.min() > 0.9


def test_counts_of_parts_add_up_and_pass_no_gradient():
    score_NE = jax.nn.sigmoid(jax.random.normal(jax.random.key(1), (32, 8)))
    bias_E = jnp.linspace(-0.1, 0.1, 8)
    whole, _ = next_bias(score_NE, bias_E, 2, 100)
    parts = [next_bias(part, bias_E, 2, 100)[0] for part in jnp.split(score_NE, 4)]
    np.testing.assert_array_equal(sum(parts), whole)

    def weights(score_NE):
        return jnp.sum(next_bias(score_NE, bias_E, 2, 100)[1] ** 2)

    np.testing.assert_array_equal(jax.grad(weights)(score_NE), 0)


@settings(max_examples=20, deadline=None)
@given(k=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_choice_is_that_without_quantiles_and_the_cut_the_best_left_out(k, seed):
    rng = np.random.default_rng(seed)
    logit_NE = jnp.asarray(rng.normal(size=(9, 5)), jnp.float32)
    bias_E = jnp.asarray(rng.normal(0, 0.1, 5), jnp.float32)
    plain = router.route(logit_NE, bias_E, RouterConfig(), k=k)
    found = router.route(logit_NE, bias_E, RouterConfig(quantile_bins=16), k=k)
    np.testing.assert_array_equal(found.expert_NK, plain.expert_NK)
    np.testing.assert_array_equal(found.weight_NK, plain.weight_NK)
    assert plain.cut_N1 is None
    sums_NE = np.array(plain.score_NE + bias_E)
    np.put_along_axis(sums_NE, np.asarray(plain.expert_NK), -np.inf, 1)
    np.testing.assert_array_equal(found.cut_N1, sums_NE.max(axis=1, keepdims=True))
