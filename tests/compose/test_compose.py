"""The tool behind benchmarks/results/compose.md, and a few of its combinations."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from moejax.errors import InputError
from tests.cases import random_batch, some_of
from tests.compose import page
from tests.compose.choices import micro_batch_rows, token_numbers
from tests.compose.cover import all_pairs, draw, pairs_of, plan
from tests.compose.features import FACTORS, ROUNDED, check_combination, config_of, plain
from tests.compose.run import Outcome, run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("unchecked_annotations")


def combination(**features):
    return tuple((dict(plain()) | features).items())


# On eight devices, with what the tests of steps have apart or not at all.
CASES = [
    combination(
        mesh="expert 2, tensor 2",
        stages="2 stages, layers before",
        blocks="experts in each second",
        router="jitter",
        prediction="two tokens",
        **{"micro-batches": "4 micro-batches"},
    ),
    combination(
        mesh="fsdp 2, expert 2",
        nodes="two nodes",
        router="sigmoid, groups, bias moved",
        optimizer="Muon",
        attention="latent of queries, window",
        **{"micro-batches": "4 micro-batches", "dense weights": "gathered once a step"},
    ),
    combination(
        mesh="expert 4",
        nodes="two nodes",
        route="two_level_merge",
        sequences="2 devices share",
        router="sigmoid, groups, bias moved",
        adapters="adapters",
        codecs="hybrid",
    ),
    combination(
        mesh="expert 4", nodes="two nodes", codecs="strong", adapters="adapters", numbers="bfloat16"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", some_of(CASES, CASES[2]), ids=page.name)
def test_a_combination_trains_as_the_oracle_does(case):
    outcome = run(case)
    assert page.verdict(case, dataclasses.asdict(outcome)) == "right", outcome
    assert outcome.traced == {"gpu": "traced", "tpu": "traced"}


def test_every_feature_changes_the_config():
    for factor, features in FACTORS.items():
        configs = [config_of(combination(**{factor: feature})) for feature in features]
        assert len(set(configs)) == len(configs), factor


@pytest.mark.slow
def test_combinations_hold_pairs_that_nobody_covered_and_refused_pairs_are_refused():
    left, drawn = all_pairs(), draw(0)
    for _ in range(20):
        one = next(drawn)
        if isinstance(one[1], str):
            assert one[0] in left
            with pytest.raises(InputError):
                check_combination(combination(**dict(one[0])))
            left.discard(one[0])
            continue
        check_combination(one)
        assert pairs_of(one) & left
        left -= pairs_of(one)


@pytest.mark.exhaustive
def test_what_has_run_is_not_planned_again_and_the_rest_is():
    done = plan(0)[0][:10]
    wanted, refused = plan(0, done)
    assert not set(done) & set(wanted)
    covered = set().union(*map(pairs_of, [*done, *wanted]))
    assert all_pairs() <= covered | set(refused)
    for number, one in enumerate(wanted):
        assert pairs_of(one) - set().union(*map(pairs_of, [*done, *wanted[:number]]))


def test_the_committed_page_covers_every_pair_that_is_not_refused():
    results = json.loads((ROOT / "benchmarks/results/compose.json").read_text())
    runs = [(tuple(map(tuple, one["combination"])), one["outcome"]) for one in results["results"]]
    assert {page.verdict(*one) for one in runs} == {"right"}
    covered = set().union(*(pairs_of(combination) for combination, _ in runs))
    refused = {frozenset(map(tuple, pair)) for *pair, _ in results["refused"]}
    assert all_pairs() <= covered | refused


def test_a_pair_that_rounds_nothing_counts_where_nothing_rounds():
    exact = combination(mesh="fsdp 4", route="merge")
    rounded = combination(mesh="fsdp 4", route="merge", numbers="bfloat16")
    pair = frozenset({("mesh", "fsdp 4"), ("route", "merge")})
    assert pair in pairs_of(exact)
    assert pair not in pairs_of(rounded)
    assert frozenset({("mesh", "fsdp 4"), ("numbers", "bfloat16")}) in pairs_of(rounded)
    assert all(pair & ROUNDED for pair in pairs_of(rounded))


def test_micro_batches_take_rows_of_every_device():
    cfg = config_of(combination(mesh="fsdp 4", **{"micro-batches": "4 micro-batches"}))
    # Device d has rows 8 d to 8 d + 7, two of them in each micro-batch.
    wanted = [[8 * device + 2 * k + i for device in range(4) for i in (0, 1)] for k in range(4)]
    np.testing.assert_array_equal(micro_batch_rows(cfg), wanted)
    assert len(random_batch(cfg).token_BT) == 32


def test_tokens_are_numbered_over_devices_as_they_lie_there():
    """Two pairs of devices have 16 rows; of each row one has the stripes 0 and 3, one 1 and 2."""
    cfg = config_of(combination(mesh="fsdp 2, expert 2", sequences="2 devices share"))
    number_BT = token_numbers(cfg, replicated=False)
    assert number_BT[0].tolist() == [0, 1, 2, 3, *range(128, 136), 4, 5, 6, 7]
    assert number_BT[1, 0] == 8
    assert number_BT[16].tolist() == [256, 257, 258, 259, *range(384, 392), 260, 261, 262, 263]
    assert sorted(number_BT.ravel()) == list(range(32 * 16))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "right"),
        ({"loss": 1e-5}, "loss 1.0e-05"),
        ({"gradient": float("nan")}, "gradient nan"),
        ({"bias": 0.02}, "bias 2.0e-02"),
        ({"error": "TypeError: x"}, "TypeError: x"),
        ({"refused": "no"}, "refused"),
    ],
)
def test_a_verdict_says_what_is_wrong(changes, said):
    outcome = Outcome(loss=1e-7, gradient=1e-6, second=1e-6, bias=0.0, traced={"gpu": "traced"})
    outcome = dataclasses.asdict(dataclasses.replace(outcome, **changes))
    assert page.verdict(plain(), outcome) == said
    text = page.build([{"combination": plain(), "outcome": outcome}], {}, 0)
    right = said == "right"
    assert f"| right | {int(right)} |" in text
    assert f"| covered | {len(pairs_of(plain())) if right else 0} |" in text
