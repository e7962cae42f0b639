"""The pages of several sites: those of their records."""

import json

from benchmarks.emulated import sites
from benchmarks.learning import sites as loss
from tests.benchmarks.records import RESULTS


def test_pages_are_those_of_their_records():
    speeds, runs = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("sites", "sites_loss")
    )
    assert (RESULTS / "sites.md").read_text() == sites.page(speeds)
    assert (RESULTS / "sites_loss.md").read_text() == loss.page(runs, speeds)
