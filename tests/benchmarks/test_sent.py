"""The page of sent bytes beside what plans count: on every shape, and as near as it says."""

import json
from pathlib import Path
from statistics import median

RECORD = Path(__file__).parents[2] / "benchmarks/results/sent.json"
BARS = {"collectives": 1.03, "steps": 1.05, "stages": 1.05}
SHAPES = {(2, 2), (2, 4), (3, 2), (4, 2)}  # hosts, and devices of each


def test_sent_bytes_are_those_that_are_counted_on_every_shape():
    shapes = {name: set() for name in BARS}
    for result in json.loads(RECORD.read_text())["results"]:
        case = result["case"]
        shapes[case["name"]].add((case["hosts"], case["devices"]))
        assert set(result["found"]) == set(case["variants"])
        for name, one in result["found"].items():
            if one["counted"]:
                ratio = round(median(one["sent"]) / one["counted"], 3)  # as on the page
                assert 1 <= ratio <= BARS[case["name"]], (case["name"], name)
    assert shapes == dict.fromkeys(BARS, SHAPES)
