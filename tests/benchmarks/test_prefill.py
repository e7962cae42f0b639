"""The pages of prefill in chunks and of calls without gathers: records, cases, arithmetic."""

import json

import pytest

from benchmarks.emulated import decode
from benchmarks.emulated.prefill import CHUNKS, EXPERTS, RATES, SHAPES, Parts, case, name_of, page
from tests.benchmarks.records import RESULTS, results_of


def test_the_page_is_that_of_its_record_which_has_every_case():
    cases = [case(*shape, rate) for shape in SHAPES for rate in RATES]
    for result, one in zip(results_of("prefill", page, cases), cases, strict=True):
        assert list(result["found"]) == list(one.variants)
        assert all(len(v["seconds"]) == one.rounds for v in result["found"].values())
        assert all(v["difference"] <= 1e-5 for v in result["found"].values())


def test_chunks_send_the_same_rows_whatever_the_experts():
    for result in json.loads((RESULTS / "prefill.json").read_text())["results"]:
        found = result["found"]
        sent = {found[name_of(work, n)]["exchanged"] for work in EXPERTS for n in CHUNKS}
        assert max(sent) <= 1.01 * min(sent)


@pytest.mark.parametrize(
    ("parts", "bound"),
    [(Parts(1.0, 0.5, 0.5), 2.0), (Parts(1.0, 0.4, 0.4), 1 / 0.6), (Parts(1.0, 0.0, 0.9), 1.0)],
)
def test_at_best_the_shorter_of_wire_and_experts_is_hidden(parts, bound):
    assert parts.bound == pytest.approx(bound)


def test_the_page_of_calls_without_gathers_is_that_of_its_record():
    results_of(
        "decode", decode.page, [decode.case(t, r) for t in decode.CALLS for r in decode.RATES]
    )
    assert decode.ratio([4.0, 9.0, 5.0], [2.0, 3.0, 1.0]) == "3.00 x (2.00 to 5.00)"
