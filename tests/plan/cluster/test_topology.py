"""Topologies: collectives priced against closed forms, slow nodes, crossovers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.plan.cluster.device import Device
from moejax.plan.cluster.topology import Link, Tier, Topology, same_links

MIB = 2**20
DEVICE = Device(
    name="toy",
    platform="cpu",
    memory_bytes=2**30,
    products={"float32": ((1e6, 1e9), (1e8, 4e9))},
    copy_bytes_per_s=1e9,
    gather_bytes_per_s=5e8,
    startup_s=1e-6,
    program_overhead=1.5,
    oversubscription=2.0,
)


def tier(name, size, startup_s, bytes_per_s, **more):
    return Tier(name, size, same_links(Link(startup_s, bytes_per_s)), **more)


def cluster(*tiers, **more):
    return Topology(version=1, name="toy", source="a test", device=DEVICE, tiers=tiers, **more)


TWO = cluster(tier("host", 4, 1e-4, 1e9), tier("network", 2, 1e-3, 1e8))
THREE = cluster(
    tier("nvlink", 4, 1e-5, 1e10), tier("rack", 3, 1e-4, 1e9), tier("wan", 2, 1e-2, 1e7)
)


def test_a_bent_link_keeps_its_bends_when_its_rate_changes():
    link = Link(1e-3, 1e8, bends=((1000, 1.0), (100_000, 4.0)))
    assert link.seconds(10) == pytest.approx(1e-3 + 1e-7)
    assert link.seconds(10_000) == pytest.approx(2.5 * (1e-3 + 1e-4))  # half-way in logarithms
    assert link.seconds(10**6) == pytest.approx(4 * (1e-3 + 1e-2))
    faster = replace(link, bytes_per_s=2e8)
    assert faster.seconds(10**6) == pytest.approx(4 * (1e-3 + 5e-3))
    bent = cluster(tier("host", 4, 1e-4, 1e9), Tier("network", 2, same_links(link)))
    assert bent.seconds("all_to_all", 2 * 10**6, 1, 2)[1] == pytest.approx(4 * (1e-3 + 1e-2))


def test_counts_devices_and_nodes():
    assert (THREE.devices, THREE.nodes, THREE.sizes) == (24, 6, (4, 3, 2))


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_to_all", 1), ("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)],
)
@pytest.mark.parametrize("n", [2, 4])
def test_one_tier_costs_startup_and_bytes_over_rate(kind, factor, n):
    fast, slow = TWO.seconds(kind, MIB, n)
    assert fast == pytest.approx(1e-4 + factor * (n - 1) / n * MIB / 1e9)
    assert slow == 0
    # The same group across nodes: one device of each.
    fast, slow = TWO.seconds(kind, MIB, 1, 2)
    assert fast == 0
    assert slow == pytest.approx(1e-3 + factor * MIB / 2 / 1e8)


def test_flat_group_sends_each_tier_its_share():
    # Eight devices: of seven peers three are inside, four across.
    assert TWO.shares("all_to_all", 8 * MIB, 4, 2) == (3 * MIB, 4 * MIB)
    fast, slow = TWO.seconds("all_to_all", 8 * MIB, 4, 2)
    assert fast == pytest.approx(1e-4 + 3 * MIB / 1e9)
    # Four peers across, where the tier joins one with one other: as many starts.
    assert slow == pytest.approx(4 * 1e-3 + 4 * MIB / 1e8)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))
def test_shares_of_an_all_to_all_add_up_to_what_leaves_a_device(inside, racks, sites):
    n = inside * racks * sites
    total = sum(THREE.shares("all_to_all", 1000.0, inside, racks, sites))
    assert total == pytest.approx((n - 1) / n * 1000)


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_a_ring_passes_from_block_to_block_once(kind, inside, racks, sites):
    n = inside * racks * sites
    passing = (2 if kind == "all_reduce" else 1) * (n - 1) / n * 1000
    shares = THREE.shares(kind, 1000.0, inside, racks, sites)
    blocks = (1, inside, inside * racks)
    for share, size, block in zip(shares, (inside, racks, sites), blocks, strict=True):
        assert share * block == pytest.approx(passing if size > 1 else 0)


def test_three_tiers_each_carry_their_peers():
    # 24 devices: 3 peers inside, 8 in other nodes of the rack, 12 at the other site.
    assert THREE.shares("all_to_all", 24.0, 4, 3, 2) == (3, 8, 12)
    seconds = THREE.seconds("all_to_all", 24 * MIB, 4, 3, 2)
    wanted = (1e-5 + 3 * MIB / 1e10, 8 / 2 * 1e-4 + 8 * MIB / 1e9, 12 * 1e-2 + 12 * MIB / 1e7)
    assert seconds == pytest.approx(wanted)
    # A ring of 24: 23 turns, of which the tiers alone would take 3, 2 and 1.
    seconds = THREE.seconds("all_gather", 24 * MIB, 4, 3, 2)
    starts, rates = (23 / 3 * 1e-5, 23 / 2 * 1e-4, 23 * 1e-2), (1e10, 4 * 1e9, 12 * 1e7)
    wanted = [start + 23 * MIB / rate for start, rate in zip(starts, rates, strict=True)]
    assert seconds == pytest.approx(wanted)
    assert THREE.of_nodes(12).sizes == (4, 3, 4)
    with pytest.raises(ValueError, match="multiple of 3"):
        THREE.of_nodes(4)


@pytest.mark.parametrize(
    ("inside", "across", "group"),
    [(4, 6, (4, 3, 2)), (4, 3, (4, 3, 1)), (4, 2, (4, 1, 2)), (1, 3, (1, 3, 1)), (2, 1, (2, 1, 1))],
)
def test_a_group_fills_racks_before_it_crosses_sites(inside, across, group):
    assert THREE.group(inside, across) == group
    assert math.prod(group) == inside * across


def test_other_kinds_travel_as_what_they_resemble():
    assert TWO.seconds("all_max", 4.0, 4, 2) == TWO.seconds("all_reduce", 4.0, 4, 2)
    assert TWO.shares("ppermute", 8.0, 4, 2) == (0, 8)
    assert TWO.shares("ppermute", 8.0, 4) == (8, 0)
    assert TWO.shares("ppermute", 8.0, 1) == (0, 0)


def test_crossover_finds_where_the_best_way_changes():
    """The ways' seconds cross where the formulas of systems 7 do."""
    found = TWO.crossover()
    # Flat has four times the starts across; two-level moves the bytes inside first, then across.
    (_, first), (change, second) = found["all_to_all"]
    assert (first, second) == ("two_level", "flat")
    # By hand: 1e-4 + 3/4 S/1e9 + 1e-3 + 1/2 S/1e8 = 4e-3 + 1/2 S/1e8.
    by_hand = (4e-3 - 1.1e-3) / (0.75 / 1e9)
    assert change / 2 < by_hand <= change
    # Sums inside first, so that a quarter of the bytes cross, and shares the sum again inside:
    # 2 (1e-4 + 3/4 S/1e9) + 1e-3 + 1/4 S/1e8. The ring has seven turns on the slow link:
    # 7e-3 + 2 7/8 1/4 S/1e8, more at every size.
    assert found["all_reduce"] == ((1024, "two_level"),)


