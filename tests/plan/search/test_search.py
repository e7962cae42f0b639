"""The search: what it may choose, what it never chooses, and why it says so."""

import dataclasses
import math
import sys
from types import SimpleNamespace

import pytest

from moejax.config.checks import resolve_mesh
from moejax.config.checks.planned import CHOSEN, CODECS, is_planned, pinned
from moejax.config.compression import PRESETS
from moejax.config.fields import change, get_value
from moejax.config.schema import CompressionConfig, Config
from moejax.errors import InputError
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.price.terms import terms, why
from moejax.plan.report.tables import rest_text
from moejax.plan.search import fitting
from moejax.plan.search.budget import Budget
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.file import load_plan, plan_from, save_plan
from moejax.plan.search.search import _Search, search, space, why_none
from moejax.plan.search.space import Limits
from tests.cases import small_config
from tests.plan.clusters import cluster, limits_of, to_plan


def model(model=None, **moe) -> Config:
    # With a capacity a step has one branch, and is traced in half the time.
    return to_plan(model=model, moe={"capacity_factor": 1.25} | moe)


def found_for(cfg, topology, *free, traces=1000, rules=False, **changes):
    """A search that may choose only what is named, so that it is short and always whole."""
    how = read_expert_load("balanced", cfg.moe.num_experts)
    bound = limits_of(cfg, topology, pinned=frozenset(CHOSEN) - set(free), **changes)
    with pytest.MonkeyPatch.context() as patch:
        if not rules:
            patch.setattr(space, "rules", lambda *_: {})
        return search(cfg, topology, bound, how, traces=traces, seconds=1e6)


@pytest.fixture(scope="module")
def found():
    """Four ways to spread the model over two nodes, and the routes of the two best."""
    return found_for(model(), cluster(), "mesh.replica", "mesh.expert", "route", rules=True)


def test_every_mesh_is_a_mesh():
    cfg, topology = model(), cluster()
    found = list(space.meshes(cfg, limits_of(cfg, topology)))
    assert len(found) == len(set(found)) > 20
    for one in found:
        assert resolve_mesh(one, 8, "cpu") == one
        assert math.prod(get_value(one, name) for name in space.MESH) == 8


def test_what_is_pinned_stays():
    cfg = change(model(), {"mesh.tensor": 2, "mesh.activations": "replicated"})
    topology = cluster()
    for one in space.meshes(cfg, limits_of(cfg, topology)):
        assert (one.mesh.tensor, one.mesh.activations) == (2, "replicated")
    assert pinned(cfg) == {"mesh.tensor", "mesh.activations"}


def test_exchanges_obey_the_rules_of_routes():
    cfg, topology = model(), cluster()
    one = next(m for m in space.meshes(cfg, limits_of(cfg, topology)) if m.mesh.expert == 8)
    names = {other.route for other in space.exchanges(one, limits_of(cfg, topology))}
    assert {"merge", "two_level", "two_level_merge"} <= names
    assert "duplicate" not in names  # there is no tensor axis


@pytest.mark.exhaustive
def test_codecs_are_taken_only_where_they_are_allowed():
    cfg = change(model(), {"mesh.replica": 2, "mesh.expert": 4})
    topology = cluster(slow=1e6)
    plain = found_for(cfg, topology, *CODECS)
    coded = found_for(cfg, topology, *CODECS, codecs="hybrid")
    assert [one.cfg.compression for one in plain.ranked] == [cfg.compression]
    assert coded.ranked[0].seconds < plain.ranked[0].seconds
    assert coded.ranked[0].cfg.compression != cfg.compression


@pytest.mark.exhaustive
def test_a_short_search_comes_to_codecs():
    """Before most meshes and routes: where links are slow they are worth more."""
    free = (*space.MESH, *space.EXCHANGE, *CODECS)
    found = found_for(model(), cluster(slow=1e5), *free, traces=7, codecs="strong")
    assert found.traced == 7
    assert found.ranked[0].cfg.compression != CompressionConfig()


