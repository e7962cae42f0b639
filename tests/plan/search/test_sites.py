"""Sites in the search: which nodes, which period and codec, and what is said about them."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from moejax.config.checks.planned import CHOSEN
from moejax.config.fields import change
from moejax.errors import InputError
from moejax.plan.price.candidate import PricedPlan, price
from moejax.plan.price.routing import read_expert_load
from moejax.plan.report import sites as report
from moejax.plan.report.sites import advice_text, order_text, sites_texts
from moejax.plan.report.tables import plan_text, remarks
from moejax.plan.search import sites, space
from moejax.plan.search.file import load_plan, plan_from, save_plan
from moejax.plan.search.search import FoundSites, SearchResult
from moejax.plan.search.sites import CODECS, FIXED, PERIODS, search_all
from tests.plan.clusters import cluster, limits_of, to_plan

LOAD = read_expert_load("balanced", 8)
NAMES = ("a", "b", "c", "d")


def near(fast=4e7, slow=1e6, groups=((0, 2), (1, 3))):
    """Rates of four nodes: fast inside groups, slow between them."""
    group_of = {node: number for number, group in enumerate(groups) for node in group}
    return tuple(
        tuple(0.0 if a == b else fast if group_of[a] == group_of[b] else slow for b in range(4))
        for a in range(4)
    )


def four(pairs=(), **more):
    """Four nodes of two devices; the network is as fast as the slowest pair."""
    return replace(cluster(inside=2, nodes=4, slow=1e6, **more), pairs=pairs, node_names=NAMES)


def model(**settings):
    cfg = to_plan(64, moe={"capacity_factor": 1.25})
    return change(cfg, {"plan.sites": True, "data.sequence_length": 32, **settings})


class FakePlan(PricedPlan):
    """A plan of so many seconds that waits for other sites for some of them."""

    cfg, seconds = None, 0.0

    def __init__(self, cfg, seconds, waited):
        step = SimpleNamespace(totals=SimpleNamespace(exposed={"outer": waited}))
        vars(self).update(cfg=cfg, seconds=seconds, parts=((1.0, step),))
        vars(self)["traced"] = self

    __eq__, __hash__, __repr__ = object.__eq__, object.__hash__, object.__repr__


@dataclass
class Fake:
    """Searches and prices by formula, so that choices of sites are tested without a trace.

    Attributes:
      waits: (period, codec) -> seconds that a step of two seconds waits for other sites.
      without: seconds of the best plan without an outer loop.
      inside: sites -> seconds of the best plan inside a site, which all must have.
      at_once: seconds of a step if all is sent at once.
    """

    waits: object = lambda every, codec: 0.0
    without: float = 4.0
    inside: dict | None = None
    at_once: float = 3.0
    too_large: object = lambda cfg: False

    def install(self, patch):
        patch.setattr(sites, "search", self.search)
        patch.setattr(sites, "_price", self.price)
        patch.setattr(sites, "_logged", lambda _: 0.1)
        self.prices, self.topologies = [], []
        return self

    def plan(self, cfg, seconds):
        every, codec = cfg.outer.every, cfg.outer.codec
        waited = 0.1 + (self.waits(every, codec) if every is not None else 0.0)
        return FakePlan(cfg, seconds, waited)

    def search(self, cfg, topology, limits, load, **_):
        self.topologies.append(topology)
        if cfg.outer.every is None:
            ranked = [self.plan(cfg, self.without), self.plan(cfg, self.without + 1)]
        else:
            assert limits.pinned >= {"mesh.replica", *FIXED}
            ranked = [self.plan(cfg, (self.inside or {}).get(cfg.mesh.replica, 2.0))]
        found = SearchResult(ranked, 1, 1, 0, 1e9, 1.0)
        found.fits = lambda plan: not self.too_large(plan.cfg)
        return found

    def price(self, start, question, changes):
        cfg = change(start.cfg, changes)
        self.prices.append(changes)
        return self.plan(cfg, self.at_once if cfg.outer.order == "all" else start.seconds)


def asked(fake, patch, topology, cfg=None, **more):
    """What a search finds with the formulas of `fake`."""
    cfg = model() if cfg is None else cfg
    fake.install(patch)
    return search_all(cfg, topology, limits_of(cfg, topology), LOAD, **more)


def chosen(found):
    outer = found.sites.best.plan.cfg.outer
    return outer.every, outer.codec, outer.order


def bytes_hidden(least):
    """Waits of a codec unless its period is at least so long."""
    return lambda every, codec: 0.0 if every >= least[codec] else 1.0


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        ({"none": 3, "int8": 1, "int4+feedback": 1}, (4, "none")),
        ({"none": 9, "int8": 4, "int4+feedback": 4}, (16, "none")),
        ({"none": 33, "int8": 9, "int4+feedback": 5}, (16, "int8")),
        ({"none": 999, "int8": 400, "int4+feedback": 200}, (256, "int4+feedback")),
        ({"none": 40, "int8": 33, "int4+feedback": 30}, (32, "int4+feedback")),
    ],
)
def test_the_shortest_period_that_hides_with_the_most_exact_codec(monkeypatch, least, expected):
    found = asked(Fake(bytes_hidden(least)), monkeypatch, four())
    assert chosen(found) == (*expected, "layers")
    assert found.sites.best.hidden
    assert found.ranked[0] is found.sites.best.plan


def test_where_no_period_hides_the_longest_is_taken_and_it_is_said(monkeypatch):
    fake = Fake(lambda every, codec: 256.0 / every)
    found = asked(fake, monkeypatch, four())
    assert chosen(found) == (PERIODS[-1], CODECS[-1], "layers")
    assert not found.sites.best.hidden
    assert any("no period hides" in text for text in sites_texts(found.sites, four(), "x"))


def test_a_period_or_codec_that_is_set_stays(monkeypatch):
    fake = Fake(bytes_hidden({"none": 64, "int8": 16, "int4+feedback": 8}))
    cfg = model(**{"outer.every": 24})
    assert chosen(asked(fake, monkeypatch, four(), cfg)) == (24, "int8", "layers")
    cfg = model(**{"outer.codec": "none"})
    assert chosen(asked(fake, monkeypatch, four(), cfg)) == (64, "none", "layers")
    # With a period set no plan without an outer loop is looked for.
    found = asked(fake, monkeypatch, four(), model(**{"outer.every": 8}))
    assert found.sites.without is None
    assert all(plan.cfg.outer.every is not None for plan in found.ranked)


def test_everything_at_once_is_taken_only_if_it_is_faster(monkeypatch):
    assert chosen(asked(Fake(at_once=2.0), monkeypatch, four()))[2] == "layers"
    assert chosen(asked(Fake(at_once=1.9), monkeypatch, four()))[2] == "all"


def test_sites_are_first_only_if_they_are_faster(monkeypatch):
    slower = asked(Fake(without=1.0), monkeypatch, four())
    assert [plan.seconds for plan in slower.ranked] == [1.0, 2.0, 2.0]
    assert slower.ranked[0].cfg.outer.every is None
    (first, *_) = sites_texts(slower.sites, four(), "replica 8")
    assert first.startswith("no outer loop: 4 sites of 1 node (a | b | c | d), H = 4")
    assert "2.00 x as long as the best plan without an outer loop (replica 8)" in first
    faster = asked(Fake(without=5.0), monkeypatch, four())
    (first, *_) = sites_texts(faster.sites, four(), "replica 8")
    assert "2.50 x as fast as the best plan without an outer loop (replica 8)" in first


def test_fewer_sites_are_taken_unless_they_are_clearly_slower(monkeypatch):
    topology = four(near(groups=((0, 1), (2, 3))))
    equal = asked(Fake(inside={4: 2.0, 2: 2.03}), monkeypatch, topology)
    assert len(equal.sites.best.groups) == 2
    clear = asked(Fake(inside={4: 2.0, 2: 2.1}), monkeypatch, topology)
    assert len(clear.sites.best.groups) == 4
    assert [len(one.groups) for one in clear.sites.others] == [2]
    texts = list(sites_texts(clear.sites, topology, "x"))
    assert any("2 sites 1.05 x as long" in text for text in texts)


def test_nodes_of_a_site_follow_one_another_in_the_order_of_a_plan(monkeypatch, tmp_path):
    fake, topology = Fake(inside={4: 3.0}), four(near())
    found = asked(fake, monkeypatch, topology, reorder=True)
    assert found.sites.best.groups == ((0, 2), (1, 3))
    assert found.sites.best.order == (0, 2, 1, 3)
    assert fake.topologies[-1].pairs == near(groups=((0, 1), (2, 3)))
    assert any("nodes numbered a c b d" in text for text in sites_texts(found.sites, topology, ""))
    monkeypatch.setattr("moejax.plan.search.file.to_json", lambda _: {"seconds": 1.0})
    plan = plan_from(found, topology, "balanced")
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").order == ["a", "c", "b", "d"]
    assert plan.settings["outer.every"] == 4
    # A program that runs has its order.
    fixed = asked(Fake(inside={4: 3.0}), monkeypatch, topology)
    assert len(fixed.sites.best.groups) == 4
    (note,) = fixed.sites.notes
    assert "no sites of a c | b d" in note
    assert "Start them in the order a c b d" in note


def test_sites_of_different_sizes_are_none_and_the_reason_is_told(monkeypatch):
    topology = four(near(groups=((0, 1, 2), (3,))))
    found = asked(Fake(inside={4: 9.0}), monkeypatch, topology)
    assert [len(one.groups) for one in (found.sites.best, *found.sites.others)] == [4]
    (note,) = found.sites.notes
    assert note.startswith("no sites of a b c | d: they have 1 and 3 nodes")
    pinned = model(**{"mesh.replica": 2})
    none = asked(Fake(), monkeypatch, topology, pinned)
    assert none.sites == FoundSites(None, (), none.ranked[0], (note,))
    assert next(iter(sites_texts(none.sites, topology, ""))).startswith("no outer loop")
    with pytest.raises(InputError, match=r"no plan with sites. no sites of a b c \| d"):
        asked(Fake(), monkeypatch, topology, change(pinned, {"outer.every": 8}))


def test_a_plan_that_does_not_fit_hides_nothing(monkeypatch):
    fake = Fake(too_large=lambda cfg: cfg.outer.codec == "none" or cfg.outer.every == 4)
    assert chosen(asked(fake, monkeypatch, four())) == (8, "int8", "layers")


def test_without_the_setting_no_plan_has_sites(monkeypatch):
    fake = Fake()
    found = asked(fake, monkeypatch, four(), model(**{"plan.sites": False}))
    assert found.sites is None
    assert [topology.pairs for topology in fake.topologies] == [()]
    assert fake.prices == []


@pytest.mark.slow
def test_the_chosen_sites_are_the_best_of_all_by_brute_force():
    """Of all ways to put four nodes into equal sites, and of all orders of the nodes."""
    cfg, topology = model(), four(near())
    pinned = frozenset(CHOSEN) - {"mesh.replica", "mesh.fsdp"}
    limits = limits_of(cfg, topology, pinned=pinned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "rules", lambda *_: {})
        patch.setattr(sites, "PERIODS", (4, 16))
        found = search_all(cfg, topology, limits, LOAD, traces=4, reorder=True)
    best = found.ranked[0]
    assert best is found.sites.best.plan
    by_brute_force = {}
    for one in (found.sites.best, *found.sites.others):
        for order in itertools.permutations(range(4)):
            own = topology.reordered(order)
            by_brute_force[len(one.groups), order] = price(one.plan.traced, own, LOAD).seconds
    fastest = min(by_brute_force.values())
    assert best.seconds <= 1.02 * fastest
    two = min(seconds for (count, _), seconds in by_brute_force.items() if count == 2)
    priced = {len(s.groups): s.plan.seconds for s in (found.sites.best, *found.sites.others)}
    assert priced[2] == pytest.approx(two)
    assert found.sites.without.seconds > best.seconds
    text = remarks(found, topology, LOAD)[0]
    assert "as fast as the best plan without an outer loop" in text
    assert "copies are sites, H = " in plan_text(best.cfg)


def result_of(cfg, seconds):
    return SearchResult([FakePlan(cfg, seconds, 0.0)], 1, 1, 0, 1e9, 1.0)


def priced_by(monkeypatch, seconds_on):
    """Prices plans again by a formula of the topology."""

    def price_again(plan, topology, _):
        return FakePlan(plan.cfg, seconds_on(topology), 0.0)

    monkeypatch.setattr(report, "price", price_again)


def test_links_that_cost_much_are_told_and_others_are_not(monkeypatch):
    topology, found = four(near()), result_of(model(**{"plan.sites": False}), 3.0)
    seen = []
    priced_by(monkeypatch, lambda ideal: seen.append(ideal) or 1.5)
    text = advice_text(found, topology, LOAD)
    assert "2.0 x as long" in text
    assert "`plan.sites=true`" in text
    (ideal,) = seen
    assert ideal.tiers[1].links == topology.tiers[0].links
    assert ideal.pairs == ()
    priced_by(monkeypatch, lambda _: 2.5)
    assert advice_text(found, topology, LOAD) is None
    one = replace(cluster(inside=8, nodes=1), tiers=cluster(inside=8).tiers[:1])
    assert advice_text(found, one, LOAD) is None


def test_a_faster_order_of_nodes_is_told(monkeypatch):
    """Of nodes a, b, c, d the links a-c, c-b and b-d are fast: stages should pass that way."""
    links = ({0, 2}, {2, 1}, {1, 3})
    pairs = tuple(
        tuple(0.0 if a == b else 4e7 if {a, b} in links else 1e6 for b in range(4))
        for a in range(4)
    )
    topology, found = four(pairs), result_of(model(**{"plan.sites": False}), 3.0)
    priced_by(monkeypatch, lambda moved: 1.5 if moved.pairs[0][1] == 4e7 else 3.0)
    text = order_text(found, topology, LOAD)
    assert text.startswith("with nodes numbered a c b d, along fast links, it would take 0.50 x")
    assert order_text(found, replace(topology, pairs=()), LOAD) is None
    assert order_text(found, topology.reordered((0, 2, 1, 3)), LOAD) is None
    priced_by(monkeypatch, lambda _: 2.9)
    assert order_text(found, topology, LOAD) is None
