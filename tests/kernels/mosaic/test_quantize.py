"""The kernels of block quantisation against the reference: bytes, special values, sums of peers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.kernels.experts.quantize import dequantize, dequantize_sum, quantize
from moejax.kernels.formats import FORMATS, TINY
from tests.cases import few
from tests.kernels.mosaic.interpreter import interpreted

EPS = np.finfo(np.float32).eps
BLOCKS = [32, 64, 128, 256]
names = st.sampled_from(sorted(FORMATS))
MAX = float(np.finfo(np.float32).max)
# What a block can be made of besides ordinary numbers; 1e-40 is denormal, and so is its scale.
SPECIAL = [0.0, -0.0, 1e-40, TINY, 1e-30, MAX, -MAX, np.inf, -np.inf, np.nan]


def values(shape, dtype, seed, special):
    """Numbers of many magnitudes; some blocks have one of the `special` numbers in them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, (*shape[:-1], 1)))
    x = x.reshape(-1, shape[-1])
    for number in special:
        row = rng.integers(len(x))
        if abs(number) < 1e-3:  # too small to count beside others
            x[row] = 0
        x[row, rng.integers(shape[-1])] = number
    with np.errstate(over="ignore"):
        return jnp.asarray(x.reshape(shape), jnp.float32).astype(dtype)


def both(function, *arrays, **options):
    with interpreted():
        got = function(*arrays, **options, implementation="mosaic")
        got = jax.block_until_ready(got)
    return got, function(*arrays, **options, implementation="reference")


def same_bytes(got, want):
    """Blocks that are not finite say so in their scale; what else they hold is not looked at."""
    np.testing.assert_array_equal(got.scale, want.scale)
    finite = np.isfinite(np.asarray(want.scale))
    np.testing.assert_array_equal(np.asarray(got.values)[finite], np.asarray(want.values)[finite])


@pytest.mark.slow
@few(6)
@given(
    rows=st.integers(1, 70),
    size=st.integers(1, 300),
    name=names,
    block=st.sampled_from(BLOCKS),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
    seed=st.integers(0, 99),
)
def test_quantised_bytes_are_those_of_the_reference(rows, size, name, block, dtype, special, seed):
    x = values((rows, size), dtype, seed, special)
    got, want = both(quantize, x, name=name, block=block)
    same_bytes(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_special_value_is_treated_as_the_reference_treats_it(name):
    x = jnp.tile(jnp.float32([1.0]), (len(SPECIAL), 32)).at[:, 5].set(jnp.float32(SPECIAL))
    x = jnp.concatenate([x, jnp.broadcast_to(jnp.float32(SPECIAL)[:, None], x.shape)])
    got, want = both(quantize, x, name=name, block=32)
    same_bytes(got, want)
    back, wanted = both(dequantize, want, name=name, size=32)
    np.testing.assert_array_equal(back, wanted)


@pytest.mark.slow
@few(6)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 300)),
    name=names,
    block=st.sampled_from(BLOCKS),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
    seed=st.integers(0, 99),
)
def test_what_comes_back_is_what_the_reference_gives(shape, name, block, dtype, special, seed):
    q = quantize(values(shape, jnp.float32, seed, special), name, block=block)
    got, want = both(dequantize, q, name=name, size=shape[-1], dtype=dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.slow
@few(4)
@given(
    peers=st.integers(1, 7),
    rows=st.integers(1, 20),
    size=st.integers(1, 300),
    name=names,
    block=st.sampled_from(BLOCKS),
    special=st.lists(st.sampled_from([0.0, 1e-40, np.inf, np.nan]), max_size=2),
    seed=st.integers(0, 99),
)
def test_the_sum_over_peers_errs_by_roundings_of_float32(
    peers, rows, size, name, block, special, seed
):
    q = quantize(values((peers, rows, size), jnp.float32, seed, special), name, block=block)
    got, _ = both(dequantize_sum, q, name=name, size=size)
    parts = dequantize(q, name, size)
    exact = np.sum(np.asarray(parts, np.float64), axis=0)
    bound = peers * EPS * np.sum(np.abs(np.asarray(parts, np.float64)), axis=0)
    assert np.array_equal(np.isnan(got), np.isnan(exact))
    assert np.all((np.abs(np.asarray(got, np.float64) - exact) <= bound) | np.isnan(exact))


@pytest.mark.slow
def test_the_sum_is_in_float32_whatever_the_result_is_kept_in():
    """256 + 8 ones: in bfloat16, one at a time, none of them would count."""
    x = jnp.ones((9, 1, 32)).at[0].set(256)
    q = quantize(x, "int8", block=32)
    got, _ = both(dequantize_sum, q, name="int8", size=32, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got, np.float32), 264)
