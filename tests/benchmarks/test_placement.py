"""The page of places in inference: constructed loads, sources of tables, arithmetic."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.emulated import placement
from benchmarks.emulated.placement import (
    BATCHES,
    EXPERTS,
    LEARNED,
    RECENT,
    TABLES,
    case,
    expected,
    load_of,
    sequences,
)

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.mark.skipif(not (RESULTS / "placement.json").exists(), reason="it has not run yet")
def test_the_page_is_that_of_its_record_which_has_every_case():
    record = json.loads((RESULTS / "placement.json").read_text())
    assert (RESULTS / "placement.md").read_text() == placement.page(record)
    wanted = [json.loads(json.dumps(asdict(one))) for one in placement.cases()]
    assert [result["case"] for result in record["results"]] == wanted
    for result in record["results"]:
        assert all(max(v["difference"]) <= 1e-5 for v in result["found"].values())


@pytest.mark.parametrize("kind", ["steady", "turning"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_one_link_brings_twice_the_mean(kind, hosts):
    (told,) = sequences(kind, hosts)
    assert len(told) == LEARNED + BATCHES
    hot = set()
    for one in told:
        for load_E in load_of(one.expert_NLK, EXPERTS):
            # As many tokens are on each host, so a link brings a fixed part of its host's load.
            load_H = load_E.reshape(hosts, -1).sum(1)
            assert load_H.max() / load_H.mean() == pytest.approx(2, rel=0.08)
            hot.add(int(load_H.argmax()))
    assert len(hot) == (1 if kind == "steady" else hosts)


def test_tokens_choose_distinct_experts():
    expert_NLK = sequences("turning", 4)[0][0].expert_NLK
    assert (np.diff(np.sort(expert_NLK, axis=2), axis=2) > 0).all()


def test_popularity_is_of_recent_batches_and_paths_know_a_turn():
    (told,) = sequences("turning", 2)
    number = LEARNED + 3
    recent = told[number - RECENT : number]
    popular = expected("popularity", number, told, EXPERTS)
    assert (popular == sum(load_of(one.expert_NLK, EXPERTS) for one in recent)).all()
    true_LE = expected("oracle", number, told, EXPERTS)
    assert (true_LE == load_of(told[number].expert_NLK, EXPERTS)).all()
    by_path = expected("path", number, told, EXPERTS)
    assert np.abs(by_path - true_LE).sum() < 0.01 * true_LE.sum()
    assert expected("static", number, told, EXPERTS) is None


def test_rows_and_bars_are_those_of_the_seconds():
    seconds = {"static": [3.0, 3.0], "popularity": [1.5, 1.5], "path": [2.0, 2.0], "oracle": [1, 1]}
    found = {n: {"seconds": s, "moved": [0.0, 1.0], "rounds": [4, 1]} for n, s in seconds.items()}
    results = [{"case": asdict(case("steady", 2, 4)), "found": found, "others": 0.25}]
    lines = placement.rows(results)
    assert len(lines) == 2 + len(TABLES)
    assert (
        "| popularity | 1.500 | 1.500 | 2.00 x | 1.50 x | 2.5 | 0.50, 1.00 | 1.50 x | 25% |"
        in lines[3]
    )
    verdict = placement.verdict(results)
    assert "met (2.00 x static) and missed (1.50 x oracle) by popularity" in verdict
    assert "p95 0.75 x as fast" in verdict


def test_linas_set_up_lies_between_its_bounds():
    """Loads in 15 equal factors from 1 to 5.56: the busiest has 2.06 times the mean of 2.69."""
    for line in placement.lina()[2:]:
        _, name, busiest, exchange, all_, published, _ = map(str.strip, line.split("|"))
        assert busiest.startswith("2.06, 1.")
        low, high = float(exchange.split()[0]), float(all_.split()[0])
        assert low < float(published.split()[0]) < high, name
