"""Attention of slices of a sequence against that of the whole, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.kernels.attention.attention import attention, sliced_attention
from tests.cases import few
from tests.kernels.attention.test_attention import operands
from tests.kernels.attention.test_ranged import dense


def by_slices(arrays, segment, slices, sinks, **form):
    """As `attention`, slice by slice; what later positions hold of past keys is junk."""
    q, k, v = arrays
    T = q.shape[1] // slices
    past = [jnp.full(x.shape, 7.0, x.dtype) for x in (k, v)]
    results = []
    for number in range(slices):
        own = [x[:, number * T : (number + 1) * T] for x in (q, k, v)]
        results.append(
            sliced_attention(*own, tuple(past), segment, jnp.int32(number), sinks_H=sinks, **form)
        )
        here = slice(number * T, (number + 1) * T)
        past = [x.at[:, here].set(y) for x, y in zip(past, own[1:], strict=True)]
    return jnp.concatenate(results, axis=1)


@pytest.mark.exhaustive
@few(8)
@given(
    slices=st.sampled_from([1, 2, 3, 4]),
    own=st.sampled_from([1, 6, 70]),
    window=st.sampled_from([None, 1, 5, 90]),
    sinks=st.booleans(),
    implementation=st.sampled_from(["blocked", "reference"]),
    seed=st.integers(0, 99),
)
def test_slices_are_the_whole_in_parts(slices, own, window, sinks, implementation, seed):
    (*arrays, dy), segment = operands(slices * own, 4, 2, seed=seed, values=4)
    sinks = jnp.asarray(np.random.default_rng(seed).standard_normal(4)) if sinks else None
    form = {"window": window, "scale": 0.7, "implementation": implementation}

    def whole(arrays, sinks):
        return attention(*arrays, segment, sinks_H=sinks, **form | {"implementation": "reference"})

    def parts(arrays, sinks):
        return by_slices(arrays, segment, slices, sinks, **form)

    @jax.jit
    def both(arrays, sinks, dy):
        return [(y, pull(dy)) for y, pull in (jax.vjp(f, arrays, sinks) for f in (whole, parts))]

    wanted, got = both(arrays, sinks, dy)
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        bound = 8 * slices * own * np.finfo(np.float32).eps * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


@pytest.mark.parametrize("implementation", ["blocked", "reference"])
def test_past_has_gradients_of_earlier_positions_alone(implementation):
    """What it holds at the slice's own positions and behind counts for nothing."""
    (q, k, v, dy), segment = operands(12, 4, 2)
    segment, form = jnp.zeros_like(segment), {"window": None, "scale": 0.5}

    @jax.jit
    def pulled(number, *own):
        def attend(past):
            options = form | {"implementation": implementation}
            return sliced_attention(*own[:3], past, segment, number, **options)

        return jax.vjp(attend, (k, v))[1](own[3])[0]

    for number in range(3):
        own = slice(4 * number, 4 * number + 4)
        got = pulled(jnp.int32(number), *(x[:, own] for x in (q, k, v, dy)))
        *exact, d_own = (np.asarray(x, np.float64) for x in (q[:, own], k, v, dy[:, own]))
        seen = np.arange(4 * number, 4 * number + 4)[:, None] >= np.arange(12)
        _, _, *wanted, _ = dense(*exact, np.full(4, -np.inf), seen[None], 0.5, d_own)
        for have, want in zip(got, wanted, strict=True):
            want[:, own.start :] = 0
            assert not np.any(np.asarray(have)[:, own.start :])
            assert np.any(np.asarray(have)) == (number > 0)
            np.testing.assert_allclose(have, want, atol=1e-5)


def test_a_kernel_that_wants_whole_sequences_says_so():
    (q, k, v, _), segment = operands(8, 4, 2)
    with pytest.raises(ValueError, match="takes queries of all positions"):
        attention(q[:, :4], k, v, segment, window=None, implementation="cudnn")
