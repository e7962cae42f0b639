"""Products in e4m3: the stated bound, gradients that go straight through, what a block keeps in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.kernels.experts import reference
from moejax.kernels.experts.grouped_matmul_e4m3 import (
    BLOCK,
    FORMAT,
    dequantize_weights,
    grouped_matmul_e4m3,
    quantize_weights,
)
from moejax.kernels.experts.quantize import dequantize, quantize
from moejax.kernels.formats import FORMATS, TINY

EPS, KIND = np.finfo(np.float32).eps, FORMATS[FORMAT]


def draw(rng, *shape):
    """Numbers of other magnitudes in every row, so that each needs a scale of its own."""
    magnitude = np.exp2(rng.integers(-9, 9, (*shape[:-1], 1)))
    return jnp.asarray(rng.standard_normal(shape) * magnitude, jnp.float32)


def error(x, scale):
    """The bound of `Format` for each number, its block's scale given; and roundings of float32."""
    x = np.abs(np.asarray(x, np.float64))
    return np.maximum(x * KIND.relative, scale * KIND.absolute) + x * 4 * EPS + 448 * TINY


def errors(x, w):
    """Of rows and of weights."""
    (M, K), (_, _, N) = x.shape, w.shape
    of_rows = np.asarray(quantize(x, FORMAT, block=BLOCK).scale, np.float64)
    of_weights = np.asarray(quantize_weights(w).scale_GJB, np.float64)
    wide = of_weights.repeat(BLOCK, 1).repeat(BLOCK, 2)[:, :N, :K].swapaxes(1, 2)
    return error(x, of_rows.repeat(BLOCK, 1)[:M, :K]), error(w, wide)


def exactly(function, *arrays):
    """In float64."""
    with jax.enable_x64(True):
        arrays = (jnp.asarray(np.asarray(x, np.float64)) for x in arrays)
        return jax.tree.map(np.asarray, function(*arrays))


drawn = {
    "sizes": st.lists(st.integers(0, 9), min_size=1, max_size=4),
    "spare": st.integers(1, 3),
    "K": st.sampled_from([1, 100, 257]),
    "N": st.sampled_from([1, 130]),
    "seed": st.integers(0, 99),
}


@pytest.mark.slow
@settings(max_examples=4)
@given(**drawn)
def test_the_error_stays_below_the_stated_bound(sizes, spare, K, N, seed):
    rng, counts = np.random.default_rng(seed), jnp.asarray(sizes, jnp.int32)
    x, w = draw(rng, sum(sizes) + spare, K), draw(rng, len(sizes), K, N)
    y = grouped_matmul_e4m3(x, w, counts, implementation="reference")
    assert not np.asarray(y)[sum(sizes) :].any(), "rows past the last group are zero"

    def product(x, w):
        return reference.grouped_matmul(x, w, counts)

    of_x, of_w = errors(x, w)
    size_x, size_w = np.abs(x), np.abs(w)
    bound = exactly(product, of_x, size_w + of_w) + exactly(product, size_x, of_w)
    bound += 2 * K * EPS * exactly(product, size_x + of_x, size_w + of_w)
    assert np.all(np.abs(y - exactly(product, x, w)) <= bound)


def test_it_does_round():
    """Else the bound above would hold of any product."""
    rng, counts = np.random.default_rng(0), jnp.asarray([5], jnp.int32)
    x, w = draw(rng, 5, 200), draw(rng, 1, 200, 30)
    y = grouped_matmul_e4m3(x, w, counts, implementation="reference")
    off = np.abs(y - reference.grouped_matmul(x, w, counts))
    assert np.median(off / np.abs(y)) > 2**-9


@pytest.mark.slow
@settings(max_examples=2)
@given(**drawn)
def test_gradients_are_those_of_the_product_of_what_was_rounded(sizes, spare, K, N, seed):
    rng, counts = np.random.default_rng(seed), jnp.asarray(sizes, jnp.int32)
    x, w = draw(rng, sum(sizes) + spare, K), draw(rng, len(sizes), K, N)
    gradient = draw(rng, x.shape[0], N)

    def pull(product, *arrays):
        return jax.vjp(product, *arrays)[1](jnp.asarray(gradient, arrays[0].dtype))

    got = pull(lambda x, w: grouped_matmul_e4m3(x, w, counts, implementation="reference"), x, w)
    rounded_x = dequantize(quantize(x, FORMAT, block=BLOCK), FORMAT, K)
    rounded_w = dequantize_weights(quantize_weights(w), (K, N))
    wanted = exactly(
        lambda x, w: pull(lambda x, w: reference.grouped_matmul(x, w, counts), x, w),
        rounded_x,
        rounded_w,
    )
    for have, want, length in zip(got, wanted, (N, x.shape[0]), strict=True):
        noise = 4 * (length + 1) * EPS * np.abs(want).max(initial=0)
        np.testing.assert_allclose(have, want, rtol=0, atol=noise)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_that_came_in_e4m3_are_the_same_numbers_again(dtype):
    x = draw(np.random.default_rng(0), 50, 384)
    sent = quantize(x, FORMAT, block=BLOCK)
    again = quantize(dequantize(sent, FORMAT, 384, dtype=dtype), FORMAT, block=BLOCK)
    np.testing.assert_array_equal(again.values, sent.values)
    np.testing.assert_allclose(again.scale, sent.scale, rtol=jnp.finfo(dtype).eps)


def test_weights_round_within_their_block_alone():
    """An outlier, and what is not finite, are felt in 128 x 128 weights and nowhere else."""
    w = draw(np.random.default_rng(0), 2, 300, 200)
    shape = w.shape[1:]
    block = (1, slice(128, 256), slice(0, 128))
    clean = np.asarray(dequantize_weights(quantize_weights(w), shape))
    for value in (1e9, np.nan):
        found = np.array(dequantize_weights(quantize_weights(w.at[1, 200, 100].set(value)), shape))
        assert np.isnan(found[block]).all() if np.isnan(value) else not found[block].all()
        found[block] = clean[block]
        np.testing.assert_array_equal(found, clean)