def test_codecs_are_called_by_their_presets_name_where_they_are_just_its_own():
    every = {f"compression.{kind}": codec for kind, codec in PRESETS["strong"].items()}
    for values, text in (
        (every, "codecs strong"),
        ({"compression.preset": "hybrid"}, "codecs hybrid"),
        ({"compression.dispatch": "int8"}, "dispatch int8"),
        ({"mesh.gather_dense": "step"}, "dense weights gathered once a step"),
        ({}, "-"),
    ):
        assert rest_text(change(Config(), values)) == text


@pytest.mark.slow
def test_dense_weights_are_gathered_once_a_step_where_that_is_faster():
    """Four micro-batches on two nodes: each would send dense weights and gradients again."""
    cfg = change(model(), {"mesh.replica": 1, "mesh.fsdp": 8, "train.micro_batches": 4})
    found = found_for(cfg, cluster(slow=1e6), "mesh.gather_dense")
    assert found.traced == 2
    assert [one.cfg.mesh.gather_dense for one in found.ranked] == ["step", "use"]
    copies = space.resolve(change(model(), {"mesh.replica": 8}), limits_of(model(), cluster()))
    assert copies is not None
    assert list(space.gathers(copies, limits_of(model(), cluster()))) == []


@pytest.mark.exhaustive
def test_weights_cross_slow_links_as_seldom_as_pays():
    """Four micro-batches and layers recomputed: flat, weights cross nodes eight times a step."""
    changes = {"mesh.replica": 1, "mesh.fsdp": 8, "train.micro_batches": 4, "model.remat": "full"}
    cfg = change(model(), changes)
    found = found_for(cfg, cluster(slow=1e6), "mesh.gather_across")
    order = [one.cfg.mesh.gather_across for one in found.ranked]
    assert order == ["step", "passes", "use", "flat"]
    assert "weights across nodes first, once a step" in rest_text(found.ranked[0].cfg)
    peaks = [one.peak.bytes for one in found.ranked]
    assert min(peaks[:2]) > max(peaks[2:])  # half of the weights are kept
    inside = change(model(), {"mesh.replica": 2, "mesh.fsdp": 4})
    alone = space.resolve(inside, limits_of(cfg, cluster()))
    assert alone is not None
    fixed = limits_of(alone, cluster(), pinned=frozenset({"mesh.gather_dense"}))
    assert list(space.gathers(alone, fixed)) == []


@pytest.mark.exhaustive
def test_small_buckets_are_larger_where_rounds_cost_more():
    """Of 64 tokens with two choices 16 are for each device, and 20 fit: one has more, mostly."""
    cfg = change(model(capacity_factor=None), {"mesh.replica": 1, "mesh.expert": 8})
    found = found_for(cfg, cluster(slow=1e6), "moe.headroom")
    by_headroom = {one.cfg.moe.headroom: one.seconds for one in found.ranked}
    assert sorted(by_headroom) == [1.25, 1.5, 2.0, 3.0]
    assert by_headroom[2.0] < by_headroom[1.25]
    assert found.ranked[0].cfg.moe.headroom in (1.5, 2.0)
    assert "buckets of" in rest_text(found.ranked[0].cfg)
    many = change(cfg, {"train.batch_sequences": 2048})
    assert len(found_for(many, cluster(slow=1e6), "moe.headroom").ranked) == 1


def test_chunks_are_doubled_as_far_as_they_may_be():
    cfg, topology = model(), cluster()
    free = limits_of(cfg, topology)
    one = space.resolve(change(cfg, {"mesh.expert": 8}), free)

    def chunks(start, **changes):
        found = space.more_chunks(change(one, start), dataclasses.replace(free, **changes))
        return [(other.route_chunks, other.route_chunks_backward) for other in found]

    assert chunks({}) == [(2, None), (2, 1), (1, 2)]
    assert chunks({"route_chunks_backward": 2}) == [(2, 4), (2, None), (1, 4)]
    assert chunks({"route_chunks": 8}) == []
    assert chunks({}, pinned=frozenset({"route_chunks"})) == [(1, 2)]
    assert chunks({}, pinned=frozenset({"route_chunks_backward"})) == [(2, None)]


