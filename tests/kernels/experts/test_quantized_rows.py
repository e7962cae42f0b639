"""Both operations against `kernels.permute` and `kernels.experts.quantize` one after the other."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.experts.quantize import dequantize, quantize
from moejax.kernels.experts.quantized_rows import dequantize_combine, permute_quantize
from moejax.kernels.formats import FORMATS
from moejax.kernels.permute import rows_at, sum_rows, weighted_rows_at, weighted_sum
from tests.kernels.test_permute import placement

N, K, M, BLOCK = 6, 3, 13, 16


def operands(D):
    """Places, their inverse, tokens, and a weight for each choice; some are dropped."""
    rng = np.random.default_rng(0)
    place, assignment = placement(N, K, M, seed=0)
    x = jnp.asarray(rng.standard_normal((N, D)), jnp.float32)
    return place, assignment, x, jnp.asarray(rng.random((N, K)), jnp.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("D", [32, 70])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_quantised_as_if_they_had_been_moved_before(name, D, weighted):
    _, assignment, x, weight = operands(D)
    weight_M = jnp.take(weight.reshape(-1), assignment, mode="fill", fill_value=0)
    found = permute_quantize(
        x, assignment // K, name, block=BLOCK, weight_M=weight_M if weighted else None
    )
    rows = rows_at(x, assignment // K)
    rows = weighted_rows_at(x, assignment // K, weight_M) if weighted else rows
    for have, want in zip(found, quantize(rows, name, block=BLOCK), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("D", [32, 70])
@pytest.mark.parametrize("weighted", [False, True])
def test_results_are_summed_as_if_they_had_been_dequantised_before(name, D, weighted):
    place, assignment, x, weight = operands(D)
    q = permute_quantize(x, assignment // K, name, block=BLOCK)
    found = dequantize_combine(q, weight if weighted else None, place, name, D)
    y = dequantize(q, name, D)
    wanted = weighted_sum(y, weight, place, assignment) if weighted else sum_rows(y, place)
    np.testing.assert_array_equal(found, wanted)
    assert np.any(np.asarray(found))
