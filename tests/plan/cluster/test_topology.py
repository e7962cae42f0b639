"""Topologies: pricing against closed forms, files and every refusal, the known clusters."""

import copy
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.errors import InputError
from moejax.plan.cluster.file import (
    from_json,
    known_clusters,
    load_topology,
    read_topology,
    to_text,
    write_topology,
)
from moejax.plan.cluster.topology import (
    KINDS,
    SIZES,
    CodecRates,
    Device,
    Link,
    Tier,
    Topology,
    same_links,
)

MIB = 2**20
DEVICE = Device(
    name="toy",
    platform="cpu",
    memory_bytes=2**30,
    products={"float32": ((1e6, 1e9), (1e8, 4e9))},
    copy_bytes_per_s=1e9,
    gather_bytes_per_s=5e8,
    startup_s=1e-6,
    codecs={"int8": CodecRates(1e9, 2e9)},
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


def test_counts_devices_and_nodes():
    assert (TWO.devices, TWO.nodes, TWO.sizes) == (8, 2, (4, 2))
    assert (THREE.devices, THREE.nodes) == (24, 6)


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


def test_two_stage_all_to_all_of_systems_7():
    """intra (G - 1) / G * S, inter (N - 1) / N * S."""
    S = 64 * MIB
    two_level = TWO.crossover()[0].seconds["two_level"]
    size = 2**26
    place = [2**p for p in range(10, 31)].index(size)
    assert size == S
    wanted = 1e-4 + 3 / 4 * S / 1e9 + 1e-3 + 1 / 2 * S / 1e8
    assert two_level[place] == pytest.approx(wanted)


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


def test_a_gather_over_two_hosts_puts_on_their_link_what_the_kernel_counts():
    """benchmarks/compression.md: rings by XLA on gloo, sent over counted 1.005."""
    _, slow = TWO.shares("all_gather", 8 * MIB, 4, 2)
    assert 4 * slow == 7 * MIB  # of a host's four devices together


def test_three_tiers_each_carry_their_peers():
    # 24 devices: 3 peers inside, 8 in other nodes of the rack, 12 at the other site.
    assert THREE.shares("all_to_all", 24.0, 4, 3, 2) == (3, 8, 12)
    seconds = THREE.seconds("all_to_all", 24 * MIB, 4, 3, 2)
    assert seconds == pytest.approx(
        (
            1e-5 + 3 * MIB / 1e10,
            8 / 2 * 1e-4 + 8 * MIB / 1e9,
            12 * 1e-2 + 12 * MIB / 1e7,
        )
    )
    # A ring of 24: 23 turns, of which the tiers alone would take 3, 2 and 1.
    seconds = THREE.seconds("all_gather", 24 * MIB, 4, 3, 2)
    assert seconds == pytest.approx(
        (
            23 / 3 * 1e-5 + 23 * MIB / 1e10,
            23 / 2 * 1e-4 + 23 / 4 * MIB / 1e9,
            23 * 1e-2 + 23 / 12 * MIB / 1e7,
        )
    )
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


def test_tiers_left_out_count_one_device():
    assert THREE.seconds("all_reduce", MIB, 4) == THREE.seconds("all_reduce", MIB, 4, 1, 1)


def test_other_kinds_travel_as_what_they_resemble():
    assert TWO.seconds("all_max", 4.0, 4, 2) == TWO.seconds("all_reduce", 4.0, 4, 2)
    assert TWO.shares("permute", 8.0, 4, 2) == (0, 8)
    assert TWO.shares("permute", 8.0, 4) == (8, 0)
    assert TWO.shares("permute", 8.0, 1) == (0, 0)


def test_crossover_finds_where_the_best_way_changes():
    exchange, reduction = TWO.crossover()
    # Flat has four times the starts across; two-level moves the bytes inside first, then across.
    assert exchange.best(1024) == "two_level"
    assert exchange.best(2**30) == "flat"
    (_, first), (change, second) = exchange.changes
    assert (first, second) == ("two_level", "flat")
    # By hand: 1e-4 + 3/4 S/1e9 + 1e-3 + 1/2 S/1e8 = 4e-3 + 1/2 S/1e8.
    by_hand = (4e-3 - 1.1e-3) / (0.75 / 1e9)
    assert change / 2 < by_hand <= change
    # Sums inside first, so that a quarter of the bytes cross, and shares the sum again inside:
    # 2 (1e-4 + 3/4 S/1e9) + 1e-3 + 1/4 S/1e8. The ring has seven turns on the slow link:
    # 7e-3 + 2 7/8 1/4 S/1e8, more at every size.
    for size, two_level, ring in zip(
        SIZES, reduction.seconds["two_level"], reduction.seconds["ring"], strict=True
    ):
        assert two_level == pytest.approx(1.2e-3 + 4e-9 * size)
        assert ring == pytest.approx(7e-3 + 4.375e-9 * size)
    assert reduction.changes == ((1024, "two_level"),)


def test_a_ring_wins_where_inside_is_only_a_little_faster():
    near = cluster(tier("host", 4, 1e-6, 4e8), tier("network", 2, 1e-6, 1e8))
    assert near.crossover()[1].best(2**30) == "ring"
    far = cluster(tier("host", 4, 1e-6, 1e12), tier("network", 2, 1e-6, 1e8))
    assert far.crossover()[1].best(2**30) == "two_level"


def pairs_of(count, slow=(), rate=100.0, slow_rate=25.0):
    rows = [[rate if a != b else 0.0 for b in range(count)] for a in range(count)]
    for a, b in slow:
        rows[a][b] = slow_rate
    return tuple(map(tuple, rows))


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("both_ways", [False, True])
def test_names_the_slow_node_and_by_how_much(count, both_ways):
    slow = [(1, b) for b in range(count) if b != 1]
    slow += [(b, a) for a, b in slow] if both_ways else []
    names = tuple(f"host{n}" for n in range(count))
    nodes = cluster(
        TWO.tiers[0],
        replace(TWO.tiers[1], size=count),
        pairs=pairs_of(count, slow),
        node_names=names,
    )
    (found,) = nodes.slow_nodes()
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


# -- files


def as_json(topology):
    return json.loads(to_text(topology))


FULL = replace(
    TWO,
    pairs=((0.0, 5.0), (6.0, 0.0)),
    node_names=("a", "b"),
    tiers=(
        Tier(
            "host",
            4,
            {kind: Link(n * 1e-4, n * 1e9, 0.01, ((64, 0.1),)) for n, kind in enumerate(KINDS, 1)},
            1.5,
            0.9,
        ),
        TWO.tiers[1],
    ),
)


@pytest.mark.parametrize("topology", [TWO, THREE, FULL], ids=["two", "three", "full"])
def test_a_file_gives_back_what_was_written(topology, tmp_path):
    write_topology(topology, tmp_path / "t.json")
    assert read_topology(tmp_path / "t.json") == topology
    assert load_topology(str(tmp_path / "t.json")) == topology


def change(path, value):
    """An edit of FULL's file: at a path such as `tiers.0.size`; value ... removes it."""

    def edit(facts):
        *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        at = facts
        for part in way:
            at = at[part]
        if value is ...:
            del at[last]
        else:
            at[last] = value

    return edit


def known_gpu(rate):
    def edit(facts):
        facts["device"]["name"] = "NVIDIA A100-SXM4-80GB"
        facts["tiers"] = [copy.deepcopy(facts["tiers"][1])]
        facts["tiers"][0] |= {"size": 8}
        facts["tiers"][0]["links"]["all"]["bytes_per_s"] = rate
        for name in ("pairs", "node_names"):
            del facts[name]

    return edit


REFUSED = [
    (change("version", 2), "newer moejax", "Upgrade"),
    (change("version", 0), "`version` is unknown", "Probe"),
    (change("version", True), "`version` is unknown", "Probe"),
    (change("version", ...), "`version` is missing", "Add"),
    (change("tiers.0.sizes", 4), "unknown field in `tiers[0]`", "`size`"),
    (change("wxyz", 4), "unknown field in `the file`", "Leave it out"),
    (change("tiers.0.size", 4.0), "`tiers[0].size` is wrong", "whole number"),
    (change("tiers.0.size", 0), "`tiers[0].size` is wrong", "at least 1"),
    (change("tiers.0.size", True), "`tiers[0].size` is wrong", "whole number"),
    (change("tiers.0.size", ...), "`tiers[0].size` is missing", "Add"),
    (change("tiers", []), "`tiers` is wrong", "at least one"),
    (change("tiers", {}), "`tiers` is wrong", "a list"),
    (change("tiers.1", 3), "`tiers[1]` is wrong", "an object"),
    (change("tiers.1.links.all.bytes_per_s", 0), "bytes_per_s` is wrong", "above 0"),
    (change("tiers.1.links.all.bytes_per_s", -1e9), "bytes_per_s` is wrong", "above 0"),
    (change("tiers.1.links.all.bytes_per_s", "1e9"), "bytes_per_s` is wrong", "a number"),
    (change("tiers.1.links.all.bytes_per_s", math.nan), "bytes_per_s` is wrong", "a number"),
    (change("tiers.1.links.all.bytes_per_s", 10**400), "bytes_per_s` is wrong", "a number"),
    (change("tiers.1.links.all.gbit_per_s", 100), "counts bits", "by 8"),
    (change("tiers.1.links.all.mbps", 100), "counts bits", "by 8"),
    (change("tiers.1.links.all.startup_s", -1), "startup_s` is wrong", "from 0"),
    (change("tiers.1.links.all.points", [[1]]), "points` is wrong", "pairs"),
    (change("tiers.0.links.all_to_all", ...), "all_to_all` is missing", "Add"),
    (change("tiers.0.links.all_two_all", {}), "unknown field", "`all_to_all`"),
    (change("tiers.1.links.all.bytes_per_s", 5e12), "too fast", "bits"),
    (change("tiers.1.links.all.bytes_per_s", 9e9), "is slower than `tiers[1]`", "Swap"),
    (change("tiers.0.together", -1), "together` is wrong", "from 0 to 2"),
    (change("tiers.0.occupies", 1.5), "occupies` is wrong", "from 0 to 1"),
    (change("tiers.0.late_s", -1), "late_s` is wrong", "from 0 to 60"),
    (change("device.platform", "gqu"), "platform` is wrong", "cpu, gpu, tpu"),
    (change("device.memory_bytes", 1e9), "memory_bytes` is wrong", "whole number"),
    (change("device.products", {}), "products` is empty", "float32"),
    (change("device.products.float32", []), "products.float32` is wrong", "at least one"),
    (change("device.products.float32", [[2, 1], [1, 1]]), "products.float32` is wrong", "Sort"),
    (change("device.codecs.int8.decode", 0), "codecs.int8.decode` is wrong", "above 0"),
    (change("device.program", 0), "device.program` is wrong", "above 0"),
    (change("device.sharing", -1), "device.sharing` is wrong", "above 0"),
    (change("device.codecs.int8", 3), "codecs.int8` is wrong", "an object"),
    (change("pairs", [[0, 1]]), "`pairs` is not whole", "2 rows of 2"),
    (change("pairs.0.1", 0), "`pairs[0][1]` is wrong", "every pair is measured"),
    (change("pairs.0.1", None), "`pairs` is wrong", "missing must be measured"),
    (change("pairs.0.1", -1), "`pairs` is wrong", "none below 0"),
    (change("pairs.1.1", 3), "`pairs[1][1]` is wrong", "0"),
    (change("pairs.0.1", 4.7), "differ by direction: 1 to 0", "asymmetric"),
    (change("node_names", ["a"]), "`node_names` is wrong", "2 names"),
    (change("node_names", [1, 2]), "`node_names` is wrong", "texts"),
    (change("asymmetric", 1), "`asymmetric` is wrong", "true or false"),
    (change("name", ""), "`name` is wrong", "text"),
    (change("name", "a\nb"), "`name` is wrong", "text"),
    (known_gpu(8 * 300e9), "too fast", "Divide by 8"),
]


@pytest.mark.parametrize(("edit", "what", "more"), REFUSED)
def test_a_wrong_file_is_refused_in_one_line(edit, what, more, tmp_path):
    facts = as_json(FULL)
    edit(facts)
    (tmp_path / "t.json").write_text(json.dumps(facts))
    with pytest.raises(InputError) as caught:
        read_topology(tmp_path / "t.json")
    message = str(caught.value)
    assert what in message
    assert more in message
    assert "t.json" in message
    assert "\n" not in message


def test_asymmetry_that_is_said_to_be_so_is_taken():
    facts = as_json(FULL) | {"pairs": [[0, 1], [5, 0]], "asymmetric": True}
    assert from_json(facts, "t.json").asymmetric


def test_a_known_device_within_its_bounds_is_taken():
    facts = as_json(FULL)
    known_gpu(280e9)(facts)
    assert from_json(facts, "t.json").devices == 8


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "[" * 100_000, "\x00", '{"version": 1}'])
def test_no_topology_at_all_is_refused(text, tmp_path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError) as caught:
        read_topology(tmp_path / "t.json")
    assert "\n" not in str(caught.value)


