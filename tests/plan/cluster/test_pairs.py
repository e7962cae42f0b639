"""Matrices between nodes: which nodes belong together, and what a group pays for its links."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.plan.cluster.pairs import ALIKE, chain, groupings, links_of
from moejax.plan.cluster.topology import Tier
from tests.plan.cluster.test_topology import THREE, TWO


def matrix(count, of):
    """A matrix from a function of two nodes."""
    return tuple(
        tuple(0.0 if a == b else float(of(a, b)) for b in range(count)) for a in range(count)
    )


def partitions(nodes, parts):
    """All ways to put nodes into so many groups."""
    for labels in itertools.product(range(parts), repeat=len(nodes)):
        first_uses = list(dict.fromkeys(labels))
        if first_uses == list(range(parts)):
            yield [
                [n for n, own in zip(nodes, labels, strict=True) if own == p] for p in first_uses
            ]


def fastest_between(groups, pairs):
    """The fastest link that joins two groups, each link as slow as its slower direction."""
    return max(
        min(pairs[a][b], pairs[b][a])
        for one, other in itertools.combinations(groups, 2)
        for a in one
        for b in other
    )


@st.composite
def matrices(draw):
    """Rates of two to six nodes of some far apart values, alike in both directions."""
    count = draw(st.integers(2, 6))
    links = itertools.combinations(range(count), 2)
    rates = {link: draw(st.sampled_from([1.0, 3.0, 10.0, 50.0])) for link in links}
    return matrix(count, lambda a, b: rates[min(a, b), max(a, b)])


@given(matrices())
def test_groupings_are_nested_and_leave_the_slowest_links_between_groups(pairs):
    count, found = len(pairs), groupings(pairs)
    assert found[0] == tuple((node,) for node in range(count))
    assert found[-1] == (tuple(range(count)),)
    for finer, coarser in itertools.pairwise(found):
        assert len(coarser) < len(finer)
        assert all(any(set(one) <= set(other) for other in coarser) for one in finer)
    for groups in found[:-1]:
        assert sorted(itertools.chain(*groups)) == list(range(count))
        others = partitions(range(count), len(groups))
        assert fastest_between(groups, pairs) == min(fastest_between(o, pairs) for o in others)


def test_rates_that_differ_as_measurements_do_are_one_level():
    near = matrix(4, lambda a, b: 100 + 7 * (a + b))  # from 107 to 135
    assert groupings(near) == [((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),)]
    slower = matrix(4, lambda a, b: 100 if (a < 2) == (b < 2) else 100 / ALIKE)
    assert groupings(slower)[1] == ((0, 1), (2, 3))
    # A link counts as its slower direction.
    one_way = matrix(2, lambda a, b: 100 if a < b else 1)
    assert groupings(one_way) == [((0,), (1,)), ((0, 1),)]


def test_without_a_matrix_the_units_of_tiers_belong_together():
    assert THREE.groupings() == [
        tuple((node,) for node in range(6)),
        ((0, 1, 2), (3, 4, 5)),
        ((0, 1, 2, 3, 4, 5),),
    ]


def test_a_ring_an_all_to_all_and_a_chain_use_their_links():
    assert links_of("all_gather", (2, 0, 1)) == [(2, 0), (0, 1), (1, 2)]
    assert links_of("ppermute", (2, 0, 1)) == [(2, 0), (0, 1)]
    assert set(links_of("all_to_all", (2, 0, 1))) == set(itertools.permutations((0, 1, 2), 2))
    assert links_of("all_reduce", (4,)) == []


# Four nodes: 0 and 2 are near, and so are 1 and 3; 0 and 1 are far, all others very far.
FAR = {(0, 2): 80e6, (1, 3): 40e6, (0, 1): 10e6}
PAIRS = matrix(4, lambda a, b: FAR.get((min(a, b), max(a, b)), 5e6))
LATE = matrix(4, lambda a, b: 1e-3 if (a % 2) == (b % 2) else 50e-3)
NETWORK = replace(TWO.tiers[1], size=4)  # a start-up of 1 ms, 100 MB a second
FOUR = replace(TWO, tiers=(TWO.tiers[0], NETWORK), pairs=PAIRS, pair_startup_s=LATE)


def test_a_collective_is_as_slow_as_the_slowest_link_of_its_groups():
    """The ring 0, 1, 2, 3 has links of 10, 5, 40 and 5 MB a second, so the tier's rate is of 5."""
    size, every = 8e6, ((0, 1, 2, 3),)
    (_, usual) = FOUR.seconds("all_gather", size, 1, 4)
    assert usual == pytest.approx(1e-3 + 6e6 / 1e8)
    assert FOUR.seconds("all_gather", size, 1, 4, nodes=every)[1] == pytest.approx(usual)
    # Two near nodes: links of 80 and of 40, the slower one 8 times as fast as the tier's slowest;
    # a small message takes a fiftieth.
    near = FOUR.seconds("all_gather", size, 1, 2, nodes=((0, 2), (1, 3)))[1]
    assert near == pytest.approx(1e-3 / 50 + 4e6 / 8e8)
    assert FOUR.seconds("all_reduce", size, 1, 2, nodes=((0, 2),))[1] == pytest.approx(
        1e-3 / 50 + 8e6 / 16e8
    )
    # 0 and 1: twice as fast; the messages are as late as any.
    assert FOUR.seconds("reduce_scatter", size, 1, 2, nodes=((0, 1),))[1] == pytest.approx(
        1e-3 + 4e6 / 2e8
    )
    # An all-to-all reaches each node from each.
    assert FOUR.seconds("all_to_all", size, 1, 4, nodes=every)[1] == pytest.approx(1e-3 + 6e6 / 1e8)
    assert FOUR.seconds("all_to_all", size, 1, 2, nodes=((1, 3),))[1] == pytest.approx(
        1e-3 / 50 + 4e6 / 8e8
    )


