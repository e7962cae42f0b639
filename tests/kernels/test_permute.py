"""Row movement against the reference, and the gathers of backward against autodiff of it."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.kernels.permute import permute, sum_rows, take_rows, weighted_sum


def placement(N, K, M, seed):
    """Distinct rows for some of the N * K assignments, the rest dropped; and the inverse."""
    rng = np.random.default_rng(seed)
    place = np.full(N * K, M)
    kept = rng.permutation(N * K)[: min(M, N * K) * 2 // 3]
    place[kept] = rng.permutation(M)[: len(kept)]
    assignment = np.full(M, N * K)
    assignment[place[kept]] = kept
    return jnp.asarray(place.reshape(N, K)), jnp.asarray(assignment)


def plain_permute(x_ND, source_M):
    """Copies rows; index N gives zeros."""
    return jnp.concatenate([x_ND, jnp.zeros_like(x_ND[:1])])[source_M]


def plain_sum(y_MD, weight_NK, slot_NK, assignment_M):
    """Weights and sums each token's K results; a slot of M counts as zero."""
    y_NKD = jnp.concatenate([y_MD, jnp.zeros_like(y_MD[:1])])[slot_NK]
    return jnp.einsum("NK,NKD->ND", weight_NK, y_NKD)


# Few, because each shape compiles each operation anew.
sizes = {"N": st.sampled_from([1, 9]), "K": st.sampled_from([1, 4]), "M": st.sampled_from([2, 20])}


@settings(max_examples=25)
@given(**sizes, seed=st.integers(0, 99))
def test_permute_and_its_gradient_equal_the_reference(N, K, M, seed):
    slot_NK, assignment_M = placement(N, K, M, seed)
    source_M = assignment_M // K
    rng = np.random.default_rng(seed)
    x_ND = jnp.asarray(rng.standard_normal((N, 3)), jnp.float32)
    gradient_MD = jnp.asarray(rng.standard_normal((M, 3)), jnp.float32)
    y, pull = jax.vjp(lambda x: permute(x, source_M, slot_NK), x_ND)
    want, want_pull = jax.vjp(lambda x: plain_permute(x, source_M), x_ND)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_allclose(pull(gradient_MD)[0], want_pull(gradient_MD)[0], atol=1e-6)


@settings(max_examples=25)
@given(N=sizes["N"], M=sizes["M"], seed=st.integers(0, 99))
def test_rows_that_are_taken_are_those_of_permute_and_so_are_their_gradients(N, M, seed):
    places, sources = zip(*(placement(N, 1, M, seed + chunk) for chunk in range(2)), strict=True)
    slot_CN, source_CM = jnp.stack(places)[..., 0], jnp.stack(sources)
    rng = np.random.default_rng(seed)
    x_ND = jnp.asarray(rng.standard_normal((N, 3)), jnp.float32)
    gradient_MD = jnp.asarray(rng.standard_normal((M, 3)), jnp.float32)
    for chunk in range(2):
        y, pull = jax.vjp(lambda x, c=chunk: take_rows(x, source_CM, slot_CN, c), x_ND)
        want, want_pull = jax.vjp(lambda x, c=chunk: permute(x, source_CM[c], places[c]), x_ND)
        taken, taking = np.asarray(source_CM[chunk]) < N, np.asarray(slot_CN[chunk]) < M
        np.testing.assert_array_equal(y[taken], want[taken])
        gradient, wanted = pull(gradient_MD)[0], want_pull(gradient_MD)[0]
        np.testing.assert_array_equal(gradient[taking], wanted[taking])


@settings(max_examples=25)
@given(**sizes, seed=st.integers(0, 99))
def test_weighted_sum_and_its_gradients_equal_the_reference(N, K, M, seed):
    slot_NK, assignment_M = placement(N, K, M, seed)
    rng = np.random.default_rng(seed)
    y_MD = jnp.asarray(rng.standard_normal((M, 3)), jnp.float32)
    weight_NK = jnp.asarray(rng.random((N, K)), jnp.float32)
    gradient_ND = jnp.asarray(rng.standard_normal((N, 3)), jnp.float32)

    def both(function):
        out, pull = jax.vjp(lambda y, w: function(y, w, slot_NK, assignment_M), y_MD, weight_NK)
        return [out, *pull(gradient_ND)]

    for have, want in zip(both(weighted_sum), both(plain_sum), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-6)


def test_rows_are_added_up_in_float32():
    """256 + 1 is 256 in bfloat16, so one after the other they would never be more."""
    y_MD = jnp.asarray([[256], [1], [1]], jnp.bfloat16)
    found = sum_rows(y_MD, jnp.asarray([[0, 1, 2]]))
    assert found.dtype == jnp.bfloat16
    assert found.item() == 258
