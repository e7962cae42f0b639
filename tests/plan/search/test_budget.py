"""The budget of a search: traces decide, and a time cap that decided instead is told."""

import dataclasses
import functools
import itertools
import zlib
from io import StringIO
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from moejax.plan.price.routing import read_expert_load
from moejax.plan.report.tables import print_ranked
from moejax.plan.search import search as searching
from moejax.plan.search.budget import CAP_SECONDS, TRACES, Budget, default_budget
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.file import load_plan, plan_from, save_plan
from tests.plan.clusters import cluster, limits_of, to_plan


@dataclasses.dataclass
class Estimated:
    """A plan that is priced roughly, without a trace, so that a whole search takes milliseconds."""

    cfg: object
    seconds: float
    peak: SimpleNamespace
    node_bytes: float = 0.0


def look(times, traces=12, cap=120.0):
    """A search on a clock that goes on by the next of `times` whenever it is read."""
    clock, passed = itertools.accumulate(itertools.cycle(times)), []
    fake = SimpleNamespace(perf_counter=lambda: passed.append(next(clock)) or passed[-1])

    def price(cfg, topology, load):
        estimate = Estimate(cfg, topology)
        peak = SimpleNamespace(bytes=estimate.bytes(), arguments=0.0, temporary=0.0)
        rough = 1 + zlib.crc32(repr(cfg).encode()) / 2**32  # what an estimate does not see
        return Estimated(cfg, rough * estimate.seconds(), peak)

    cfg, there = to_plan(), cluster(slow=1e6)
    how = limits_of(cfg, there, codecs="hybrid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moejax.plan.search.search.trace_config", lambda cfg, *_, **__: cfg)
        patch.setattr("moejax.plan.search.search.price", price)
        patch.setattr("moejax.plan.search.search.time", fake)
        patch.setattr("moejax.plan.search.budget.time", fake)
        load = read_expert_load("balanced", 8)
        return searching.search(cfg, there, how, load, traces=traces, seconds=cap)


@functools.cache
def quick_search():
    return look([1e-3])


@pytest.mark.exhaustive
@settings(max_examples=15, deadline=None)
@given(times=st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=5))
def test_the_same_question_gets_the_same_plans_on_a_slow_clock(times):
    slow, quick = look(times), quick_search()
    assert [one.cfg for one in slow.ranked] == [one.cfg for one in quick.ranked]
    assert (slow.traced, slow.cut) == (12, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "traces", [2, 7, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 20))]
)
def test_a_search_makes_as_many_traces_as_it_may(traces):
    assert look([1e-3], traces=traces).traced == traces


@pytest.mark.exhaustive
def test_more_traces_find_nothing_worse():
    seconds = [look([1e-3], traces=traces).ranked[0].seconds for traces in (2, 4, 8, 16, 40)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


@pytest.mark.slow
def test_a_time_cap_that_ends_a_search_is_told(tmp_path, monkeypatch):
    quick, capped = quick_search(), look([1.0], cap=20.0)
    assert 2 <= capped.traced < 12
    said = f"the time cap of 20 s ended the search after {capped.traced} of 12 traces"
    assert capped.cut.startswith(said)
    assert "\n" not in capped.cut
    monkeypatch.setattr("moejax.plan.search.file.to_json", lambda one: {"seconds": one.seconds})
    for found in (quick, capped):
        save_plan(plan_from(found, cluster(), "balanced"), tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json").cut == found.cut
        console = Console(file=StringIO(), width=100, record=True)
        print_ranked(found, cluster(), console)
        assert (said in console.export_text()) == (found is capped)


def test_a_time_cap_is_told_of_the_whole_search_in_whole_seconds():
    """It was told of the second part: `the time cap of 93.7977 s` where --seconds was 300."""
    budget = Budget(traces=17, seconds=300.0)
    for _ in range(11):
        budget.count(1.0)
    rest = budget.another()
    rest.seconds = 93.7977
    rest.count(60.0)
    assert rest.spent
    said = "the time cap of 300 s ended the search after 12 of 20 traces, so"
    assert rest.cut_text().startswith(said)


@pytest.mark.parametrize(
    ("devices", "platform", "asked", "given"),
    [
        (64, "gpu", (None, None), (TRACES["gpu"][0], CAP_SECONDS[0])),
        (65, "gpu", (None, None), (TRACES["gpu"][1], CAP_SECONDS[1])),
        (8, "cpu", (None, None), (TRACES["cpu"][0], CAP_SECONDS[0])),
        (1024, "tpu", (7, None), (7, CAP_SECONDS[1])),
        (1024, "tpu", (None, 5.0), (TRACES["tpu"][1], 5.0)),
    ],
)
def test_a_search_of_many_devices_has_more_traces(devices, platform, asked, given):
    budget = default_budget(devices, platform, *asked)
    assert (budget.traces, budget.seconds) == given


def test_a_trace_that_could_end_after_the_cap_is_not_begun():
    budget = Budget(traces=10, seconds=1e6)
    budget.count(6e5)
    assert budget.spent
    assert budget.cut_text() is not None