def test_a_ring_wins_where_inside_is_only_a_little_faster():
    for inside, wins in ((4e8, "ring"), (1e12, "two_level")):
        made = cluster(tier("host", 4, 1e-6, inside), tier("network", 2, 1e-6, 1e8))
        assert made.crossover()["all_reduce"][-1][1] == wins


def pairs_of(count, slow=(), rate=100.0, slow_rate=25.0):
    rows = [[rate if a != b else 0.0 for b in range(count)] for a in range(count)]
    for a, b in slow:
        rows[a][b] = slow_rate
    return tuple(map(tuple, rows))


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("ways", ["out", "in", "both"])
def test_names_the_slow_node_and_by_how_much(count, ways):
    out = [(1, b) for b in range(count) if b != 1]
    back = [(b, a) for a, b in out]
    slow = {"out": out, "in": back, "both": out + back}[ways]
    tiers = TWO.tiers[0], replace(TWO.tiers[1], size=count)
    names = tuple(f"host{n}" for n in range(count))
    (found,) = cluster(*tiers, pairs=pairs_of(count, slow), node_names=names).slow_nodes()
    assert (found.node, found.name, found.times_slower) == (1, "host1", 4)


def test_of_two_nodes_the_slow_sender_is_named():
    (found,) = replace(TWO, pairs=pairs_of(2, [(1, 0)])).slow_nodes()
    assert (found.node, found.name) == (1, "1")


def test_even_nodes_are_not_slow():
    assert replace(TWO, pairs=pairs_of(2)).slow_nodes() == ()
    assert TWO.slow_nodes() == ()
    # A little slower is no fault.
    assert replace(TWO, pairs=pairs_of(2, [(0, 1)], slow_rate=80.0)).slow_nodes() == ()


def test_fewer_nodes_are_the_same_cluster_without_its_pairs():
    one = replace(TWO, pairs=pairs_of(2), node_names=("a", "b")).of_nodes(1)
    assert (one.devices, one.nodes, one.pairs, one.node_names) == (4, 1, (), ())
    single = cluster(TWO.tiers[0])
    assert single.of_nodes(1) == single
    with pytest.raises(ValueError, match="one tier"):
        single.of_nodes(2)


def test_product_rates_between_and_beyond_what_was_measured():
    assert DEVICE.product_rate("float32", 1e7) == pytest.approx(2e9)
    assert DEVICE.product_rate("float32", 1e12) == 4e9
    # As long as the smallest takes.
    assert 1e3 / DEVICE.product_rate("float32", 1e3) == pytest.approx(1e6 / 1e9)
    assert DEVICE.product_rate("float8_e4m3fn", 1e12) == 4e9
    wide = {**DEVICE.products, "bfloat16": ((1e6, 7e9),)}
    assert replace(DEVICE, products=wide).product_rate("float8_e4m3fn", 1e12) == 7e9


def test_copies_that_a_cache_may_hold_have_rates_of_their_own():
    assert DEVICE.copy_rate(1e3) == DEVICE.copy_bytes_per_s == 1e9
    cached = replace(DEVICE, copies=((1e4, 8e9), (1e6, 2e9)))
    assert cached.copy_rate(1e2) == cached.copy_rate(1e4) == 8e9
    assert cached.copy_rate(1e5) == pytest.approx(4e9)  # half-way in logarithms
    assert cached.copy_rate(1e6) == 2e9
    assert cached.copy_rate(1.1e6) == 1e9
