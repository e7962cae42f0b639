"""Dispatch and combine: nothing is lost, nothing is added, order does not matter."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moejax.moe.dispatch import combine, dispatch, plan_send, rank_in_expert


@st.composite
def routings(draw):
    """Tokens to distinct experts, as skewed as hypothesis likes."""
    E = draw(st.sampled_from([2, 4, 8]))
    K = draw(st.integers(1, min(3, E)))
    token = st.permutations(range(E)).map(lambda order: order[:K])
    return np.array(draw(st.lists(token, min_size=1, max_size=12))), E


@given(routings())
def test_ranks_count_earlier_assignments_to_the_same_expert(case):
    expert_NK, E = case
    expert_A = expert_NK.reshape(-1)
    rank_A, counts_E = rank_in_expert(jnp.asarray(expert_A), E)
    for a, expert in enumerate(expert_A):
        assert rank_A[a] == np.sum(expert_A[:a] == expert)
    np.testing.assert_array_equal(counts_E, np.bincount(expert_A, minlength=E))


@given(routings(), st.sampled_from([1, 2]))
def test_every_assignment_gets_a_row_of_its_own_in_its_peers_bucket(case, peers):
    expert_NK, E = case
    rows = expert_NK.size
    plan = plan_send(jnp.asarray(expert_NK), num_experts=E, num_peers=peers, bucket_rows=rows)
    slot_A = np.asarray(plan.slot_NK).reshape(-1)
    assert len(set(slot_A)) == expert_NK.size
    np.testing.assert_array_equal(slot_A // rows, expert_NK.reshape(-1) // (E // peers))
    assert int(plan.counts_Pe.sum()) == expert_NK.size
    inverse = np.asarray(plan.assignment_M)
    np.testing.assert_array_equal(inverse[slot_A], np.arange(expert_NK.size))
    assert np.sum(inverse < expert_NK.size) == expert_NK.size


@given(routings(), st.integers(1, 4))
def test_capacity_keeps_the_first_tokens_of_each_expert(case, capacity):
    expert_NK, E = case
    plan = plan_send(
        jnp.asarray(expert_NK),
        num_experts=E,
        num_peers=1,
        bucket_rows=E * capacity,
        capacity=capacity,
    )
    expert_A = expert_NK.reshape(-1)
    dropped_A = np.asarray(plan.slot_NK).reshape(-1) == E * capacity
    for a, expert in enumerate(expert_A):
        assert dropped_A[a] == (np.sum(expert_A[:a] == expert) >= capacity)


@given(routings())
def test_combine_undoes_dispatch_when_weights_sum_to_one(case):
    expert_NK, E = case
    N, K = expert_NK.shape
    x_ND = jnp.asarray(np.random.default_rng(0).standard_normal((N, 5)), jnp.float32)
    plan = plan_send(jnp.asarray(expert_NK), num_experts=E, num_peers=1, bucket_rows=N * K)
    x_RD, sent = dispatch(x_ND, plan, ())
    ends = np.cumsum(sent.sizes_e)
    for expert in range(E):
        rows = np.asarray(x_RD)[ends[expert] - sent.sizes_e[expert] : ends[expert]]
        tokens = np.flatnonzero((expert_NK == expert).any(axis=1))
        np.testing.assert_array_equal(rows, np.asarray(x_ND)[tokens])
    weight_NK = jnp.full((N, K), 1 / K)
    np.testing.assert_allclose(combine(x_RD, weight_NK, sent, ()), x_ND, rtol=1e-6)
