"""Topology files and the clusters that come with moejax: read, written, refused."""

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moejax.errors import InputError
from moejax.plan.cluster.file import (
    from_json,
    known_clusters,
    load_topology,
    read_topology,
    to_text,
    write_topology,
)
from moejax.plan.cluster.topology import KINDS, Host, Link, Tier
from tests.plan.cluster.test_topology import THREE, TWO


def as_json(topology):
    return json.loads(to_text(topology))


FULL = replace(
    TWO,
    name="rack [ 3 ,  4 ]",
    pairs=((0.0, 5.0), (6.0, 0.0)),
    pair_startup_s=((0.0, 0.05), (0.04, 0.0)),
    node_names=("a", "b"),
    device=replace(TWO.device, copies=((1e3, 4e9), (1e6, 2e9)), exponentials_per_s=1e9),
    tiers=(
        Tier(
            "host",
            4,
            {
                kind: Link(n * 1e-4, n * 1e9, 0.01, ((64, 0.1),), ((64, 1.5),))
                for n, kind in enumerate(KINDS, 1)
            },
            1.5,
            0.9,
        ),
        TWO.tiers[1],
    ),
    host=Host(5e10, 4e10, 2 * 10**12),
)


@pytest.mark.parametrize("topology", [TWO, THREE, FULL], ids=["two", "three", "full"])
def test_a_file_gives_back_what_was_written(topology, tmp_path):
    write_topology(topology, tmp_path / "t.json")
    assert read_topology(tmp_path / "t.json") == topology
    assert load_topology(str(tmp_path / "t.json")) == topology


def test_files_with_rates_of_codecs_are_read():
    data = as_json(TWO)
    data["device"]["codecs"] = {"topk": {"encode": 1e9, "decode": 1e9}}
    assert from_json(data, "t.json") == TWO


def test_a_file_without_a_host_is_read_and_says_what_to_add_where_one_is_needed():
    data = as_json(replace(TWO, host=None))
    assert "host" not in data
    found = from_json(data, "t.json")
    assert found.host is None
    with pytest.raises(InputError, match=r"no `host`.*plan probe again.*to_device") as caught:
        found.known_host()
    assert "\n" not in str(caught.value)


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
        for name in ("pairs", "pair_startup_s", "node_names"):
            del facts[name]

    return edit


REFUSED = [
    (change("version", 2), "newer moejax", "Upgrade"),
    (change("version", 0), "`version` is unknown", "Probe"),
    (change("version", ...), "`version` is missing", "Add"),
    (change("tiers.0.sizes", 4), "unknown field in `tiers[0]`", "`size`"),
    (change("wxyz", 4), "unknown field in `the file`", "Leave it out"),
    (change("tiers.0.size", 4.0), "`tiers[0].size` is wrong", "whole number"),
    (change("tiers.0.size", 0), "`tiers[0].size` is wrong", "at least 1"),
    (change("tiers.0.size", ...), "`tiers[0].size` is missing", "Add"),
    (change("tiers", []), "`tiers` is wrong", "at least one"),
    (change("tiers.1", 3), "`tiers[1]` is wrong", "an object"),
    (change("tiers.1.links.all.bytes_per_s", 0), "bytes_per_s` is wrong", "above 0"),
    (change("tiers.1.links.all.bytes_per_s", "1e9"), "bytes_per_s` is wrong", "a number"),
    (change("tiers.1.links.all.bytes_per_s", math.nan), "bytes_per_s` is wrong", "a number"),
    (change("tiers.1.links.all.bytes_per_s", 10**400), "bytes_per_s` is wrong", "a number"),
    (change("tiers.1.links.all.gbit_per_s", 100), "counts bits", "by 8"),
    (change("tiers.1.links.all.startup_s", -1), "startup_s` is wrong", "from 0"),
    (change("tiers.1.links.all.points", [[1]]), "points` is wrong", "pairs"),
    (change("tiers.0.links.all_to_all", ...), "all_to_all` is missing", "Add"),
    (change("tiers.0.links.all_two_all", {}), "unknown field", "`all_to_all`"),
    (change("tiers.1.links.all.bytes_per_s", 5e12), "too fast", "bits"),
    (change("tiers.1.links.all.bytes_per_s", 9e9), "is slower than `tiers[1]`", "Swap"),
    (change("tiers.0.together", -1), "together` is wrong", "from 0 to 2"),
    (change("tiers.0.occupies", 1.5), "occupies` is wrong", "from 0 to 1"),
    (change("device.platform", "gqu"), "platform` is wrong", "cpu, gpu, tpu"),
    (change("device.memory_bytes", 1e9), "memory_bytes` is wrong", "whole number"),
    (change("device.products", {}), "products` is empty", "float32"),
    (change("device.products.float32", []), "products.float32` is wrong", "at least one"),
    (change("device.products.float32", [[2, 1], [1, 1]]), "products.float32` is wrong", "Sort"),
    (change("device.copies", [[2, 1], [1, 1]]), "device.copies` is wrong", "Sort"),
    (change("device.program", 0), "device.program` is wrong", "above 0"),
    (change("pairs", [[0, 1]]), "`pairs` is not whole", "2 rows of 2"),
    (change("pairs.0.1", 0), "`pairs[0][1]` is wrong", "every pair is measured"),
    (change("pairs.0.1", None), "`pairs` is wrong", "missing must be measured"),
    (change("pairs.1.1", 3), "`pairs[1][1]` is wrong", "0"),
    (change("pairs.0.1", 4.7), "differ by direction: 1 to 0", "asymmetric"),
    (change("pairs.0.1", 5e12), "`pairs[0][1]` is too fast", "in bits"),
    (change("pair_startup_s", [[0, 1]]), "`pair_startup_s` is not whole", "2 rows of 2"),
    (change("pair_startup_s.0.1", 0), "`pair_startup_s[0][1]` is wrong", "every pair is measured"),
    (change("pair_startup_s.0.1", -1), "`pair_startup_s` is wrong", "none below 0"),
    (change("pair_startup_s.0.1", 100), "`pair_startup_s` is too long", "50 ms are 0.05"),
    (change("node_names", ["a"]), "`node_names` is wrong", "2 names"),
    (change("node_names", [1, 2]), "`node_names` is wrong", "a list of strings"),
    (change("asymmetric", 1), "`asymmetric` is wrong", "true or false"),
    (change("name", "a\nb"), "`name` is wrong", "text"),
    (change("tiers.1.links.all.bytes_per_s", 12.5), "bytes_per_s` is too low", "12.5e9"),
    (change("device.products.float32", [[1e8, 56.8]]), "float32` is too low", "FLOP/s"),
    (change("device.copy_bytes_per_s", 4.3), "copy_bytes_per_s` is too low", "bytes a second"),
    (change("device.memory_bytes", 141), "memory_bytes` is too low", "in bytes"),
    (known_gpu(8 * 300e9), "too fast", "Divide by 8"),
    (change("host.to_device", 5e12), "`host.to_device` is too fast", "in bits"),
    (change("host.from_device", 50), "`host.from_device` is too low", "bytes a second"),
    (change("host.from_device", ...), "`host.from_device` is missing", "Add"),
    (change("host.memory_bytes", 2048), "`host.memory_bytes` is too low", "in bytes"),
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


def test_what_is_said_to_be_so_and_a_known_device_within_its_bounds_are_taken():
    facts = as_json(FULL) | {"pairs": [[0, 1], [5, 0]], "asymmetric": True}
    assert from_json(facts, "t.json").asymmetric
    facts = as_json(FULL)
    known_gpu(280e9)(facts)
    assert from_json(facts, "t.json").devices == 8


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "[" * 100_000, "\x00", '{"version": 1}'])
def test_no_topology_at_all_is_refused(text, tmp_path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError) as caught:
        read_topology(tmp_path / "t.json")
    assert "\n" not in str(caught.value)


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
    for fast, slow in zip(found.tiers, found.tiers[1:], strict=False):
        for kind in KINDS:
            assert fast.links[kind].bytes_per_s > slow.links[kind].bytes_per_s
    if found.host is not None:
        assert "assumed" in found.source.partition("Host:")[2]
        assert 1e9 < found.host.from_device <= found.host.to_device < 3e11
        assert found.host.memory_bytes > found.tiers[0].size * found.device.memory_bytes / 2
    for link in (link for tier in found.tiers for link in tier.links.values()):
        assert 1e8 < link.bytes_per_s < 1e12
        assert 0 < link.startup_s < 1e-3


