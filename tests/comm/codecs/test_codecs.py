"""Codecs: what is sent and what is kept add up; nothing broken is hidden; bytes are all counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.comm.codecs.codec import Blocks, Cast, ErrorFeedback, build_codec, pack, unpack
from moejax.config.compression import CodecSpec
from tests.comm.codecs.sizes import wire_bytes

EPS = np.finfo(np.float32).eps
FIRST = jnp.int32(0)
LOCO = ErrorFeedback(Blocks("int4"), average=0.5, stored="e4m3", reset=4)
CODECS = {
    "bfloat16": Cast(),
    "int8": Blocks("int8"),
    "int4": Blocks("int4"),
    "e4m3": Blocks("e4m3"),
    "e5m2": Blocks("e5m2"),
    "int4, feedback": ErrorFeedback(Blocks("int4")),
    "loco": LOCO,
}
codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def first_state(codec, x):
    return jnp.zeros((*x.shape[:-1], codec.state_size(x.shape[-1])), jnp.float32)


def draw(seed, *shape):
    """Values of very different sizes, as gradients have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))
    return jnp.asarray(x, jnp.float32)


@pytest.mark.slow
@codecs
@pytest.mark.parametrize("size", [1, 127, 128, 1000])
def test_bytes_on_the_wire_and_size_of_the_state_are_as_said(codec, size):
    x = draw(0, 3, 2, size)
    state = first_state(codec, x)
    payload, after = codec.encode(x, state, FIRST)
    leaves = jax.tree.leaves(payload)
    assert sum(leaf.nbytes for leaf in leaves) == 6 * wire_bytes(codec, size)
    assert all(leaf.shape[:2] == (3, 2) for leaf in leaves)
    assert after.shape == state.shape
    assert after.dtype == jnp.float32
    y = codec.decode(payload, size)
    assert (y.shape, y.dtype) == (x.shape, jnp.float32)


@pytest.mark.slow
@codecs
def test_rows_do_not_touch_each_other(codec):
    """So that a payload may be cut at its leading axis and sent to different peers."""
    x = draw(1, 4, 300)
    payload, after = codec.encode(x, first_state(codec, x), FIRST)
    for row in range(4):
        alone, after_alone = codec.encode(x[row], first_state(codec, x)[row], FIRST)
        for whole, part in zip(jax.tree.leaves(payload), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(whole[row], part)
        np.testing.assert_array_equal(after[row], after_alone)


@pytest.mark.slow
@codecs
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(codec, value):
    x = draw(2, 1, 500).at[0, 77].set(value)
    payload, _ = codec.encode(x, first_state(codec, x), FIRST)
    assert not np.isfinite(np.asarray(codec.decode(payload, 500))[0, 77])


@pytest.mark.slow
@codecs
def test_zeros_cost_nothing(codec):
    x = jnp.zeros((2, 200))
    state = first_state(codec, x)
    for step in range(3):
        payload, state = codec.encode(x, state, jnp.int32(step))
        assert not np.asarray(codec.decode(payload, 200)).any()


@functools.cache
def with_feedback(inner):
    """A codec, and both its ways as one program for each size."""
    codec = ErrorFeedback(CODECS[inner])
    return codec, jax.jit(codec.encode), jax.jit(codec.decode, static_argnums=1)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 99),
    size=st.sampled_from([1, 2, 127, 128, 129, 300]),  # each compiles all operations anew
    inner=st.sampled_from(["int8", "int4"]),
)
def test_sent_and_kept_add_up_to_what_was_to_be_sent(seed, size, inner):
    codec, encode, decode = with_feedback(inner)
    state, sent, true = first_state(codec, draw(0, 1, size)), np.zeros(size), np.zeros(size)
    largest = 0.0
    for step in range(6):
        x = draw(seed + step, 1, size)
        payload, state = encode(x, state, jnp.int32(step))
        sent += np.asarray(decode(payload, size), np.float64)[0]
        true += np.asarray(x, np.float64)[0]
        kept = np.asarray(state[0, :size], np.float64)
        largest = max(largest, np.abs(np.asarray(x)).max() + np.abs(kept).max())
        # Each step rounds twice: the sum that is encoded, and what is left of it.
        assert np.all(np.abs(sent + kept - true) <= 2 * (step + 1) * EPS * largest)


def test_feedback_sends_a_constant_gradient_in_the_end():
    """Four bits cannot say 0.01 beside 1; over many steps the payloads' mean does."""
    x = jnp.full((1, 128), 0.01).at[0, 0].set(1.0)
    plain, codec = Blocks("int4"), ErrorFeedback(Blocks("int4"))
    payload, _ = plain.encode(x, first_state(plain, x), FIRST)
    assert float(plain.decode(payload, 128)[0, 1]) == 0.0
    state, sent = first_state(codec, x), 0.0
    for step in range(100):
        payload, state = codec.encode(x, state, jnp.int32(step))
        sent += float(codec.decode(payload, 128)[0, 1])
    # One step of the format is left at most.
    assert abs(sent / 100 - 0.01) <= 1 / 7 / 100 + 1e-6


def test_loco_keeps_a_byte_a_value_and_forgets_in_time():
    x = draw(3, 2, 1280)
    state = first_state(LOCO, x)
    assert state.nbytes == 2 * (1280 + 4 * 10)
    kept = []
    for step in range(8):
        _, state = LOCO.encode(x, state, jnp.int32(step))
        kept.append(np.asarray(LOCO._load(state, 1280)))
    assert [bool(k.any()) for k in kept] == [True, True, True, False] * 2
    # The first error is halved by the moving average, and kept within e4m3's bound.
    first, _ = Blocks("int4").encode(x, first_state(Blocks("int4"), x), FIRST)
    wanted = 0.5 * np.asarray(x - Blocks("int4").decode(first, 1280))
    assert np.all(
        np.abs(kept[0] - wanted) <= np.abs(wanted) * 2**-4 + np.abs(wanted).max() * 2**-18
    )


def decoded(codec, x):
    return codec.decode(codec.encode(x, first_state(codec, x), FIRST)[0], x.shape[-1])


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4", "e4m3", "e5m2"])
def test_what_is_packed_unpacks_with_other_leading_sizes(name):
    codec, x = build_codec(CodecSpec(name, block=32)), draw(9, 2, 3, 50)
    payload = codec.encode_once(x)
    packed = pack(payload, 2)
    assert (packed.dtype, packed.shape) == (jnp.uint8, (2, 3, wire_bytes(codec, 50)))
    found = codec.decode(unpack(packed, payload), 50)
    np.testing.assert_array_equal(found, decoded(codec, x))
    twice = jnp.concatenate([packed, packed], axis=1)
    assert codec.decode(unpack(twice, payload), 50).shape == (2, 6, 50)


def test_a_config_names_each_codec():
    assert build_codec(CodecSpec("int4", feedback=True)) == ErrorFeedback(Blocks("int4"))
    assert build_codec(CodecSpec("loco")).reset == 512
