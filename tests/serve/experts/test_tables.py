"""Tables of experts: cases worked out by hand, and what every plan keeps to."""

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.moe import copies
from moejax.serve.experts import tables
from moejax.serve.experts.tables import (
    PLANS,
    SHARES,
    Cluster,
    Table,
    aligned,
    device_loads,
    homes,
    placement,
    plan_table,
    sources,
)

PAIR, NODES = Cluster(1, 2, 1), Cluster(2, 2, 1)


def loads(name, load, cluster):
    return device_loads(plan_table(name, load, cluster), np.array(load, float), cluster)


def test_shares_are_those_of_training():
    assert tables.SHARES == copies.SHARES


def test_homes_stand_in_order_and_slots_get_nothing():
    table = homes(4, PAIR)
    assert table.expert_M.tolist() == [0, 1, -1, 2, 3, -1]
    assert table.share_M.tolist() == [1, 1, 0, 1, 1, 0]


def test_greedy_splits_the_hottest_expert_between_two_devices():
    """Device 0 has 8 + 2, device 1 has 2: 4 of the 8 move."""
    table = plan_table("greedy", [8, 2, 1, 1], PAIR)
    assert table.expert_M.tolist() == [0, 1, -1, 2, 3, 0]
    assert table.share_M.tolist() == [0.5, 1, 0, 1, 1, 0.5]
    assert loads("greedy", [8, 2, 1, 1], PAIR).tolist() == [6, 6]


def test_greedy_passes_a_copy_on():
    """10, 1, 1, 1: halves with device 1 make 5.5, 5.5, 1, 1; each then with one of the others."""
    cluster = Cluster(1, 4, 1)
    assert loads("greedy", [10, 1, 1, 1], cluster) == pytest.approx([3.25] * 4)


def test_by_node_stays_inside_a_node_as_long_as_that_evens_it():
    """Loads 6, 2 | 4, 4: the first node is uneven in itself, and both nodes have 8."""
    load = [6, 2, 4, 4]
    table = plan_table("by_node", load, NODES)
    assert table.expert_M.reshape(4, 2).tolist() == [[0, -1], [1, 0], [2, -1], [3, -1]]
    assert device_loads(table, np.array(load), NODES).tolist() == [4, 4, 4, 4]
    # Greedy sends the hottest to the least busy, which is the neighbour here too; not so here:
    load = [6, 4, 2, 4]
    assert plan_table("greedy", load, NODES).expert_M.reshape(4, 2)[2].tolist() == [2, 0]
    assert plan_table("by_node", load, NODES).expert_M.reshape(4, 2)[1].tolist() == [1, 0]


def test_by_node_goes_across_nodes_with_the_slots_that_are_left():
    """A busy node that is even in itself has all its slots free, and the idle one too."""
    assert loads("by_node", [4, 4, 0, 0], NODES).tolist() == [2, 2, 2, 2]


def test_first_fit_packs_as_lina_does():
    """Devices hold 4 each. Of 6 one device and a half of one; 1 and 1 fit beside the half."""
    table = plan_table("first_fit", [6, 0, 1, 1], PAIR)
    assert table.expert_M.reshape(2, 3).tolist() == [[0, 1, -1], [0, 2, 3]]
    np.testing.assert_allclose(table.share_M, [2 / 3, 1, 0, 1 / 3, 1, 1])
    assert loads("first_fit", [6, 0, 1, 1], PAIR).tolist() == [4, 4]


def test_eplb_copies_by_load_a_copy_and_packs_by_load():
    """Two copies: 8 -> 4 + 4, then 4, 4, 3 -> 3 is not hotter than 4: a third copy, 8 / 3 each."""
    table = plan_table("eplb", [8, 3, 3, 2], PAIR)
    assert sorted(table.expert_M.tolist()) == [0, 0, 0, 1, 2, 3]
    np.testing.assert_allclose(table.share_M[table.expert_M == 0], 1 / 3)
    # Packed: 3 | 3, then 8/3 each, then 8/3 and 2.
    np.testing.assert_allclose(sorted(loads("eplb", [8, 3, 3, 2], PAIR)), [23 / 3, 25 / 3])


def test_a_device_keeps_its_experts_where_they_are():
    new = Table(np.array([3, 0, -1, 1, 2, 0]), np.array([1, 0.5, 0, 1, 1, 0.5]))
    table = aligned(new, np.array([0, 1, 0, 2, 1, 2]), PAIR)
    # Device 0: expert 0 stays, 3 comes to place 1, place 2 keeps what it holds without choices.
    assert table.expert_M.tolist() == [0, 3, 0, 2, 1, 0]
    assert table.share_M.tolist() == [0.5, 1, 0, 1, 1, 0.5]
    from_M = sources(table.expert_M, np.array([0, 1, 0, 2, 3, 2]), PAIR)
    assert from_M.tolist() == [0, 4, 2, 3, 1, 0]


