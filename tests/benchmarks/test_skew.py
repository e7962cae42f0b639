"""Formulas of the page about uneven experts, by hand-worked cases; the page is its record's."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.skew.copies import (
    busiest,
    homes_in_order,
    homes_rearranged,
    placed,
    ring,
    split,
)
from benchmarks.skew.loads import (
    busiest_device,
    busiest_expert,
    kept,
    kept_apart,
    loads_of,
    summary,
)
from benchmarks.skew.page import page
from benchmarks.skew.paths import predicted, predicted_by_id
from benchmarks.skew.record import Setup, config_of, ways
from moejax.config.checks import check
from moejax.plan.price.routing import read_expert_load

ROOT = Path(__file__).parents[2] / "benchmarks"

LOADS = st.lists(st.integers(0, 100), min_size=16, max_size=16).filter(any)


def test_loads_count_choices_by_micro_batch_and_layer_and_leave_the_rest_out():
    expert_NLK = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[3, 2], [0, 1]]])
    load_MLE = loads_of(expert_NLK, experts=4, tokens=2)
    assert load_MLE.tolist() == [[[2, 1, 1, 0], [0, 1, 2, 1]]]


def test_busiest_is_over_the_mean_of_experts_and_of_devices_in_order():
    load_MLE = np.array([[[5, 1, 1, 1], [2, 2, 2, 2]]])
    assert busiest_expert(load_MLE).tolist() == [[2.5, 1.0]]
    assert busiest_device(load_MLE, 2).tolist() == [[1.5, 1.0]]
    assert busiest_device(load_MLE, 4).tolist() == [[2.5, 1.0]]


def test_a_summary_takes_medians_over_micro_batches_and_the_worst_layer():
    found = summary(np.array([[1.0, 2.0, 9.0], [1.0, 4.0, 1.0], [1.0, 3.0, 1.0]]))
    assert found == {"median": 1.0, "worst": 3.0, "layers": [1.0, 3.0, 1.0]}


def test_hot_experts_are_kept_as_far_as_they_are_in_both():
    before_LE = np.arange(16)[None]  # 15 and 14 are hot
    after_LE = np.where(np.arange(16) == 14, 0, before_LE)  # 15 and 13
    assert kept(before_LE, after_LE).tolist() == [0.5]
    load_MLE = np.stack([before_LE, after_LE, before_LE])
    assert kept_apart(load_MLE, 1).tolist() == [[0.5], [0.5]]
    assert kept_apart(load_MLE, 2).tolist() == [[1.0]]


# Layer 1's expert is layer 0's plus one; layer 2's is the sum of both before it, of four.
STEADY = np.array([[[a], [(a + 1) % 4], [(2 * a + 1) % 4]] for a in (0, 0, 0, 1, 2, 3)])


def test_a_path_tells_what_it_was_followed_by_and_popularity_the_most_frequent():
    by_path = predicted(STEADY, STEADY, layer=2, length=1, experts=4)
    assert by_path == {"first": 1.0, "share": 1.0, "seen": 1.0}
    popular = predicted(STEADY, STEADY, layer=2, length=0, experts=4)
    assert popular["first"] == pytest.approx(4 / 6)  # 1, behind 0 and 2


def test_a_path_that_was_not_seen_or_too_seldom_gives_way_to_a_shorter_one():
    other = np.array([[[1], [1], [1]]])  # 1 then 1 was never seen; 1 in layer 1 was
    found = predicted(STEADY, other, layer=2, length=2, experts=4)
    assert found == {"first": 1.0, "share": 1.0, "seen": 0.0}
    once = np.array([[[1], [2], [3]]])
    assert predicted(STEADY, once, layer=2, length=2, experts=4)["first"] == 1.0
    # Twice is too seldom for 1 then 2, and for 2: popularity says 1.
    assert predicted(STEADY, once, layer=2, length=2, experts=4, least=2)["first"] == 0.0


def test_one_of_two_experts_found_is_half():
    learn = np.array([[[0, 1], [0, 1]]])
    test = np.array([[[0, 1], [0, 2]]])
    found = predicted(learn, test, layer=1, length=1, experts=4)
    assert (found["first"], found["share"]) == (1.0, 0.5)


def test_an_id_that_was_not_seen_is_told_by_popularity():
    learn = np.array([7, 7, 8]), np.array([[[1]], [[1]], [[2]]])
    test = np.array([8, 9]), np.array([[[2]], [[1]]])
    assert predicted_by_id(learn, test, layer=0, experts=4)["first"] == 1.0


def test_the_hottest_go_first_to_the_least_busy_device_with_room():
    assert homes_in_order(4, 2).tolist() == [0, 0, 1, 1]
    assert homes_rearranged(np.array([8, 6, 5, 1]), 2).tolist() == [0, 1, 1, 0]
    load_E = np.array([9, 1, 1, 1])
    assert busiest(load_E, placed(load_E, "in order", 2)) == pytest.approx(10 / 6)
    assert busiest(load_E, placed(load_E, "rearranged", 2)) == pytest.approx(10 / 6)


def test_the_slot_of_a_device_holds_the_hottest_expert_of_the_next():
    load_E = np.array([1, 9, 2, 3, 4, 4])
    assert ring(load_E, 3, 1) == [[0], [0, 2], [1], [1, 0], [2, 1], [2]]
    # By load over holders: 9, then 9 / 2 again; 3, then 2; 4, then the other 4.
    assert ring(load_E, 3, 2) == [[0], [0, 2, 1], [1, 2], [1, 0], [2, 1], [2, 0]]


def test_a_split_levels_devices_as_far_as_copies_reach():
    load_E = np.array([6.0, 0.0, 0.0, 0.0])
    shares = split(load_E, [[0, 3], [1], [2], [3]], 4)
    assert shares[0].tolist() == [0.5, 0, 0, 0.5]
    assert busiest(load_E, shares) == pytest.approx(2.0)
    assert busiest(load_E, placed(load_E, "3", 4)) == pytest.approx(1.0)


@given(load=LOADS, slots=st.integers(1, 3))
def test_shares_are_whole_lie_on_holders_and_no_slot_makes_it_worse(load, slots):
    load_E = np.array(load)
    holders = ring(load_E, 4, slots)
    share_EP = split(load_E, holders, 4)
    np.testing.assert_allclose(share_EP.sum(axis=1), 1, atol=1e-6)
    for expert, own in enumerate(holders):
        assert len(set(own)) == len(own)
        assert set(np.flatnonzero(share_EP[expert] > 1e-9)) <= set(own)
    before = busiest(load_E, placed(load_E, "in order", 4))
    assert busiest(load_E, share_EP) <= before + 1e-6


def test_the_page_is_that_of_its_record():
    record = json.loads((ROOT / "results/skew.json").read_text())
    doc = ast.get_docstring(ast.parse((ROOT / "skew/__main__.py").read_text()))
    assert (ROOT / "results/skew.md").read_text() == page(record, doc or "")


def test_recorded_loads_are_read_by_plans_and_choices_are_small():
    for path in sorted((ROOT / "recorded").glob("*.json")):
        assert len(read_expert_load(str(path), 32).share_LE) == 8
    path = ROOT / "recorded/unbalanced.npz"
    assert path.stat().st_size < 300_000
    with np.load(path, allow_pickle=False) as file:
        assert file["expert_TLK"].shape == (file["tokens_N"].sum(), 8, 4)
        assert file["expert_TLK"].max() < file["num_experts"] == 32


def test_the_command_trains_four_ways_and_the_page_says_which_are_missing():
    record = json.loads((ROOT / "results/skew.json").read_text())
    routers = ways(8)
    assert list(routers) == ["balance loss", "selection bias", "bias and sequence loss", "none"]
    for router in routers.values():
        check(config_of(Setup(), router))
    some = next(iter(record["ways"].values()))
    whole = page(record | {"ways": {way: record["ways"].get(way, some) for way in routers}}, "")
    assert "made without" not in whole
    assert all(f"| {way} | 16k | " in whole for way in routers)
    alone = page(record | {"ways": {"balance loss": some, "none": some}}, "")
    assert "made without: selection bias, bias and sequence loss (`--ways`)" in alone