# -- known clusters


@pytest.mark.parametrize("name", known_clusters())
def test_known_clusters_load_and_are_plausible(name):
    found = load_topology(name)
    assert found.name == name
    assert len(found.source) > 100
    assert found.devices > 1
    assert from_json(as_json(found), "copy.json") == found
    assert 1e9 < found.device.memory_bytes < 1e12
    assert ("Memory: 92 %" in found.source) == (found.device.platform == "gpu")
    assert found.device.gather_bytes_per_s <= found.device.copy_bytes_per_s < 1e13
    for curve in found.device.products.values():
        rates = [rate for _, rate in curve]
        assert rates == sorted(rates), "larger products are not slower"
        assert 1e12 < rates[-1] < 3e15
    for rates in found.device.codecs.values():
        assert max(rates.encode, rates.decode) < 4 * found.device.copy_bytes_per_s
    for fast, slow in zip(found.tiers, found.tiers[1:], strict=False):
        for kind in KINDS:
            assert fast.links[kind].bytes_per_s > slow.links[kind].bytes_per_s
    for link in (link for tier in found.tiers for link in tier.links.values()):
        assert 1e8 < link.bytes_per_s < 1e12
        assert 0 < link.startup_s < 1e-3
    best = {one.kind: one.best(2**20) for one in found.crossover()}
    assert set(best) == {"all_to_all", "all_reduce"}


