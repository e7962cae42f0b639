"""The page of places in inference: constructed loads, sources of tables, arithmetic."""

from dataclasses import asdict

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
    learned,
    load_of,
    sequences,
)
from tests.benchmarks.records import results_of


def test_the_page_is_that_of_its_record_which_has_every_case():
    for result in results_of("placement", placement.page, placement.cases()):
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


def test_a_case_has_40_latencies():
    told_S = sequences("recorded", 2)
    assert len(told_S) == 14
    assert all(one.expert_NLK.shape[1] == 2 for told in told_S for one in told)
    for kind in ("steady", "turning", "recorded"):
        numbers = sum(len(told) - learned(kind) for told in sequences(kind, 2))
        assert case(kind, 2, 4).rounds == numbers >= 40


def test_batches_wait_for_those_before_them_and_for_their_weights():
    """Three batches of 2 s, before which weights move for 0.5 s, come at 1, 2 and 6 s.

    They begin to move at 1, 3.5 and 6 s, and batches end at 3.5, 6 and 8.5 s. Ahead, weights are
    there at 0.5, 3.5 and 6 s: the batches begin at 1, 3.5 and 6 s.
    """
    times = [1, 2, 6], [0.5] * 3, [2] * 3
    assert placement.latencies(*times) == [2.5, 4, 2.5]
    assert placement.latencies(*times, ahead=True) == [2, 3.5, 2]


def test_batches_come_at_the_same_times_again_as_many_as_keep_static_busy():
    """Seconds between two of a Poisson process have a mean that is their deviation."""
    times = placement.arrivals(10_000, 2.0)
    np.testing.assert_array_equal(times, placement.arrivals(10_000, 2.0))
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(2, rel=0.05)
    assert gaps.std() == pytest.approx(2, rel=0.05)


def test_rows_and_bars_are_those_of_the_latencies(monkeypatch):
    """Batches of a mean of 3 s keep static busy for 0.8 of the time if one comes in 3.75 s.

    They come at 0 and 3.5 s. A path's weights move at 3.5 s, for 1 s; popularity's before.
    """
    given = []
    monkeypatch.setattr(placement, "arrivals", lambda *said: given.append(said) or [0, 3.5])
    seconds = {"static": [3.0, 3.0], "popularity": [1.5, 1.5], "path": [2.0, 2.0], "oracle": [1, 1]}
    found = {n: {"seconds": s, "moved": [0.0, 1.0], "rounds": [4, 1]} for n, s in seconds.items()}
    found["static"]["moved"] = [0.0, 0.0]
    results = [{"case": asdict(case("steady", 2, 4)), "found": found, "others": 0.25}]
    lines = placement.rows(results)
    assert len(lines) == 2 + len(TABLES)
    popular = "1.500 | 1.500 | 1.500 | 2.00 x | 1.50 x | 2.5 | 0.50, 1.00 | 1.50 x | 25%"
    assert lines[3] == f"| 2 x 4 | steady | popularity | {popular} |"
    # Latencies are 2 and 3 s: p95 is 2.95.
    by_path = "2.000 | 2.500 | 2.950 | 1.02 x | 2.95 x | 2.5 | 0.50, 1.00 | 1.20 x | 25%"
    assert lines[4] == f"| 2 x 4 | steady | path | {by_path} |"
    assert set(given) == {(2, 3.0 / 0.8)}
    verdict = placement.verdict(results)
    assert "met (2.00 x static) and missed (1.50 x oracle) by popularity" in verdict
    assert "p95 0.51 x as fast" in verdict


def test_linas_set_up_lies_between_its_bounds():
    """Loads in 15 equal factors from 1 to 5.56: the busiest has 2.06 times the mean of 2.69."""
    for line in placement.lina()[2:]:
        _, name, busiest, exchange, all_, published, _ = map(str.strip, line.split("|"))
        assert busiest.startswith("2.06, 1.")
        low, high = float(exchange.split()[0]), float(all_.split()[0])
        assert low < float(published.split()[0]) < high, name
