"""The gated delta rule in chunks, its inverse and its convolution, beside loops over positions."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.kernels.chunks import convolve, next_tail
from moejax.kernels.delta import _inverse, delta_step, gated_delta
from tests.cases import few
from tests.oracle_delta import convolve_by_position, delta_by_position

EPSILON = np.finfo(np.float32).eps


def operands(length, heads=(1, 2), seed=0, fade="any", beta="any", by="head"):
    """Queries, keys, values, decays, betas and a state of two sequences, and their documents.

    Args:
      by: "head" or "channel", of which decays are.
    """
    rng = np.random.default_rng(seed)
    (G, H), C, V = heads, 4, 3
    q, k = (rng.standard_normal((2, length, G, C)) for _ in range(2))
    # A text repeats itself: keys of equal tokens are equal, which is the worst for an inverse.
    k[rng.random((2, length)) < 0.3] = k[0, 0]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    shape = (2, length, H)
    of_g = shape if by == "head" else (2, length, G, C)
    g = {
        "any": -np.exp(rng.standard_normal(of_g) * 2 - 2),
        "none": np.zeros(of_g),
        # Tokens that forget all, among tokens that forget little.
        "all": np.where(rng.random(of_g) < 0.3, -1e4, -1e-3),
        # As much at each position as leaves some of it a few positions on, and 0 at a chunk's end.
        "much": rng.uniform(-9, -3, of_g),
    }[fade]
    beta = {"any": rng.random(shape), "0": np.zeros(shape), "1": np.ones(shape)}[beta]
    segment = np.cumsum(rng.random((2, length)) < 0.1, axis=1).astype(np.int32)
    values = rng.standard_normal((2, length, H, V))
    *arrays, state = (
        jnp.asarray(x, jnp.float32)
        for x in (q, k, values, g, beta, rng.standard_normal((2, H, C, V)))
    )
    return [*arrays, state], jnp.asarray(segment)


@functools.cache
def with_gradients(chunk):
    """The results of `gated_delta`, or of the loop, and gradients of all its inputs."""
    form = partial(gated_delta, chunk=chunk) if chunk else delta_by_position

    @jax.jit
    def both(inputs, segment, weights):
        def forward(*inputs):
            return form(*inputs[:5], segment, inputs[5])

        out, pull = jax.vjp(forward, *inputs)
        return out, pull(weights)

    return both


def check(length, chunk, seed, **extremes):
    (*arrays, state), segment = operands(length, seed=seed, **extremes)
    rng = np.random.default_rng(seed)
    inputs = (*arrays, state)
    weights = tuple(jnp.asarray(rng.standard_normal(x.shape), "f") for x in (arrays[2], state))
    got = with_gradients(chunk)(inputs, segment, weights)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (inputs, weights))
        wanted = with_gradients(None)(exact[0], segment, exact[1])
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        # Sums over positions, of terms that sums over positions made.
        bound = 4 * (length + 16) * EPSILON * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


FADES = st.sampled_from(["any", "none", "all", "much"])
BETAS = st.sampled_from(["any", "0", "1"])


@pytest.mark.parametrize(
    ("length", "chunk", "by"), [(70, 32, "head"), (9, 16, "head"), (70, 32, "channel")]
)
@few(8)
@given(fade=FADES, beta=BETAS, seed=st.integers(0, 99))
def test_chunks_give_values_and_gradients_of_a_loop(length, chunk, by, fade, beta, seed):
    check(length, chunk, seed, fade=fade, beta=beta, by=by)


@pytest.mark.slow
@few(30)
@given(
    length=st.integers(1, 200),
    chunk=st.sampled_from([16, 32, 64, 128]),
    fade=FADES,
    beta=BETAS,
    by=st.sampled_from(["head", "channel"]),
    seed=st.integers(0, 99),
)
def test_chunks_of_any_size_give_values_and_gradients_of_a_loop(
    length, chunk, fade, beta, by, seed
):
    check(length, chunk, seed, fade=fade, beta=beta, by=by)


@jax.jit
def in_chunks(arrays, segment=None, state=None):
    return gated_delta(*arrays, segment, state, chunk=16)


@pytest.mark.parametrize("by", ["head", "channel"])
def test_a_text_in_parts_gives_the_whole_texts_result(by):
    """Parts of any lengths, each behind the state before it; then position by position."""
    (*arrays, state), _ = operands(40, heads=(2, 4), by=by)
    whole, last = in_chunks(arrays, state=state)
    parts, now = [], state
    for first, stop in ((0, 5), (5, 37)):
        y, now = in_chunks([x[:, first:stop] for x in arrays], state=now)
        parts.append(y)
    step = jax.jit(delta_step)
    for t in range(37, 40):
        y, now = step(*(x[:, t] for x in arrays), now)
        parts.append(y[:, None])
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=200 * EPSILON)
    np.testing.assert_allclose(now, last, atol=200 * EPSILON)


def test_positions_that_pad_leave_the_state_as_it_is():
    (q, k, v, g, beta, state), _ = operands(40, heads=(2, 4))
    g, beta = (x.at[:, 37:].set(0) for x in (g, beta))
    _, padded = in_chunks([q, k, v, g, beta], state=state)
    v = v.at[:, 37:].set(7.0)
    np.testing.assert_array_equal(in_chunks([q, k, v, g, beta], state=state)[1], padded)


@pytest.mark.parametrize("by", ["head", "channel"])
def test_bfloat16_changes_results_by_its_rounding_alone(by):
    (*arrays, state), segment = operands(70, by=by)
    exact, _ = in_chunks(arrays, segment, state)
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays[:3])
    rounded, last = in_chunks([q, k, v, *arrays[3:]], segment, state)
    assert rounded.dtype == last.dtype == jnp.float32
    # Some ten roundings on the way of a value, independent of each other.
    off = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 0 < off < np.sqrt(10) * 2.0**-8


@pytest.mark.parametrize("size", [16, 64])
def test_the_inverse_is_exact_where_sums_of_powers_are_not(size):
    """Equal keys, nothing forgotten: powers of the matrix reach 10^18, its inverse has ones."""
    ones = jnp.tril(jnp.ones((size, size)), -1)
    wanted = np.eye(size) - np.eye(size, k=-1)
    np.testing.assert_array_equal(_inverse(ones), wanted)
    drawn = jnp.tril(jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (3, size, size))), -1)
    product = np.asarray(_inverse(0.3 * drawn), np.float64) @ (np.eye(size) + 0.3 * drawn)
    np.testing.assert_allclose(product, np.broadcast_to(np.eye(size), product.shape), atol=1e-5)


@few(3)
@given(length=st.sampled_from([2, 9]), width=st.sampled_from([1, 4]), seed=st.integers(0, 99))
def test_convolution_is_the_sum_over_earlier_positions_of_the_document(length, width, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((2, length, 3, 2)), rng.standard_normal((3, 2, width))
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    segment = np.cumsum(rng.random((2, length)) < 0.2, axis=1)
    got = jax.jit(convolve)(x, w, jnp.asarray(segment, jnp.int32))
    flat = convolve_by_position(x.reshape(2, length, 6), w.reshape(6, width), segment)
    np.testing.assert_allclose(got.reshape(flat.shape), flat, atol=8 * EPSILON)


def test_a_convolution_goes_on_behind_its_tail():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 9, 3, 2), (3, 2, 4)))
    whole, tail = convolve(x, w), jnp.zeros((2, 3, 3, 2))
    counts = jnp.array([2, 4])  # of the second row all
    first = convolve(x[:, :4], w, tail_BYHC=tail)
    np.testing.assert_allclose(first, whole[:, :4], atol=8 * EPSILON)
    tail = next_tail(x[:, :4], tail, counts)
    for row, count in enumerate(counts):
        rest = convolve(x[row, None, count:], w, tail_BYHC=tail[row, None])
        np.testing.assert_allclose(rest[0], whole[row, count:], atol=8 * EPSILON)