def test_known_clusters_are_those_that_were_promised():
    wanted = "a800 dgx_a100 dgx_h100 fsmoe_2080ti gb200_nvl72 h200 lassen lina_a100"
    assert known_clusters() == (*wanted.split(), "tpu_v5e", "tpu_v5p", "tpu_v6e")


def test_known_clusters_take_a_number_of_nodes():
    assert load_topology("dgx_h100:16").sizes == (8, 16)
    assert load_topology("a800").sizes == (8, 2)


def test_fsmoe_constants_are_those_of_the_paper():
    """ms and ms per float element of testbed B (research, systems.md 5.1)."""
    found, n = load_topology("fsmoe_2080ti"), 2**22
    for kind, group, a, beta in [
        ("all_to_all", (1, 8), 0.175, 3.06e-7),
        ("all_reduce", (1, 8), 0.0837, 5.99e-7),
        ("all_gather", (4,), 0.032, 1.68e-7),
        ("reduce_scatter", (4,), 0.0391, 1.67e-7),
    ]:
        seconds = max(found.seconds(kind, 4 * n, *group))
        assert seconds * 1e3 == pytest.approx(a + n * beta, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dgx_h10", "Did you mean dgx_h100"),
        ("dgx_h100:", "no number of nodes"),
        ("dgx_h100:0", "at least 1"),
        ("dgx_h100:-1", "no number of nodes"),
        ("dgx_h100:1.5", "no number of nodes"),
        ("nowhere.json", "neither a file nor a known cluster"),
    ],
)
def test_an_unknown_cluster_is_refused_in_one_line(name, message):
    with pytest.raises(InputError, match=message) as caught:
        load_topology(name)
    assert "\n" not in str(caught.value)


def test_brackets_inside_names_stay_as_they_are():
    named = replace(FULL, name="rack [ 3 ,  4 ]", source="[ a ]  [b ]")
    found = as_json(named)
    assert (found["name"], found["source"]) == (named.name, named.source)


def test_a_tier_may_be_slower_in_one_kind(tmp_path):
    fast, slow = TWO.tiers
    links = {**slow.links, KINDS[0]: Link(1e-3, 5e9)}
    mixed = replace(TWO, tiers=(fast, replace(slow, links=links)))
    write_topology(mixed, tmp_path / "mixed.json")
    assert read_topology(tmp_path / "mixed.json").tiers[1].links[KINDS[0]].bytes_per_s == 5e9
