"""Rows at the source of an exchange: in one pass or in two, the same bytes and the same sums."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.comm.codecs.codec import Blocks, Cast
from moejax.comm.tokens.buckets import SlotMap
from moejax.comm.tokens.rows import decode, encode_rows, sum_encoded
from moejax.kernels.formats import FORMATS
from tests.kernels.test_permute import placement

N, K, M, D = 6, 3, 14, 40
CODECS = [None, Cast(), *(Blocks(name, 16) for name in FORMATS)]


def operands(dtype=jnp.float32, seed=0):
    """Places with some choices dropped, tokens, gradients of results, a weight for each choice."""
    rng = np.random.default_rng(seed)
    x, gradient = (jnp.asarray(rng.standard_normal((N, D)), dtype) for _ in range(2))
    weight = jnp.asarray(rng.random((N, K)), jnp.float32)
    return SlotMap(*placement(N, K, M, seed)), x, gradient, weight


def in_one_pass(codec):
    return Blocks(codec.format, codec.block, rows_kernel="reference")


def weight_of_rows(weight, places):
    return jnp.take(weight.reshape(-1), places.item_of_slot, mode="fill", fill_value=0)


@pytest.mark.parametrize("codec", CODECS[2:], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_what_travels_is_the_same_bytes(codec, weighted):
    places, x, _, weight = operands()
    weight_S = weight_of_rows(weight, places) if weighted else None
    grid = places.item_of_slot.reshape(2, 7)  # as of peers
    weight_S = weight_S if weight_S is None else weight_S.reshape(2, 7)
    wanted = encode_rows(codec, x, grid // K, weight_S)
    found = encode_rows(in_one_pass(codec), x, grid // K, weight_S)
    filled = np.asarray(grid) < N * K  # nobody reads the others
    for have, want in zip(found, wanted, strict=True):
        assert have.shape[:2] == (2, 7)
        np.testing.assert_array_equal(np.asarray(have)[filled], np.asarray(want)[filled])


@pytest.mark.parametrize("codec", CODECS[2:], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_what_came_back_is_summed_to_the_same_bits(codec, weighted):
    places, x, _, weight = operands()
    payload = encode_rows(codec, x, places.item_of_slot // K)
    weight_NK = weight if weighted else None
    wanted = sum_encoded(codec, payload, weight_NK, places, D, jnp.float32)
    found = sum_encoded(in_one_pass(codec), payload, weight_NK, places, D, jnp.float32)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("codec", CODECS[2:], ids=str)
def test_in_bfloat16_one_pass_rounds_once(codec):
    """Two passes round each decoded row as well: every term is off by up to 2^-8 of itself."""
    places, x, _, weight = operands(jnp.bfloat16)
    payload = encode_rows(codec, x, places.item_of_slot // K)
    exact = np.asarray(sum_encoded(in_one_pass(codec), payload, weight, places, D, jnp.float32))
    once = sum_encoded(in_one_pass(codec), payload, weight, places, D, jnp.bfloat16)
    np.testing.assert_array_equal(once, jnp.asarray(exact, jnp.bfloat16))
    twice = np.asarray(sum_encoded(codec, payload, weight, places, D, jnp.bfloat16), np.float32)
    rows = jnp.abs(decode(codec, payload, D, jnp.float32))
    terms = sum_encoded(None, rows, weight, places, D, jnp.float32)
    assert np.all(np.abs(twice - exact) <= 2.0**-8 * (terms + np.abs(twice)))
