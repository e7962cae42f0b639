"""Choice of keys by an indexer, and attention to those chosen, beside plain numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.attention import chosen

T = S = 150  # two blocks of queries, the second not full
B, I, J, H, Z, V = 2, 5, 6, 3, 7, 4


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Q, WEIGHT, KEY = drawn(B, T, I, J), drawn(B, T, I, seed=1), drawn(B, S, J, seed=2)
# Two documents: the second sequence's begins in a block.
FIRST = np.stack([np.zeros(T, int), np.where(np.arange(T) < 61, 0, 61)])
LAST = np.broadcast_to(np.arange(T), (B, T))


def scores():
    each = np.maximum(np.einsum("btij,bsj->btis", Q, KEY, dtype=np.float64), 0)
    return np.einsum("btis,bti->bts", each, WEIGHT)


@pytest.mark.parametrize("count", [1, 8, S])
def test_the_keys_with_the_highest_scores_are_chosen(count):
    place = np.asarray(chosen.choose(*map(jnp.asarray, (Q, WEIGHT, KEY, FIRST, LAST)), count))
    score = scores()
    for b, t in np.ndindex(B, T):
        seen = np.arange(FIRST[b, t], t + 1)
        best = seen[np.argsort(-score[b, t, seen], kind="stable")][:count]
        own = place[b, t]
        assert set(own[own >= 0]) == set(best)
        assert np.sum(own < 0) == count - len(best)


def test_scores_of_chosen_keys_are_those_of_the_choice():
    place = np.array([[3, 0, -1], [149, 2, 7]])
    arrays = (Q[0, :2], WEIGHT[0, :2], KEY[0], place)
    found = np.asarray(chosen.index_scores(*map(jnp.asarray, arrays)))
    wanted = np.take_along_axis(scores()[0, :2], np.maximum(place, 0), axis=1)
    np.testing.assert_allclose(found[place >= 0], wanted[place >= 0], rtol=1e-5)
    assert found[0, 2] < -1e29


def test_attention_and_its_gradients_are_those_over_the_chosen_alone():
    q, entry = drawn(B, T, H, Z), drawn(B, S, Z, seed=3)
    place = chosen.choose(*map(jnp.asarray, (Q, WEIGHT, KEY, FIRST, LAST)), 8)
    mask = np.zeros((B, T, S + 1), bool)
    np.put_along_axis(mask, np.asarray(place), True, axis=2)  # none: the last, which is cut off
    mask, weight = mask[..., :S], drawn(B, T, H, V, seed=4)

    def ours(q, entry):
        def block(q, place, entry):
            return chosen.attend_chosen(q, entry, place, values=V, scale=0.3)[0]

        y = chosen.by_blocks(block, (q, place), (entry,))
        return jnp.sum(y * weight), y

    def plain(q, entry):
        score = jnp.where(mask[:, :, None], jnp.einsum("bthz,bsz->bths", q, entry) * 0.3, -1e30)
        y = jnp.einsum("bths,bsv->bthv", jax.nn.softmax(score), entry[..., :V])
        return jnp.sum(y * weight), y

    with jax.enable_x64(True):
        arrays = np.float64(q), np.float64(entry)
        wanted = jax.grad(plain, argnums=(0, 1), has_aux=True)(*arrays)
        wanted = jax.tree.map(np.asarray, wanted)
    found = jax.grad(ours, argnums=(0, 1), has_aux=True)(q, entry)
    for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-5 * np.abs(want).max())
