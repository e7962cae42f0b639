"""Which bucket row each token travels in: every item has one, none is shared, order is kept."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.comm.tokens.buckets import experts_of_slots, order_items, place_items, rank_items


@st.composite
def routings(draw):
    """Tokens to distinct experts, as skewed as hypothesis likes; E stands for a dropped choice.

    Always 12 tokens, the last of them dropped whole: every number of rows would compile anew.
    """
    E = draw(st.sampled_from([2, 4, 8]))
    K = draw(st.integers(1, min(3, E)))
    token = st.permutations(range(E)).map(lambda order: order[:K])
    expert_NK = np.array(draw(st.lists(token, min_size=1, max_size=12)))
    dropped = draw(st.lists(st.booleans(), min_size=expert_NK.size, max_size=expert_NK.size))
    expert_NK = np.where(np.reshape(dropped, expert_NK.shape), E, expert_NK)
    return np.pad(expert_NK, ((0, 12 - len(expert_NK)), (0, 0)), constant_values=E), E


# Two experts to a peer: so a token may visit one peer twice, which is what merging is for.
to_peers = routings().map(lambda case: (case[0] // 2, case[1] // 2))


def first_of_its_peer(peer_NK, n, k):
    return peer_NK[n, k] not in peer_NK[n, :k]


@pytest.mark.slow
@given(to_peers, st.booleans())
def test_ranks_number_the_items_of_each_peer_in_row_order(case, merge):
    peer_NK, P = case
    ranked = rank_items(jnp.asarray(peer_NK), peers=P, merge=merge)
    item_NK, rank_NK, counts_P = ranked.peer_MK, ranked.rank_MK, ranked.counts_P
    seen = [0] * (P + 1)
    for n, k in np.ndindex(peer_NK.shape):
        peer = peer_NK[n, k]
        if peer == P or (merge and not first_of_its_peer(peer_NK, n, k)):
            assert item_NK[n, k] == P
            continue
        assert (item_NK[n, k], rank_NK[n, k]) == (peer, seen[peer])
        seen[peer] += 1
    np.testing.assert_array_equal(counts_P, seen[:P])


def test_merging_counts_a_token_once_for_each_peer():
    """Choices that share a peer need not stand together."""
    choices = jnp.array([[0, 1, 0], [1, 1, 1]])
    ranked = rank_items(choices, peers=2, merge=True)
    item_NK, rank_NK, counts_P = ranked.peer_MK, ranked.rank_MK, ranked.counts_P
    np.testing.assert_array_equal(counts_P, [1, 2])
    # As the first of them; 2 stands for none.
    np.testing.assert_array_equal(item_NK, [[0, 1, 2], [1, 2, 2]])
    assert (rank_NK[0, 0], rank_NK[0, 1], rank_NK[1, 0]) == (0, 0, 1)


@settings(max_examples=40)
@given(to_peers, st.sampled_from([1, 2, 3]), st.booleans())
def test_every_item_gets_a_slot_of_its_own_in_its_peers_bucket(case, parts, merge):
    peer_NK, P = case
    rows = -(-peer_NK.size // parts)
    places = place_items(jnp.asarray(peer_NK), peers=P, rows=rows, parts=parts, merge=merge)
    slot_NK, item_of_slot = np.asarray(places.slot_MK), np.asarray(places.item_of_slot)
    slots = parts * P * rows
    filled = np.zeros((parts, P), int)
    for n, k in np.ndindex(peer_NK.shape):
        peer, slot = peer_NK[n, k], slot_NK[n, k]
        if peer == P or (merge and not first_of_its_peer(peer_NK, n, k)):
            assert slot == slots
            continue
        assert slot // rows % P == peer
        assert item_of_slot[slot] == n * peer_NK.shape[1] + k
        filled[slot // (P * rows), peer] += 1
    assert np.sum(item_of_slot < peer_NK.size) == filled.sum() == len(set(slot_NK[slot_NK < slots]))
    assert np.all(filled.max(axis=0) - filled.min(axis=0) <= 1), "parts are dealt to in turn"


@pytest.mark.slow
@given(routings(), st.sampled_from([1, 2, 3]))
def test_parts_by_expert_are_equally_full_runs_of_the_sorted_items(case, parts):
    """So that a chunk meets few experts. Two experts to a peer."""
    expert_NK, E = case
    P, rows = E // 2, -(-expert_NK.size // parts)
    places = place_items(
        jnp.minimum(jnp.asarray(expert_NK) // 2, P),
        peers=P,
        rows=rows,
        parts=parts,
        expert_MK=jnp.asarray(expert_NK),
    )
    expert_A = np.append(expert_NK.reshape(-1), E)
    expert_IPJ = expert_A[np.asarray(places.item_of_slot)].reshape(parts, P, rows)
    for peer in range(P):
        runs = [[int(e) for e in part if e < E] for part in expert_IPJ[:, peer]]
        wanted = sorted(int(e) for e in expert_A if e // 2 == peer)
        assert [e for run in runs for e in run] == wanted
        assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(routings())
def test_items_are_sorted_by_group_without_gaps(case):
    group_MK, G = case
    places, sizes_G = order_items(jnp.asarray(group_MK), groups=G, rows=group_MK.size)
    kept = np.sort(group_MK[group_MK < G])
    np.testing.assert_array_equal(sizes_G, np.bincount(kept, minlength=G))
    item_of_slot = np.asarray(places.item_of_slot)[: kept.size]
    np.testing.assert_array_equal(group_MK.reshape(-1)[item_of_slot], kept)
    assert np.all(np.diff(item_of_slot)[np.diff(kept) == 0] > 0), "in row order within a group"
    assert np.all(np.asarray(places.item_of_slot)[kept.size :] == group_MK.size)


@pytest.mark.slow
@given(routings(), st.sampled_from([1, 2]), st.sampled_from([1, 3]), st.booleans())
def test_a_bucket_row_knows_the_experts_it_visits(case, per_peer, parts, merge):
    expert_NK, E = case
    P, rows = E // per_peer, expert_NK.size // parts
    peer_NK = jnp.minimum(expert_NK // per_peer, P)
    places = place_items(peer_NK, peers=P, rows=rows, parts=parts, merge=merge)
    choice_Sk = np.asarray(
        experts_of_slots(
            jnp.asarray(expert_NK), places, peers=P, rows=rows, per_peer=per_peer, merge=merge
        )
    )
    item_of_slot = np.asarray(places.item_of_slot)
    visits = sorted(
        (int(item_of_slot[s]) // expert_NK.shape[1], s // rows % P * per_peer + int(choice))
        for s in range(parts * P * rows)
        for choice in choice_Sk[s]
        if choice < per_peer
    )
    wanted = [(n, int(e)) for n in range(len(expert_NK)) for e in expert_NK[n] if e < E]
    assert visits == sorted(wanted)
