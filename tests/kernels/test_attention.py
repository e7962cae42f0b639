"""Blocked attention against the library's whole-batch attention, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.kernels.attention import _blocks, attention
from moejax.model.attention import attention_mask
from tests.cases import few


def operands(length, heads, groups, seed=0, dtype=np.float32):
    """Queries, keys, values and a gradient of two sequences of random documents."""
    rng = np.random.default_rng(seed)
    shapes = [(2, length, count, 8) for count in (heads, groups, groups, heads)]
    segment = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1), jnp.int32)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes], segment


def run(implementation, arrays, segment, window):
    mask = attention_mask(segment, window)

    def forward(*qkv):
        return attention(*qkv, mask, window=window, implementation=implementation)

    @jax.jit
    def both(*qkv, gradient):
        y, pull = jax.vjp(forward, *qkv)
        return [y, *pull(gradient)]

    return both(*arrays[:3], gradient=arrays[3])


@pytest.mark.slow
@few(12)
@given(
    length=st.sampled_from([1, 7, 64, 65, 130, 150]),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 5, 70]),
    seed=st.integers(0, 99),
)
def test_blocked_equals_the_reference(length, heads, window, seed):
    arrays, segment = operands(length, *heads, seed=seed)
    got, wanted = (run(name, arrays, segment, window) for name in ("blocked", "reference"))
    for have, want in zip(got, wanted, strict=True):
        # Sums over at most `length` positions and 8 channels, of terms of order one.
        bound = 8 * length * np.finfo(np.float32).eps * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


def test_large_scores_overflow_nothing():
    (q, k, v, dy), segment = operands(70, 2, 2)
    for x in run("blocked", [q * 1e4, k * 1e4, v, dy], segment, None):
        assert np.isfinite(x).all()


def test_bfloat16_stays_near_float32():
    arrays, segment = operands(130, 4, 2)
    low = run("blocked", [a.astype(jnp.bfloat16) for a in arrays], segment, None)
    full = run("reference", arrays, segment, None)
    for have, want in zip(low, full, strict=True):
        assert have.dtype == jnp.bfloat16
        assert np.abs(np.asarray(have, np.float32) - want).max() < 2**-5 * np.abs(want).max()


@pytest.mark.parametrize("length", [1, 100, 1024, 4097])
def test_blocks_visit_little_more_than_they_must(length):
    visited = sum((q.stop - q.start) * (k.stop - k.start) for q, k in _blocks(length, None))
    rows = max(q.stop - q.start for q, _ in _blocks(length, None))
    assert visited <= (length + rows) * length // 2 + rows * rows
    near = _blocks(length, 16)
    assert all(k.start == max(0, q.start - 15) and k.stop == q.stop for q, k in near)