def test_devices_take_the_row_that_they_hold_most_of():
    """Rows 2, 3 and 0, 1 are swapped: nothing moves but expert 0, to a slot."""
    new = Table(np.array([2, 3, 0, 0, 1, -1]), np.array([1, 1, 0.5, 0.5, 1, 0]))
    table = aligned(new, np.array([0, 1, 1, 2, 3, 3]), PAIR)
    assert table.expert_M.tolist() == [0, 1, 1, 2, 3, 0]
    assert table.share_M.tolist() == [0.5, 1, 0, 1, 1, 0.5]


def test_experts_come_from_the_nearest_holder():
    """Expert 9 is on device 0, on device 2 of another node, and in place 1 of device 3."""
    old = np.array([9, 0, 1, 2, 9, 3, 4, 9])
    assert sources(np.array([9, 0, 9, 2, 9, 3, 9, 9]), old, NODES)[[2, 6]].tolist() == [0, 7]


def test_a_placement_counts_shares_up_in_mesh_order():
    table = Table(np.array([0, 1, 0, 2, 3, 0]), np.array([0.25, 1, 0.25, 1, 1, 0.5]))
    place_EC, upto_EC = placement(table, 4, PAIR)
    assert place_EC.tolist() == [[0, 5], [1, 1], [3, 3], [4, 4]]
    assert upto_EC.tolist() == [[128, 256]] + [[256, 256]] * 3


def test_uneven_owners_and_unknown_plans_are_refused():
    with pytest.raises(ValueError, match="3 experts on 2 devices"):
        plan_table("greedy", [1, 2, 3], PAIR)
    with pytest.raises(KeyError):
        plan_table("worst", [1, 2, 3, 0], PAIR)


def test_best_moves_more_where_that_pays_alone():
    """Four hot experts of one device: a slot takes one of them. Rearranged, each device has two."""
    load = [4, 4, 4, 4, 0, 0, 0, 0]
    assert loads("greedy", load, PAIR).tolist() == [12, 4]
    assert loads("best", load, PAIR).tolist() == [8, 8]
    assert plan_table("best", [8, 2, 1, 1], PAIR).expert_M.tolist() == [0, 1, -1, 2, 3, 0]


@given(st.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_every_plan_keeps_experts_and_shares_and_is_never_worse_than_homes(data):
    nodes, devices = data.draw(st.sampled_from([(1, 2), (1, 4), (2, 2), (2, 4), (3, 2)]))
    cluster = Cluster(nodes, devices, data.draw(st.integers(0, 3)))
    E = cluster.P * data.draw(st.integers(1, 4))
    one = st.one_of(st.integers(0, 5), st.integers(0, 10**6), st.just(0))
    load_E = np.array(data.draw(st.lists(one, min_size=E, max_size=E)), float)
    table = plan_table(data.draw(st.sampled_from([*PLANS, "best"])), load_E, cluster)
    places = cluster.P * (E // cluster.P + cluster.slots)
    assert len(table.expert_M) == len(table.share_M) == places
    used_M = table.expert_M >= 0
    assert (table.share_M >= 0).all()
    assert (table.share_M[~used_M] == 0).all()
    shares_E = np.bincount(table.expert_M[used_M], table.share_M[used_M], E)
    np.testing.assert_allclose(shares_E, 1)
    before = load_E.reshape(cluster.P, -1).sum(1).max()
    assert device_loads(table, load_E, cluster).max() <= before * (1 + 1e-9)
    # Moved from any table before it, each place comes from one that holds the expert.
    old_M = aligned(homes(E, cluster), np.arange(places) % E, cluster).expert_M
    whole = aligned(table, old_M, cluster)
    assert (whole.expert_M >= 0).all()
    assert (old_M[sources(whole.expert_M, old_M, cluster)] == whole.expert_M).all()
    np.testing.assert_allclose(
        *(np.sort(device_loads(one, load_E, cluster)) for one in (whole, table)), atol=1e-6
    )
    place_EC, upto_EC = placement(whole, E, cluster)
    assert (whole.expert_M[place_EC] == np.arange(E)[:, None]).all()
    assert (upto_EC[:, -1] == SHARES).all()
    assert (np.diff(upto_EC, axis=1) >= 0).all()
