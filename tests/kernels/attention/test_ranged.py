"""Attention to ranges of keys, whole and in pieces, against every pair at once in float64."""

from functools import partial
from itertools import pairwise, product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moejax
from moejax.kernels.attention import blocked
from moejax.kernels.attention.attention import attention
from moejax.kernels.attention.ranged import Extent, Keys, ranged_attention, ranges
from moejax.runtime.patches import described_gpu
from tests.cases import few


def dense(q, k, v, sinks, seen, scale, dy):
    """The formula in float64: softmax over the keys that each query sees, and sinks.

    Returns the result and gradients of q, k, v and sinks, worked out by hand.
    """
    heads = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, heads, axis=2) for x in (k, v))
    weight = np.exp(scale * np.einsum("bthc,bshc->bhts", q, k)) * seen[:, None]
    sink = np.broadcast_to(np.exp(sinks)[:, None, None], weight[..., :1].shape)
    total = weight.sum(axis=-1, keepdims=True) + sink
    weight, sink = (x / np.where(total > 0, total, 1) for x in (weight, sink))
    d_weight = np.einsum("bthc,bshc->bhts", dy, v)
    mean = np.sum(weight * d_weight, axis=-1, keepdims=True)
    d_score = scale * weight * (d_weight - mean)
    d_k = np.einsum("bhts,bthc->bshc", d_score, q)
    d_v = np.einsum("bhts,bthc->bshc", weight, dy)
    d_k, d_v = (x.reshape(*x.shape[:2], -1, heads, x.shape[3]).sum(axis=3) for x in (d_k, d_v))
    y = np.einsum("bhts,bshc->bthc", weight, v)
    d_q = np.einsum("bhts,bshc->bthc", d_score, k)
    return y, d_q, d_k, d_v, -np.sum(sink * mean, axis=(0, 2, 3))


@few(3)
@given(
    length=st.sampled_from([1, 66, 130]),
    queries=st.sampled_from([1, 7, 70]),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    window=st.sampled_from([None, 1, 6, 90]),
    sinks=st.sampled_from([-np.inf, -10.0, 0.0, 10.0]),
    seed=st.integers(0, 99),
)
def test_pieces_in_any_order_of_queries_are_the_whole(length, queries, cuts, window, sinks, seed):
    """Documents, windows, pieces of no key, and queries that see none of a piece or none at all."""
    rng = np.random.default_rng(seed)
    shapes = (queries, 4, 8), (length, 2, 8), (length, 2, 4), (queries, 4, 4)
    q, k, v, dy = (rng.standard_normal((2, *shape)) for shape in shapes)
    segment = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1), jnp.int32)
    position = rng.integers(0, length, queries)
    first, last = (np.array(x) for x in ranges(segment, jnp.asarray(position), window))
    last[:, 0] = -1  # sees nothing
    place = np.arange(length)
    seen = (place >= first[..., None]) & (place <= last[..., None])
    documents = np.asarray(segment)
    back = position[:, None] - place
    wanted = (back >= 0) & (documents[:, None] == documents[:, position][..., None])
    wanted &= True if window is None else back < window
    np.testing.assert_array_equal(seen[:, 1:], wanted[:, 1:])

    borders = sorted({0, length, *(round(cut * length) for cut in cuts)})
    parts = list(pairwise(borders))

    def ours(q, k, v, sinks):
        pieces = tuple(
            Keys(k[:, a:b], v[:, a:b], jnp.maximum(first - a, 0), last - a) for a, b in parts
        )
        pieces = tuple(
            one._replace(last_BT=jnp.minimum(one.last_BT, b - a - 1))
            for one, (a, b) in zip(pieces, parts, strict=True)
        )
        options = {"scale": 0.7, "implementation": "blocked"}
        extents = (Extent((0,), None, None),) * len(pieces)
        return ranged_attention(q, pieces, extents, sinks_H=sinks, **options)

    @jax.jit
    def both(dy, *inputs):
        y, pull = jax.vjp(ours, *inputs)
        return y, *pull(dy)

    given_sinks = None if sinks == -np.inf else jnp.full(4, sinks, jnp.float32)
    low = [jnp.asarray(x, jnp.float32) for x in (dy, q, k, v)]
    got = both(*low, given_sinks)
    want = dense(q, k, v, np.full(4, sinks), seen, 0.7, dy)
    assert not np.any(np.asarray(got[0])[:, 0])
    for have, exact in zip(got, want[: len(got)], strict=False):
        if have is not None:
            np.testing.assert_allclose(have, exact, rtol=0, atol=2e-5 * max(1, np.abs(exact).max()))


def test_far_blocks_and_low_scores_are_no_nan():
    """A query whose first blocks are all masked, and one whose scores are below every mask's."""
    q = jnp.full((1, 600, 1, 8), 1e4)
    k, v = -q[:, :, :, :], jnp.ones((1, 600, 1, 8))
    first = jnp.maximum(jnp.arange(600) - 2, 0)[None]
    keys = Keys(k, v, first, jnp.arange(600)[None])
    options = {"scale": 1.0, "implementation": "blocked"}
    y, pull = jax.vjp(lambda q: ranged_attention(q, (keys,), (Extent((0,), 3, 3),), **options), q)
    np.testing.assert_allclose(y, np.ones(y.shape), atol=1e-6)
    assert np.all(np.isfinite(pull(y)[0]))
    assert -blocked.LOWEST > 8e8  # the scores of this case are above where maxima begin


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("before", [False, True])
def test_pairs_are_counted_as_they_are_seen(window, before):
    """Eight queries in two stripes, which may begin at two places of twelve keys."""
    starts, run, keys = (0, 6), 4, 12

    def seen(start, row, key):
        position = start + row
        near = window is None or key > position - window
        return near and key <= position and (key < start or not before)

    pairs = [seen(*one) for one in product(starts, range(run), range(keys))]
    extent = Extent(starts, window, window, before=before, run=run)
    assert extent.visits(2 * run, keys) == sum(pairs)  # the mean of two places, for two stripes


def test_pairs_across_documents_are_not_counted_where_their_share_is_known():
    """Of 36 pairs a quarter lies inside documents; a window's pairs are counted as they are."""
    assert Extent((0,), None, None, inside=0.25).visits(8, 8) == 9
    assert Extent((0,), 2, 2, inside=0.25).visits(8, 8) == Extent((0,), 2, 2).visits(8, 8) == 15


def test_nobody_differentiates_the_log_that_jax_returns(monkeypatch):
    """Its gradient is dropped by cuDNN, and not on a CPU: right here, wrong there."""
    for path in Path(moejax.__file__).parent.rglob("*.py"):
        assert "return_residual=" not in path.read_text(), path
    asked, library = [], jax.nn.dot_product_attention

    def watched(*arrays, **options):
        asked.append(options)
        return library(*arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", watched)
    x, segment = jnp.ones((1, 64, 2, 64), jnp.bfloat16), jnp.zeros((1, 64), jnp.int32)
    with described_gpu():
        for name in ("cudnn", "cudnn_masked", "reference"):
            attend = partial(attention, window=None, implementation=name)
            jax.eval_shape(jax.grad(lambda q, f=attend: jnp.sum(f(q, x, x, segment))), x)
    assert len(asked) == 3
    assert not any("residual" in option for options in asked for option in options)