@pytest.mark.parametrize(
    ("name", "side", "port"),
    [("tpu_v5e_4x4", 4, 50e9), ("tpu_v5e_8x8", 8, 50e9), ("tpu_v6e_8x8", 8, 100e9)],
)
def test_a_slice_that_does_not_wrap_around_has_half_a_toruses_links(name, side, port):
    """A row of `side` links crosses its middle each way; a quarter of all pairs is on each half."""
    found = load_topology(f"{name}:1")
    assert found.devices == side**2
    assert found.tiers[0].links["all_to_all"].bytes_per_s == 0.9 * 4 * side * port / side**2
    assert found.tiers[0].links["all_gather"].bytes_per_s == 0.9 * 2 * port


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
        ("dgx_h100:", "not a number of nodes"),
        ("dgx_h100:0", "at least 1"),
        ("dgx_h100:-1", "not a number of nodes"),
        ("dgx_h100:1.5", "not a number of nodes"),
        ("nowhere.json", "neither a file nor a known cluster"),
    ],
)
def test_an_unknown_cluster_is_refused_in_one_line(name, message):
    with pytest.raises(InputError, match=message) as caught:
        load_topology(name)
    assert "\n" not in str(caught.value)


def test_a_tier_may_be_slower_in_one_kind(tmp_path):
    fast, slow = TWO.tiers
    links = {**slow.links, KINDS[0]: Link(1e-3, 5e9)}
    mixed = replace(TWO, tiers=(fast, replace(slow, links=links)))
    write_topology(mixed, tmp_path / "mixed.json")
    assert read_topology(tmp_path / "mixed.json").tiers[1].links[KINDS[0]].bytes_per_s == 5e9


def test_the_example_of_the_page_is_a_topology():
    page = (Path(__file__).parents[3] / "docs/formats/topology.md").read_text()
    links, example = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    topology = from_json(json.loads(example), "docs/formats/topology.md")
    assert (topology.devices, topology.nodes) == (16, 2)
    known = load_topology("h200:2")
    for mine, theirs in zip(topology.tiers, known.tiers, strict=True):
        rates = [tier.links["all_to_all"].bytes_per_s for tier in (mine, theirs)]
        assert rates[0] == rates[1]
    for dtype, curve in topology.device.products.items():
        assert set(curve) <= set(known.device.products[dtype])
    places = from_json(json.loads(example) | json.loads(f"{{{links}}}"), "docs/formats/topology.md")
    assert places.groupings()[1] == ((0, 1), (2, 3))
    assert places.ratios("all_gather", ((0, 1),))[1] == pytest.approx((1 / 50, 1 / 40))
