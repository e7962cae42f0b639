"""The kernel of e4m3 against the exact product of what was rounded, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moejax.kernels.experts import reference
from moejax.kernels.experts.expert_mlp import expert_mlp
from moejax.kernels.experts.grouped_matmul_e4m3 import (
    BLOCK,
    FORMAT,
    dequantize_weights,
    grouped_matmul_e4m3,
    multiply_quantized,
    quantize_weights,
)
from moejax.kernels.experts.quantize import dequantize, quantize
from tests.cases import few
from tests.kernels.mosaic.interpreter import interpreted
from tests.kernels.mosaic.test_grouped_matmul import HALF_STEP, draw, exactly, run

EPS = np.finfo(np.float32).eps


def spread(rng, *shape):
    """Blocks of very different magnitudes: a scale that went to another block would show."""
    return draw(rng, *shape) * jnp.exp2(rng.integers(-6, 6, (*shape[:-1], 1))).astype(jnp.bfloat16)


def product(counts):
    return lambda x, w: reference.grouped_matmul(x, w, counts)


def check_product(sizes, spare, K, N, seed=0):
    """What the kernel adds to the errors of rounding: of sums in float32, and of bfloat16.

    In blocks of 128, then block by block: both scales are multiplied first, then with the sum.
    """
    rng, rows = np.random.default_rng(seed), sum(sizes)
    counts = jnp.asarray(sizes, jnp.int32)
    q = quantize(spread(rng, rows + spare, K), FORMAT, block=BLOCK)
    w = quantize_weights(spread(rng, len(sizes), K, N))
    with interpreted():
        got = np.asarray(multiply_quantized(q, w, counts, implementation="mosaic"), np.float64)
    exact = [
        np.asarray(x, np.float64) for x in (dequantize(q, FORMAT, K), dequantize_weights(w, (K, N)))
    ]
    with jax.enable_x64(True):
        want = np.asarray(product(counts)(*map(jnp.asarray, exact)))
        size = np.asarray(product(counts)(*map(jnp.asarray, map(np.abs, exact))))
    assert not got[rows:].any(), "rows past the last group are zero"
    bound = HALF_STEP * np.abs(want) + (BLOCK + q.scale.shape[1] + 4) * EPS * size
    assert np.all(np.abs(got - want) <= bound)


@pytest.mark.slow
def test_products():
    """An empty group, rows that fill no copy, columns that fill no tile, many steps."""
    check_product([70, 0, 3], 4, 5 * BLOCK, 192)


@pytest.mark.exhaustive
@few(8)
@example(sizes=[0, 150, 0], spare=4, K=256, N=320, seed=0)
@example(sizes=[0, 0, 0], spare=4, K=256, N=320, seed=0)
@given(
    sizes=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    spare=st.integers(1, 20),
    K=st.sampled_from([64, 128, 320]),
    N=st.sampled_from([64, 320]),
    seed=st.integers(0, 99),
)
def test_drawn_products(sizes, spare, K, N, seed):
    check_product(sizes, spare, K, N, seed)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gradients_are_those_of_the_product_of_what_was_rounded():
    rng, K, N = np.random.default_rng(0), 64, 192
    counts = jnp.asarray([30, 0, 41], jnp.int32)
    x, w, gradient = spread(rng, 75, K), spread(rng, 3, K, N), draw(rng, 75, N)
    got = run(
        lambda x, w: grouped_matmul_e4m3(x, w, counts, implementation="mosaic"), x, w, gradient
    )
    x = dequantize(quantize(x, FORMAT, block=BLOCK), FORMAT, K, dtype=jnp.bfloat16)
    w = dequantize_weights(quantize_weights(w), (K, N)).astype(jnp.bfloat16)
    wanted = exactly(product(counts), x, w, gradient)
    for have, want, length in zip(got[1:], wanted[1:], (N, 75), strict=True):
        noise = length * EPS * np.abs(want).max(initial=0)
        assert np.all(np.abs(have - want) <= np.abs(want) * HALF_STEP + noise)


@pytest.mark.slow
def test_experts_in_e4m3_equal_their_reference():
    rng, D, F = np.random.default_rng(0), 128, 64
    counts = jnp.asarray([70, 0, 3], jnp.int32)
    arrays = draw(rng, 80, D), draw(rng, 3, D, 2, F), draw(rng, 3, F, D), draw(rng, 80, D)

    def with_kernel(name):
        return lambda *rest: expert_mlp(*rest, counts, implementation=name)

    got = run(with_kernel("mosaic_e4m3"), *arrays)
    y, pull = jax.vjp(with_kernel("reference_e4m3"), *arrays[:-1])
    for have, want in zip(got, (y, *pull(arrays[-1])), strict=True):
        want = np.asarray(want, np.float64)
        # A hidden value at the edge of two numbers of bfloat16, then of e4m3, may fall either way.
        assert np.abs(have - want).max() < 2**-4 * np.abs(want).max()