def test_stages_are_a_chain_and_pay_no_way_back():
    ring = matrix(4, lambda a, b: 4e6 if abs(a - b) == 1 else 1e6)
    own = replace(FOUR, pairs=ring, pair_startup_s=())
    along = own.seconds("ppermute", 1e6, 1, 4, nodes=((0, 1, 2, 3),))[1]
    assert along == pytest.approx(1e-3 + 1e6 / 4e8)  # of links four times as fast as the slowest


def test_each_tier_pays_for_its_own_links():
    """Two racks of three nodes: a slow link inside a rack slows nothing that crosses racks."""
    pairs = matrix(6, lambda a, b: 2e6 if a // 3 != b // 3 else 1e8 if {a, b} == {0, 1} else 2e8)
    own = replace(THREE, pairs=pairs)
    inside = own.seconds("all_gather", 6e8, 1, 3, nodes=((0, 1, 2), (3, 4, 5)))
    assert inside[1] == pytest.approx(THREE.seconds("all_gather", 6e8, 1, 3)[1])
    quick = own.seconds("all_gather", 6e8, 1, 3, nodes=((3, 4, 5),))
    assert quick[1] == pytest.approx(1e-4 + 4e8 / 2e9)
    across = own.seconds("all_gather", 6e8, 1, 1, 2, nodes=((0, 3), (1, 4), (2, 5)))
    assert across == pytest.approx(THREE.seconds("all_gather", 6e8, 1, 1, 2))


def test_equal_pairs_change_no_price():
    even = replace(FOUR, pairs=matrix(4, lambda a, b: 7e6), pair_startup_s=())
    plain = replace(even, pairs=())
    for kind in ("all_to_all", "all_gather", "all_reduce", "ppermute"):
        for group, nodes in (((2, 2), ((0, 1), (2, 3))), ((4, 4), ((0, 1, 2, 3),))):
            assert even.seconds(kind, 1e6, *group, nodes=nodes) == plain.seconds(kind, 1e6, *group)


@given(matrices())
def test_a_chain_has_the_fastest_slowest_link(pairs):
    def slowest(order):
        return min((pairs[a][b] for a, b in itertools.pairwise(order)), default=math.inf)

    found = chain(range(len(pairs)), pairs)
    assert sorted(found) == list(range(len(pairs)))
    orders = itertools.permutations(range(len(pairs)))
    assert slowest(found) == max(map(slowest, orders))


def test_a_long_chain_follows_near_links_and_an_even_one_stays_as_it_is():
    near = matrix(9, lambda a, b: 100 if abs(a * 2 % 9 - b * 2 % 9) == 1 else 1)
    assert min(near[a][b] for a, b in itertools.pairwise(chain(range(9), near))) == 100
    assert chain(range(9), matrix(9, lambda a, b: 5)) == tuple(range(9))
    assert chain((3, 1, 2), ()) == (3, 1, 2)


def test_another_order_of_nodes_moves_rows_columns_and_names():
    own = replace(FOUR, node_names=("a", "b", "c", "d"))
    moved = own.reordered((0, 2, 1, 3))
    assert moved.node_names == ("a", "c", "b", "d")
    assert moved.pairs[0][1] == PAIRS[0][2] == 80e6
    assert moved.pair_startup_s[1][3] == LATE[2][3]
    assert moved.reordered((0, 2, 1, 3)) == own
    assert groupings(moved.pairs)[1:3] == [((0, 1), (2,), (3,)), ((0, 1), (2, 3))]
    assert isinstance(moved.tiers[1], Tier)
