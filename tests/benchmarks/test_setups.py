"""The set-ups on which plans are measured: each can be planned, and groups are judged apart."""

import pytest

from benchmarks.emulated.planner_page import judge, page
from benchmarks.emulated.setups import GROUPS, SETUPS, config_of, ratios, ratios_of, real_ratios
from benchmarks.machine import ROOT, stamp
from moejax.config.checks.planned import pinned
from moejax.config.load import load_config
from moejax.plan.search import space
from moejax.plan.search.space import Limits


@pytest.mark.parametrize("setup", [one for one in SETUPS if one.group == "odd"], ids=str)
def test_an_odd_set_up_has_meshes_that_differ_in_what_they_move(setup):
    cfg, devices = config_of(setup), setup.hosts * setup.devices
    limits = Limits(devices, setup.hosts, "cpu", "strong", pinned(cfg))
    meshes = {
        (one.mesh.replica, one.mesh.fsdp, one.mesh.expert) for one in space.meshes(cfg, limits)
    }
    assert devices % 3 == 0
    assert {(1, 1, devices), (1, devices, 1), (devices, 1, 1)} <= meshes
    assert space.rules(cfg, limits)["EP"].mesh.expert == devices


def test_shapes_are_odd_in_each_way_that_is_asked_for():
    odd = [config_of(one) for one in SETUPS if one.group == "odd"]
    assert {cfg.moe.experts_per_token for cfg in odd} == {1, 3}
    assert {192, 384} == {cfg.model.width for cfg in odd}
    clusters = {(one.hosts, one.devices, one.rate) for one in SETUPS if one.group == "odd"}
    assert clusters == {(3, 1, 60), (3, 2, 60), (2, 3, 60)}


def test_each_group_has_a_table_and_a_summary_of_its_own():
    rows = [
        {"seconds": [took] * 3, "predicted": took, "settings": {}, "rule": rule, "plain": took == 2}
        for took, rule in ((1.0, None), (2.0, None), (3.0, "FSDP"), (4.0, "EP"))
    ]
    for row in rows:
        row["settings"] = {"mesh.replica": 1}
    results = {}
    for group in GROUPS:
        setup = next(one for one in SETUPS if one.group == group)
        results[str(setup)] = {"setup": vars(setup), "rows": rows, "search_seconds": 1.0, **stamp()}
        results[str(setup)]["flops"] = 1e10
    text = page({"clusters": {}, "results": results}, "Intro.")
    assert text.count(" | FSDP | 3.00 | 1.50 | ") == len(GROUPS)
    assert text.count("Over 1 set-ups: regret 0.0% median") == len(GROUPS)
    assert text.index("Odd shapes: ") < text.index("Shapes with the ratios")
    assert "Of 8 prices 0 are off by more than 10%, 0 of them too low: 0 of 0 with codecs" in text
    alone = page({"clusters": {}, "results": dict(list(results.items())[:1])}, "Intro.")
    assert "Shapes with the ratios" not in alone


def test_where_no_rule_of_thumb_runs_the_page_says_so():
    row = {"seconds": [1.0], "predicted": 1.0, "settings": {"mesh.replica": 1}}
    rows = [row | {"rule": None, "plain": True}, row | {"rule": None, "plain": False}]
    judged = judge(rows)
    assert (judged["rule"], judged["rule_over_chosen"], judged["rule_over_plain"]) == (None,) * 3
    setup = SETUPS[0]
    one = {"setup": vars(setup), "rows": rows, "search_seconds": 1.0, **stamp()}
    text = page({"clusters": {}, "results": {str(setup): one}}, "Intro.")
    assert " | none runs | - | - | " in text
    assert "nan" not in text


# What eight devices on two cores reached in float32: products of 256 columns, and of 128.
FLOPS = {256: 35e9, 128: 20e9}


@pytest.mark.parametrize("setup", [one for one in SETUPS if one.group == "like"], ids=str)
def test_a_set_up_has_the_ratios_of_what_it_is_like(setup):
    ours = ratios_of(setup, FLOPS[config_of(setup).model.width])
    real = real_ratios(setup.model)
    assert ours[0] == pytest.approx(real[0], rel=0.08)
    assert ours[1] == pytest.approx(real[1], rel=0.25)


def test_ratios_are_of_a_layers_bytes():
    """Mixtral on H100s: 8 experts of 3 x 4,096 x 14,336, two of them for each of 4,096 tokens."""
    cfg = load_config(str(ROOT / "configs" / "mixtral_8x7b.py"), [])
    expert, attention = 3 * 4096 * 14_336, 2 * 4096 * 4096 + 2 * 4096 * 1024
    gathered = 8 * (8 * expert + attention)
    exchanged, computing = ratios(cfg, 4096, 8, 769e12, 4e11, 2)
    assert exchanged == pytest.approx(4 * 2 * 8 * 4096 * 2 * 4096 / gathered, rel=1e-3)
    seconds = 6 * 4096 * (2 * expert + attention) / 769e12
    assert computing == pytest.approx(seconds / (gathered / 4e11), rel=1e-3)