@pytest.mark.exhaustive
def test_a_slow_network_is_avoided():
    """Experts are small and tokens many, or the other way round: what crosses nodes follows."""
    free, crossing = ("mesh.replica", "mesh.expert"), []
    for hidden, batch in ((4, 512), (2048, 32)):
        cfg = model(expert_hidden=hidden, num_experts=16)
        cfg = change(cfg, {"train.batch_sequences": batch})
        best = found_for(cfg, cluster(slow=1e5, startup=1e-6), *free).ranked[0]
        sent = best.main.totals.bytes_sent
        crossing.append({name for (link, name) in sent if link == "network"})
    tokens = {"dispatch", "combine", "dispatch_backward", "combine_backward"}
    assert not tokens & crossing[0]
    assert tokens & crossing[1]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_made_lighter_or_refused():
    cfg = change(model(model={"num_layers": 4}), {"mesh.expert": 8})
    free = ("train.micro_batches", "model.remat")
    best = found_for(cfg, cluster(), *free).ranked[0]
    tight = cluster(memory=int(best.peak.bytes * 0.9))
    found = found_for(cfg, tight, *free)
    assert all(one.peak.bytes <= 0.95 * tight.device.memory_bytes for one in found.ranked)
    assert best.cfg not in [one.cfg for one in found.ranked]
    with pytest.raises(InputError, match="no plan fits 8 devices on 2 nodes"):
        found_for(cfg, cluster(memory=1000), *free)


@pytest.mark.exhaustive
def test_a_twentieth_of_memory_is_left_to_the_runtime(found, monkeypatch):
    best = found.ranked[0]
    # Nothing is free: the only plan was traced already.
    traced = {best.cfg: best.traced}
    monkeypatch.setattr("moejax.plan.search.search.trace_config", lambda cfg, *_, **__: traced[cfg])
    fits, too_large = (cluster(memory=int(best.peak.bytes / share)) for share in (0.94, 0.97))
    assert [one.cfg for one in found_for(best.cfg, fits).ranked] == [best.cfg]
    with pytest.raises(InputError, match="no plan fits 8 devices on 2 nodes"):
        found_for(best.cfg, too_large)


@pytest.mark.exhaustive
def test_a_model_that_fits_only_where_all_is_sharded_is_planned(monkeypatch):
    """Estimates that find room everywhere, and replicas fastest, show two meshes that are alike."""
    memory = ("train.micro_batches", "model.remat")
    cfg = model(expert_hidden=2048)
    sharded = change(cfg, {"mesh.replica": 1, "mesh.fsdp": 8})
    smallest = found_for(sharded, cluster(), *memory).ranked[0]
    monkeypatch.setattr(Estimate, "bytes", lambda estimate: 0.0)
    monkeypatch.setattr(Estimate, "seconds", lambda estimate: estimate.cfg.mesh.fsdp)
    tight = cluster(memory=int(1.1 * smallest.peak.bytes))
    found = found_for(cfg, tight, "mesh.replica", "mesh.fsdp", *memory)
    assert found.ranked[0].cfg.mesh.fsdp == 8


def test_meshes_are_tried_in_the_order_of_what_they_cost_when_they_fit():
    """One that is fast until it is made lighter comes after one that need not be."""
    cfg, there = model(expert_hidden=2048), cluster(memory=20_000_000)
    how = dataclasses.replace(limits_of(cfg, there), pinned=frozenset())
    meshes = [Estimate(mesh, there) for mesh in space.meshes(cfg, how)]
    searching = _Search(cfg, there, how, read_expert_load("balanced", 8), Budget(1000, 1e6), print)
    tried = [Estimate(mesh, there) for mesh in searching._promising(meshes)]
    assert any(one.cfg.train.micro_batches > 1 or one.cfg.model.remat != "none" for one in tried)
    assert [one.seconds() for one in tried] == sorted(one.seconds() for one in tried)
    assert all(one.bytes() <= 1.3 * searching.fitting.memory_budget for one in tried)


