"""Attention to a cache against attention over whole sequences."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.attention.attention import attention
from moejax.kernels.attention.cached_attention import cached_attention, put
from moejax.kernels.attention.ranged import PartialAttention, join_sinks


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1)])
def test_a_query_attends_as_in_the_whole_sequence(window, sinks, heads, groups):
    draw = np.random.default_rng(0)
    B, S, C, V = 3, 9, 6, 4

    def random(*shape):
        return jnp.asarray(draw.standard_normal(shape), jnp.float32)

    q, k, v = random(B, S, heads, C), random(B, S, groups, C), random(B, S, groups, V)
    sinks_H = random(heads) if sinks else None
    form = {"window": window, "scale": 0.3}
    segment_BT = jnp.zeros((B, S), jnp.int32)
    whole = attention(q, k, v, segment_BT, implementation="reference", sinks_H=sinks_H, **form)
    position_B = jnp.array([0, 8, 4], jnp.int32)
    rows = jnp.arange(B)
    found = cached_attention(q[rows, position_B], k, v, position_B, jnp.arange(S), **form)
    found = join_sinks(PartialAttention(*found), sinks_H).y_BTHV
    np.testing.assert_allclose(found, whole[rows, position_B], rtol=1e-5, atol=1e-6)


def test_an_entry_is_put_at_its_rows_position():
    entries = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    kept = put(jnp.zeros((3, 3, 2)), entries, jnp.array([2, 0, 2**31 - 1]))
    wanted = [[[0, 0], [0, 0], [1, 2]], [[3, 4], [0, 0], [0, 0]], [[0, 0]] * 3]
    np.testing.assert_array_equal(kept, wanted)
