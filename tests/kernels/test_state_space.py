"""The state space dual form in chunks, beside a loop over positions."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.kernels.state_space import state_space, state_space_step
from tests.cases import few
from tests.oracle_state_space import states_by_position

EPSILON = np.finfo(np.float32).eps


def operands(length, heads=(1, 2), seed=0, fade="any"):
    """Queries, keys, values, decays and a state of two sequences, and their documents."""
    rng = np.random.default_rng(seed)
    (G, H), C, V = heads, 4, 3
    q, k = (rng.standard_normal((2, length, G, C)) / 2 for _ in range(2))
    shape = (2, length, H)
    g = {
        "any": -np.exp(rng.standard_normal(shape) * 2 - 2),
        "none": np.zeros(shape),
        # Tokens that forget all, among tokens that forget little.
        "all": np.where(rng.random(shape) < 0.3, -1e4, -1e-3),
        # As much at each position as leaves some of it a few positions on, and 0 at a chunk's end.
        "much": rng.uniform(-9, -3, shape),
    }[fade]
    segment = np.cumsum(rng.random((2, length)) < 0.1, axis=1).astype(np.int32)
    values = rng.standard_normal((2, length, H, V))
    arrays = [q, k, values, g, rng.standard_normal((2, H, C, V))]
    return [jnp.asarray(x, jnp.float32) for x in arrays], jnp.asarray(segment)


@functools.cache
def with_gradients(chunk):
    """The results of `state_space`, or of the loop, and gradients of all its inputs."""
    form = partial(state_space, chunk=chunk) if chunk else states_by_position

    @jax.jit
    def both(inputs, segment, weights):
        out, pull = jax.vjp(lambda *x: form(*x[:4], segment, x[4]), *inputs)
        return out, pull(weights)

    return both


def check(length, chunk, seed, fade):
    inputs, segment = operands(length, seed=seed, fade=fade)
    rng = np.random.default_rng(seed)
    weights = tuple(jnp.asarray(rng.standard_normal(inputs[i].shape), "f") for i in (2, 4))
    got = with_gradients(chunk)(inputs, segment, weights)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (inputs, weights))
        wanted = with_gradients(None)(exact[0], segment, exact[1])
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        # Sums over positions, of terms that sums over positions made.
        bound = 4 * (length + 16) * EPSILON * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


FADES = st.sampled_from(["any", "none", "all", "much"])


@pytest.mark.parametrize(("length", "chunk"), [(70, 32), (9, 16)])
@few(8)
@given(fade=FADES, seed=st.integers(0, 99))
def test_chunks_give_values_and_gradients_of_a_loop(length, chunk, fade, seed):
    check(length, chunk, seed, fade)


@pytest.mark.slow
@few(30)
@given(
    length=st.integers(1, 200),
    chunk=st.sampled_from([1, 16, 24, 64]),
    fade=FADES,
    seed=st.integers(0, 99),
)
def test_chunks_of_any_size_give_values_and_gradients_of_a_loop(length, chunk, fade, seed):
    check(length, chunk, seed, fade)


@jax.jit
def in_chunks(arrays, segment=None, state=None):
    return state_space(*arrays, segment, state, chunk=16)


def test_a_text_in_parts_gives_the_whole_texts_result():
    """Parts of any lengths, each behind the state before it; then position by position."""
    (*arrays, state), _ = operands(40, heads=(2, 4))
    whole, last = in_chunks(arrays, state=state)
    parts, now = [], state
    for first, stop in ((0, 5), (5, 37)):
        y, now = in_chunks([x[:, first:stop] for x in arrays], state=now)
        parts.append(y)
    step = jax.jit(state_space_step)
    for t in range(37, 40):
        y, now = step(*(x[:, t] for x in arrays), now)
        parts.append(y[:, None])
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=200 * EPSILON)
    np.testing.assert_allclose(now, last, atol=200 * EPSILON)


def test_bfloat16_changes_results_by_its_rounding_alone():
    (*arrays, state), segment = operands(70)
    exact, _ = in_chunks(arrays, segment, state)
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays[:3])
    rounded, last = in_chunks([q, k, v, arrays[3]], segment, state)
    assert rounded.dtype == last.dtype == jnp.float32
    # Some eight roundings on the way of a value, independent of each other.
    off = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 0 < off < np.sqrt(8) * 2.0**-8
