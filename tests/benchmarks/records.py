"""Records of benchmarks on emulated clusters, as tests read them."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.emulated.exchange import Case

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def results_of(
    name: str, page: Callable[[dict[str, Any]], str], cases: Iterable[Case]
) -> list[dict[str, Any]]:
    """Returns the results of a record, after a look at its page and its cases.

    Fields that a case got after the record was written have their default.

    Args:
      name: of the record and its page, without the ending.
      page: the record -> Markdown.
      cases: which it must have, in order.
    """
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert (RESULTS / f"{name}.md").read_text() == page(record)
    found = [Case(**result["case"]) for result in record["results"]]
    assert _as_read(found) == _as_read(cases)
    return record["results"]


def _as_read(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Returns cases as JSON has them: lists for tuples."""
    return json.loads(json.dumps([asdict(case) for case in cases]))
