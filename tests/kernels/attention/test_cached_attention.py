"""Attention to a cache against attention over whole sequences."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.attention import cached_attention as module
from moejax.kernels.attention.attention import attention
from moejax.kernels.attention.cached_attention import cached_attention, put
from moejax.kernels.attention.ranged import PartialAttention, join_sinks


@pytest.mark.slow
@pytest.mark.parametrize("keys", [512, 4], ids=["one block", "three blocks"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1)])
def test_queries_attend_as_in_the_whole_sequence(monkeypatch, keys, window, sinks, heads, groups):
    """Rows of two tokens, behind texts of several lengths; the cache keeps places in any order."""
    monkeypatch.setattr(module, "KEYS", keys)
    draw = np.random.default_rng(0)
    B, S, C, V = 3, 12, 6, 4

    def random(*shape):
        return jnp.asarray(draw.standard_normal(shape), jnp.float32)

    q, k, v = random(B, S, heads, C), random(B, S, groups, C), random(B, S, groups, V)
    sinks_H = random(heads) if sinks else None
    form = {"window": window, "scale": 0.3}
    segment_BT = jnp.zeros((B, S), jnp.int32)
    whole = attention(q, k, v, segment_BT, implementation="reference", sinks_H=sinks_H, **form)
    position_RT = jnp.array([[0, 1], [10, 11], [4, 5]])
    rows = jnp.arange(B)[:, None]
    # Each row's positions lie turned around; a place behind the newest has none.
    position_RS = (jnp.arange(S) + jnp.array([[0], [5], [0]])) % S
    position_RS = jnp.where(position_RS <= position_RT[:, 1:], position_RS, -1)
    place_RS = jnp.maximum(position_RS, 0)
    kept = (jnp.moveaxis(x[rows, place_RS], 2, 1) for x in (k, v))
    found = cached_attention(
        q[rows, position_RT], *kept, position_RT, position_RS, jnp.array(S), **form
    )
    found = join_sinks(PartialAttention(*found), sinks_H).y_BTHV
    np.testing.assert_allclose(found, whole[rows, position_RT], rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_gets_zeros():
    ones, none = jnp.ones((1, 1, 8, 2)), jnp.full((1, 8), -1)
    y, log = cached_attention(
        ones[:, :, :1], ones, ones, none[:, :1], none, jnp.array(0), window=None, scale=1.0
    )
    assert not y.any()
    assert log[0, 0, 0] < -1e29


def test_entries_are_put_at_their_places():
    entries = jnp.array([[[[1.0, 2.0]], [[3.0, 4.0]]], [[[5.0, 6.0]], [[7.0, 8.0]]]])
    place = jnp.array([[1, 2], [0, 3]])  # the last is no place
    kept = put(jnp.zeros((3, 1, 3, 2)), entries, jnp.array([2, 0]), place)
    wanted = np.zeros((3, 1, 3, 2))
    wanted[2, 0, 1:], wanted[0, 0, 0] = [[1, 2], [3, 4]], [5, 6]
    np.testing.assert_array_equal(kept, wanted)
