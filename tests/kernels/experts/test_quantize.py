"""Block quantisation: the stated bound for any floats, special values, both kinds of rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from moejax.kernels.experts.quantize import bytes_of, dequantize, quantize
from moejax.kernels.formats import FORMATS, TINY

EPS = np.finfo(np.float32).eps
names = st.sampled_from(sorted(FORMATS))
# Any magnitude that float32 has, denormal ones and zeros of both signs too.
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def there_and_back(x, name, block):
    y, q = both_ways(jnp.asarray(x), name, block)
    return np.asarray(y), q


@functools.partial(jax.jit, static_argnums=(1, 2))
def both_ways(x, name, block):
    q = quantize(x, name, block=block)
    return dequantize(q, name, x.shape[-1]), q


def bound(x, name, block, steps=1):
    """`Format`'s bound, for each value; a few roundings of float32 on top."""
    kind = FORMATS[name]
    padded = np.pad(np.abs(x.astype(np.float64)), [(0, 0), (0, -x.shape[-1] % block)])
    blocks = padded.reshape(len(x), -1, block)
    scale = blocks.max(-1, keepdims=True) / kind.largest
    worst = np.maximum(blocks * kind.relative, scale * kind.absolute) * steps
    worst += blocks * 4 * EPS + kind.largest * TINY
    return worst.reshape(len(x), -1)[:, : x.shape[-1]]


# A few shapes: each compiles all operations anew.
shapes = st.sampled_from([(1, 1), (1, 70), (2, 16), (2, 64), (3, 5), (3, 33)])
arrays = st_np.arrays(np.float32, shapes, elements=floats)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(x=arrays, name=names, block=st.sampled_from([2, 16, 32]))
def test_the_error_stays_below_the_stated_bound(x, name, block):
    y, _ = there_and_back(x, name, block)
    assert np.all(np.abs(y - x.astype(np.float64)) <= bound(x, name, block))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_decodes_to_nan_and_no_other_does(name, value):
    x = np.ones((1, 48), np.float32)
    x[0, 20] = value
    y, _ = there_and_back(x, name, 16)
    assert np.isnan(y[0, 16:32]).all()
    assert np.isfinite(np.delete(y, np.s_[16:32], axis=1)).all()


def test_no_nan_is_lost_in_a_long_array():
    """XLA's own maximum over this array loses it."""
    q = quantize(jnp.zeros((256, 32)).at[0, 0].set(np.nan), "int8", block=32)
    assert np.isnan(q.scale[0, 0])
    assert not np.asarray(q.scale[1:]).any()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros_and_the_largest_value_is_kept(name):
    x = np.zeros((2, 32), np.float32)
    x[1, 3] = -np.finfo(np.float32).max
    y, _ = there_and_back(x, name, 16)
    assert not y[0].any()
    np.testing.assert_allclose(y[1], x[1], rtol=4 * EPS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 127, 128, 129])
def test_bytes_are_those_of_the_arrays(name, size):
    _, q = there_and_back(np.ones((3, size), np.float32), name, 128)
    assert q.values.dtype == np.uint8
    assert q.values.nbytes + q.scale.nbytes == 3 * bytes_of(size, name, block=128)


def test_every_number_of_a_format_survives():
    """Sixteen halves of a byte, and bytes: nothing is lost to packing."""
    for name, kind in FORMATS.items():
        numbers = np.arange(256, dtype=np.uint8).view(kind.dtype).astype(np.float32)
        if kind.bits == 4:
            numbers = np.arange(-7, 8, dtype=np.float32)
        numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) <= kind.largest)]
        x = np.append(numbers, np.float32(kind.largest))[None]  # a scale of one
        y, _ = there_and_back(x, name, 512)
        np.testing.assert_array_equal(y, x)
