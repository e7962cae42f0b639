"""Codecs: what is sent and what is kept add up; nothing broken is hidden; bytes are all counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.comm.codecs.adaptive import AdaptiveCodec, choose_level
from moejax.comm.codecs.build import build_codec
from moejax.comm.codecs.codec import Blocks, Cast, EncodeContext
from moejax.comm.codecs.feedback import ErrorFeedback
from moejax.comm.codecs.low_rank import LowRank
from moejax.comm.codecs.pack import decode_packed, encode_packed
from moejax.comm.codecs.topk import TopK
from moejax.config.compression import CodecSpec

EPS = np.finfo(np.float32).eps
FIRST = EncodeContext(jnp.int32(0), jax.random.key(0))
LOCO = ErrorFeedback(Blocks("int4"), average=0.5, stored="e4m3", reset=4)
CODECS = {
    "bfloat16": Cast(),
    "int8": Blocks("int8"),
    "int4": Blocks("int4", stochastic=True),
    "e4m3": Blocks("e4m3"),
    "e5m2": Blocks("e5m2"),
    "topk": TopK(0.05),
    "int4, feedback": ErrorFeedback(Blocks("int4")),
    "topk, feedback": ErrorFeedback(TopK(0.05, refresh=3)),
    "adaptive": AdaptiveCodec((Blocks("int8"), TopK(0.05)), level=1, measures=True),
    "loco": LOCO,
}
codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def first_state(codec, x):
    return jnp.zeros((*x.shape[:-1], codec.state_size(x.shape[-1])), jnp.float32)


def at(step):
    return FIRST._replace(step=jnp.int32(step))


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
    assert sum(leaf.nbytes for leaf in leaves) == 6 * codec.wire_bytes(size)
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
    if getattr(codec, "stochastic", False):
        pytest.skip("draws differ with the shape")
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
        payload, state = codec.encode(x, state, at(step))
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
    inner=st.sampled_from(["int8", "topk"]),
)
def test_sent_and_kept_add_up_to_what_was_to_be_sent(seed, size, inner):
    codec, encode, decode = with_feedback(inner)
    state, sent, true = first_state(codec, draw(0, 1, size)), np.zeros(size), np.zeros(size)
    largest = 0.0
    for step in range(6):
        x = draw(seed + step, 1, size)
        payload, state = encode(x, state, at(step))
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
        payload, state = codec.encode(x, state, at(step))
        sent += float(codec.decode(payload, 128)[0, 1])
    # One step of the format is left at most.
    assert abs(sent / 100 - 0.01) <= 1 / 7 / 100 + 1e-6


def test_loco_keeps_a_byte_a_value_and_forgets_in_time():
    x = draw(3, 2, 1280)
    state = first_state(LOCO, x)
    assert state.nbytes == 2 * (1280 + 4 * 10)
    kept = []
    for step in range(8):
        _, state = LOCO.encode(x, state, at(step))
        kept.append(np.asarray(LOCO._load(state, 1280)))
    assert [bool(k.any()) for k in kept] == [True, True, True, False] * 2
    # The first error is halved by the moving average, and kept within e4m3's bound.
    first, _ = Blocks("int4").encode(x, first_state(Blocks("int4"), x), FIRST)
    wanted = 0.5 * np.asarray(x - Blocks("int4").decode(first, 1280))
    assert np.all(
        np.abs(kept[0] - wanted) <= np.abs(wanted) * 2**-4 + np.abs(wanted).max() * 2**-18
    )


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_fitted_threshold_keeps_about_the_share(spread):
    """Exponential magnitudes are what one fit assumes; log-normal tails need the second."""
    rng = np.random.default_rng(5)
    x = rng.laplace(size=(1, 100_000)) * np.exp(spread * rng.standard_normal((1, 100_000)))
    codec = TopK(0.01, capacity_factor=8.0)
    (values, places), _ = codec.encode(jnp.asarray(x, jnp.float32), jnp.zeros((1, 2)), FIRST)
    count = int((np.asarray(places) < 100_000).sum())
    assert 0.005 < count / 100_000 < 0.03
    kept = np.sort(np.asarray(places)[0, :count])
    largest = np.sort(np.argsort(-np.abs(x[0]))[:count])
    # Rounding to float32 may swap neighbours at the threshold.
    assert len(np.intersect1d(kept, largest)) >= count - 1
    np.testing.assert_allclose(np.asarray(values, np.float32)[0, :count], x[0, kept], rtol=2**-8)


def test_what_finds_no_room_is_counted_and_the_threshold_ages():
    codec = TopK(0.1, refresh=3, capacity_factor=1.0)
    x = jnp.asarray(np.random.default_rng(6).laplace(size=(1, 1000)), jnp.float32)
    _, state = codec.encode(x, jnp.zeros((1, 2)), FIRST)
    first = float(state[0, 0])
    (_, places), state = codec.encode(10 * x, state, at(1))  # far too many are above it now
    assert float(state[0, 0]) == first
    above = int((np.abs(10 * np.asarray(x)) > first).sum())
    assert int((np.asarray(places) < 1000).sum()) == codec.capacity(1000) == 100
    assert float(state[0, 1]) >= above - 100
    _, state = codec.encode(10 * x, state, at(3))
    np.testing.assert_allclose(float(state[0, 0]), 10 * first, rtol=1e-5)


@pytest.mark.slow
def test_an_adaptive_codec_notes_what_each_level_would_leave_out():
    levels = (Blocks("int8"), Blocks("int4"), TopK(0.01))
    x = draw(4, 3, 1024)
    notes = []
    for level in range(3):
        codec = AdaptiveCodec(levels, level, measures=True)
        payload, state = codec.encode(x, first_state(codec, x), FIRST)
        np.testing.assert_array_equal(
            codec.decode(payload, 1024), decoded(levels[level], x), err_msg=f"level {level}"
        )
        notes.append(np.asarray(codec.squared_errors(state)))
    wanted = [np.square(np.asarray(x - decoded(level, x), np.float64)).sum() for level in levels]
    wanted.append(np.square(np.asarray(x, np.float64)).sum())
    for note in notes:  # whichever is taken
        np.testing.assert_allclose(note, wanted, rtol=1e-4)
    # Between measurements the notes stay.
    codec = AdaptiveCodec(levels, 0)
    _, after = codec.encode(2 * x, state, at(1))
    np.testing.assert_array_equal(codec.squared_errors(after), notes[-1])


def test_an_adaptive_codec_measures_what_it_sends_with_the_error_that_it_kept():
    """No gradient comes, so all that is sent is what was left out before."""
    codec, kept = AdaptiveCodec((Blocks("int8"), TopK(0.01)), measures=True), draw(4, 3, 1024)
    nothing = jnp.zeros_like(kept)
    state = first_state(codec, nothing).at[..., :1024].set(kept)
    _, after = codec.encode(nothing, state, FIRST)
    wanted = [np.square(np.asarray(kept - decoded(level, kept))).sum() for level in codec.levels]
    wanted.append(np.square(np.asarray(kept)).sum())
    np.testing.assert_allclose(codec.squared_errors(after), wanted, rtol=1e-4)


def decoded(codec, x):
    return codec.decode(codec.encode(x, first_state(codec, x), FIRST)[0], x.shape[-1])


@pytest.mark.parametrize(
    ("left", "level"), [((0.0, 0.05, 0.4), 1), ((0.0, 0.0, 0.1), 2), ((0.2, 0.3, 0.9), 0)]
)
def test_the_strongest_level_that_keeps_enough_is_chosen(left, level):
    squared_errors = jnp.array([*left, 1.0])
    assert int(choose_level(squared_errors, 0.9 - 1e-6)) == level


def test_of_zeros_every_level_keeps_all():
    assert int(choose_level(jnp.zeros(4), 0.9)) == 2


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4", "e4m3", "e5m2"])
def test_what_is_packed_unpacks_with_other_leading_sizes(name):
    codec, x = build_codec(CodecSpec(name, block=32)), draw(9, 2, 3, 50)
    packed, payload = encode_packed(codec, x)
    assert (packed.dtype, packed.shape) == (jnp.uint8, (2, 3, codec.wire_bytes(50)))
    np.testing.assert_array_equal(decode_packed(codec, packed, payload, 50), decoded(codec, x))
    twice = jnp.concatenate([packed, packed], axis=1)
    assert decode_packed(codec, twice, payload, 50).shape == (2, 6, 50)


def test_a_config_names_each_codec():
    assert build_codec(CodecSpec("topk", 0.01, feedback=True)) == ErrorFeedback(TopK(0.01))
    assert build_codec(CodecSpec("powersgd", 4.0)) == LowRank(4)
    levels = (CodecSpec("int8", block=64), CodecSpec("topk", 0.1))
    adaptive = build_codec(CodecSpec("adaptive", 0.9, levels=levels, level=1, measures=True))
    assert adaptive == AdaptiveCodec((Blocks("int8", 64), TopK(0.1)), 1, measures=True)
    assert build_codec(CodecSpec("loco")).reset == 512