def test_no_mesh_is_said_in_one_line():
    cfg = change(model(), {"train.batch_sequences": 3})
    topology = cluster(inside=5, nodes=1)
    with pytest.raises(InputError, match="No mesh obeys all rules"):
        found_for(cfg, topology, *space.MESH)


@pytest.mark.parametrize(
    ("experts", "near", "far"), [(8, 8, 8), (16, 8, 16), (12, 4, 4), (64, 8, 16), (3, 1, 1)]
)
def test_rules_of_thumb_are_the_meshes_that_people_take(experts, near, far):
    """On two nodes of eight, as many expert ranks as divide both; no rule stands twice."""
    shapes = {"mlp_hidden": 384, "vocab_size": 264}
    cfg = small_config(moe={"num_experts": experts}, model=shapes, train={"batch_sequences": 16})
    cfg = change(cfg, {"route": "two_level", "compression.preset": "strong", "mesh.fsdp": 4})
    found = space.rules(cfg, Limits(16, 2, "cpu"))
    axes = ("mesh.replica", "mesh.fsdp", "mesh.expert", "mesh.tensor", "mesh.stage")
    meshes = {name: tuple(get_value(one, axis) for axis in axes) for name, one in found.items()}
    heads = cfg.model.num_heads
    wanted = {
        "FSDP": (1, 16, 1, 1, 1),
        "HSDP": (2, 8, 1, 1, 1),
        "EP+FSDP": (1, 16 // near, near, 1, 1),
        "EP+DP": (16 // near, 1, near, 1, 1),
        "EP": (16 // far, 1, far, 1, 1),
        "TP+FSDP": (1, 16 // heads, 1, heads, 1),
    }
    if experts == 3:  # one expert rank: full sharding, and copies under one name
        del wanted["EP+FSDP"], wanted["EP"]
    if near == far:
        wanted.pop("EP", None)
    assert meshes == wanted
    assert {(one.route, one.compression.preset) for one in found.values()} == {("split", "none")}


@pytest.mark.exhaustive
def test_rules_are_priced_beside_the_plans_whatever_is_pinned(found):
    assert list(found.rules) == sorted(found.rules, key=lambda n: found.rules[n].seconds)
    spread = found.rules["EP"]
    assert (spread.cfg.mesh.expert, spread.cfg.route) == (8, "split")
    # Its tokens cross the slow network and those of the best plan do not, which is worth most.
    best = found.ranked[0]
    crossing = [one.main.totals.bytes_sent["network", "dispatch"] for one in (spread, best)]
    assert crossing[0] > crossing[1] == 0
    assert best.seconds < 0.95 * spread.seconds
    # fsdp is pinned to 1 here, so plans with it are compared and not chosen.
    assert found.rules["FSDP"].cfg.mesh.fsdp == 8
    assert all(one.cfg.mesh.fsdp == 1 for one in found.ranked)


@pytest.mark.slow
def test_skew_costs_what_a_plan_exchanges():
    dropless, routings = model(capacity_factor=None), ("balanced", "zipf:1.5")
    seconds = []
    for sizes in ((1, 1, 1, 8, 1), (1, 8, 1, 1, 1)):
        cfg = change(dropless, dict(zip(space.MESH, sizes, strict=True)))
        step = trace_config(space.resolve(cfg, limits_of(cfg, cluster())), "cpu")
        seconds.append([price(step, cluster(), read_expert_load(r, 8)).seconds for r in routings])
    assert seconds[0][1] > seconds[0][0]
    # Where every device has all experts, nothing is exchanged and nothing waits.
    assert seconds[1][1] == seconds[1][0]


@pytest.mark.slow
def test_terms_add_up_and_explain_the_difference(found):
    for one in found.ranked:
        assert sum(terms(one).values()) == pytest.approx(one.seconds)
    best, other = found.ranked[0], found.ranked[-1]
    rows = why(best, other, max_terms=100)
    assert sum(b - a for _, a, b in rows) == pytest.approx(other.seconds - best.seconds)


@pytest.mark.slow
def test_a_plan_file_makes_the_same_config(found, tmp_path):
    save_plan(plan_from(found, cluster(), "balanced"), tmp_path / "plan.json")
    plan, best = load_plan(tmp_path / "plan.json"), found.ranked[0]
    applied = resolve_mesh(plan.apply(model()), 8, "cpu")
    for name in plan.settings:
        assert get_value(applied, name) == get_value(best.cfg, name)
    assert plan.predicted["seconds"] == best.seconds


@pytest.mark.parametrize(
    ("mode", "changes", "planned"),
    [
        ("default", {}, True),
        ("default", {"mesh.expert": 2}, False),
        ("auto", {"mesh.expert": 2}, True),
        ("hand", {}, False),
    ],
)
def test_who_chooses(mode, changes, planned):
    cfg = change(Config(), changes | {"plan.mode": mode})
    assert is_planned(cfg) == planned


def test_every_traced_plan_that_does_not_fit_is_counted(monkeypatch):
    """A default that no lighter form saved was marked in the table, and counted nowhere."""
    cfg, topology = model(), cluster()
    module = sys.modules[_Search.__module__]
    large = SimpleNamespace(peak=SimpleNamespace(bytes=2 * topology.device.memory_bytes))
    monkeypatch.setattr(module, "trace_config", lambda *_, **__: None)
    monkeypatch.setattr(module, "price", lambda *_: large)
    how = read_expert_load("balanced", cfg.moe.num_experts)
    one = _Search(cfg, topology, limits_of(cfg, topology), how, Budget(9, 9.0), lambda _: None)
    one._price(cfg)
    assert one.too_large == 1


@pytest.mark.parametrize("peaks", [[], [2**40]])
def test_a_search_without_a_plan_names_what_is_pinned(peaks):
    bound = Limits(8, 1, "cpu", pinned=frozenset({"mesh.expert", "mesh.fsdp", "model.remat"}))
    text = why_none(model(), bound, peaks, 1.0)
    assert "8 devices on 1 node." in text
    assert "or leave mesh.expert, mesh.fsdp, model.remat to the planner" in text
    assert ("needs 1024.0 GiB of a device; " in text) == bool(peaks)
    assert "to the planner" not in why_none(model(), Limits(8, 1, "cpu"), peaks, 1.0)


def test_a_search_that_ran_out_of_traces_says_how_many_and_what_to_raise():
    bound, one = Limits(8, 1, "cpu"), [2**40, 2**41]
    assert "--traces" not in why_none(model(), bound, one, 1.0, meshes=90)
    text = why_none(model(), bound, one, 1.0, meshes=90, traces=2)
    assert "The smallest of 2 traced plans, of 90 meshes, needs 1024.0 GiB" in text
    assert text.endswith("or look at more plans: --traces 4.")
    assert "--traces" not in why_none(model(), bound, one, 1.0, meshes=2, traces=2)


@pytest.mark.slow
def test_a_search_that_finds_nothing_says_that_its_traces_were_few(monkeypatch):
    """Four plans of ten meshes were traced, and the user was told to buy more devices."""
    axes = {"mesh.replica", "mesh.fsdp", "mesh.expert"}
    monkeypatch.setattr(fitting, "MEMORY_SHARE", 1e-9)
    how = Limits(8, 2, "cpu", pinned=frozenset(CHOSEN) - axes)
    load = read_expert_load("balanced", 8)
    with pytest.raises(InputError, match=r"4 traced plans, of 10 meshes, needs .* --traces 4\.$"):
        search(model(), cluster(), how, load, traces=2, seconds=1e6)


@pytest.mark.exhaustive
def test_no_rule_of_thumb_beats_what_was_chosen():
    free = found_for(model(), cluster(), *CHOSEN, traces=2, rules=True)
    assert free.best_rule is not None
    assert free.ranked[0].seconds <= free.rules[free.best_rule].seconds
