"""Rows moved and quantised in one kernel, and back, against the plain operations in turn."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.kernels.experts.quantized_rows import dequantize_combine, permute_quantize
from moejax.kernels.formats import FORMATS
from moejax.kernels.permute import weight_at
from tests.cases import few
from tests.kernels.mosaic.interpreter import interpreted
from tests.kernels.test_permute import placement

EPS = np.finfo(np.float32).eps
# Widths and blocks: several rows a tile, one row that leaves room in it, one of several tiles.
WIDTHS = [(256, 32), (500, 32), (1280, 32), (4096, 32), (1024, 128)]


def check(N, K, M, width, name, dtype, weighted, seed):
    (D, block), rng = width, np.random.default_rng(seed)
    place, assignment = placement(N, K, M, seed)
    x = rng.standard_normal((N, D)) * np.exp2(rng.integers(-20, 20, (N, 1)))
    x[rng.integers(N), rng.integers(D)] = rng.choice([0, 1e-40, np.inf, np.nan])
    x = jnp.asarray(x, dtype)
    weight = jnp.asarray(rng.random((N, K)), jnp.float32)
    weight_M = weight_at(weight, assignment) if weighted else None
    options = {"block": block, "weight_M": weight_M}
    want = permute_quantize(x, assignment // K, name, **options)
    weight = weight if weighted else None
    with interpreted():
        q = permute_quantize(x, assignment // K, name, **options, implementation="mosaic")
        got = dequantize_combine(want, weight, place, name, D, dtype=dtype, implementation="mosaic")
    np.testing.assert_array_equal(q.scale, want.scale)
    finite = np.isfinite(np.asarray(want.scale))
    np.testing.assert_array_equal(np.asarray(q.values)[finite], np.asarray(want.values)[finite])
    exact, size = (
        dequantize_combine(part, weight, place, name, D)
        for part in (want, want._replace(values=jnp.full_like(want.values, 1)))
    )
    largest = jnp.nanmax(jnp.abs(exact)) + jnp.nanmax(jnp.abs(size))
    bound = 2 * K * EPS * largest + np.abs(exact) * (0 if dtype == jnp.float32 else 2.0**-8)
    got = np.asarray(got, np.float32)
    assert got.shape == (N, D)
    assert np.array_equal(np.isnan(got), np.isnan(exact))
    assert np.all((np.abs(got - exact) <= bound) | np.isnan(exact))


@pytest.mark.parametrize(
    ("width", "weighted"),
    [
        (WIDTHS[2], True),
        pytest.param(WIDTHS[0], True, marks=pytest.mark.slow),
        pytest.param(WIDTHS[1], False, marks=pytest.mark.slow),
    ],
)
def test_both_equal_the_plain_operations(width, weighted):
    check(5, 2, 7, width, "e4m3", jnp.bfloat16, weighted, seed=1)


@pytest.mark.exhaustive
@few(20)
@given(
    N=st.integers(1, 6),
    K=st.integers(1, 4),
    M=st.integers(1, 12),
    width=st.sampled_from(WIDTHS),
    name=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_drawn_shapes_equal_the_plain_operations(N, K, M, width, name, dtype, weighted, seed):
    check(N, K, M, width, name, dtype, weighted, seed)
