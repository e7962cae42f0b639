"""Sentences about the memory of hosts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from moejax.config.fields import change
from moejax.plan.cluster.topology import Host
from moejax.plan.price.cost import HOST_MEMORY, Totals
from moejax.plan.report.tables import host_seconds, host_text, plan_text, residuals_text, sentence
from moejax.plan.search.search import SearchResult
from tests.plan.clusters import GIB, cluster
from tests.plan.report.test_tables import pretend

HOST = Host(5e6, 5e6, 100 * GIB)


def with_host(seconds, host=3.0, node=12.0, **values):
    """A plan of 1 GiB of a device whose copies take 0.3 s each way, of which 0.2 s are exposed."""
    plan = pretend(seconds, **values)
    totals = Totals(exposed={HOST_MEMORY: 0.2})
    totals.sent["to device", HOST_MEMORY] = totals.sent["from device", HOST_MEMORY] = 0.3
    main = SimpleNamespace(totals=totals, seconds=seconds)
    both = {"host_bytes": host * GIB, "node_bytes": node * GIB}
    return SimpleNamespace(**vars(plan) | both | {"parts": ((1.0, main),), "main": main})


def result(*ranked, host_budget=90 * GIB):
    return SearchResult(list(ranked), 9, 5, 1, 8 * GIB, 1.0, host_budget=host_budget)


def test_both_memories_and_the_copies_between_them_are_named():
    plan = with_host(2.0, **{"memory.optimizer": "host"})
    assert host_seconds(plan) == pytest.approx((0.6, 0.2))
    text = host_text(plan, result(plan))
    for part in ("1.00 GiB of a device", "3.00 of its host", "12.0 of 90.0 GiB"):
        assert part in text
    for part in ("take 600.00 ms", "waits 200.00 ms"):
        assert part in text
    assert "moments on the host" in plan_text(plan.cfg)
    assert host_text(pretend(2.0), result(pretend(2.0))) is None


def test_a_plan_that_does_not_fit_its_host_says_so():
    best, other = pretend(2.0), with_host(1.0, node=95.0)
    found = result(best, other)
    assert found.fits(best)
    assert not found.fits(other)
    said = sentence(best, other, "the runner-up", found)
    assert "does not fit: it needs 95.0 GiB of a node's host, 90.0 may be used" in said


def test_the_rule_of_residuals_is_told_where_something_is_computed_again():
    """10 GFLOP/s and 5 MB/s each way: 4,000 FLOPs a byte; width 32."""
    there = replace(cluster(), host=HOST)
    again = pretend(2.0, **{"model.remat": "attention"})
    short, long = (
        SimpleNamespace(**vars(again) | {"cfg": change(again.cfg, {"data.sequence_length": n})})
        for n in (1024, 8192)
    )
    width = again.cfg.model.width
    text = residuals_text(result(short), there)
    assert f"a product's result {width} and causal attention's 1,024 FLOPs" in text
    assert "above 4,000, so there neither pays" in text
    assert "only causal attention pays" in residuals_text(result(long), there)
    assert residuals_text(result(pretend(2.0)), there) is None
    assert residuals_text(result(again), cluster()) is None
