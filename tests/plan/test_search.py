"""The search: what it may choose, what it never chooses, and why it says so."""

import dataclasses
import json
from io import StringIO

import pytest
from rich.console import Console

from moejax.checks import resolve_mesh
from moejax.checks.planned import is_planned, pinned
from moejax.config import Config, PlanConfig
from moejax.errors import InputError
from moejax.fields import get_value
from moejax.plan import space
from moejax.plan.command import main
from moejax.plan.explain import print_ranked, print_why, terms, why
from moejax.plan.files import load_plan, plan_from, save_plan
from moejax.plan.routing import read_routing
from moejax.plan.search import price, search
from moejax.plan.sketch import Sketch
from moejax.plan.space import Limits, change
from moejax.plan.topology_file import write_topology
from tests.cases import small_config
from tests.plan.clusters import GIB, cluster


def model(**changes) -> Config:
    shapes = {"vocab_size": 264, "mlp_hidden": 384} | changes.pop("model", {})
    cfg = small_config(model=shapes, train={"batch_sequences": 32}, **changes)
    return dataclasses.replace(cfg, plan=PlanConfig(mode="auto"))


def limits(cfg, topology, **changes):
    device = topology.device
    base = Limits(topology.devices, topology.nodes, device.platform, pinned=pinned(cfg))
    return dataclasses.replace(base, **changes)


def found_for(cfg, topology, seconds=3.0, routing="balanced", **changes):
    how = read_routing(routing, cfg.moe.num_experts)
    return search(cfg, topology, limits(cfg, topology, **changes), how, seconds=seconds)


@pytest.fixture(scope="module")
def found():
    return found_for(model(), cluster(), seconds=10.0)


def test_every_mesh_is_a_mesh():
    cfg, topology = model(), cluster()
    found = list(space.meshes(cfg, limits(cfg, topology)))
    assert len(found) == len(set(found)) > 20
    for one in found:
        sizes = [get_value(one, name) for name in space.MESH]
        assert resolve_mesh(one, 8, "cpu") == one
        assert sizes[0] * sizes[1] * sizes[2] * sizes[3] == 8


def test_what_is_pinned_stays():
    cfg = change(model(), {"mesh.tensor": 2, "mesh.activations": "replicated"})
    topology = cluster()
    for one in space.meshes(cfg, limits(cfg, topology)):
        assert (one.mesh.tensor, one.mesh.activations) == (2, "replicated")
    assert pinned(cfg) == {"mesh.tensor", "mesh.activations"}


def test_exchanges_obey_the_rules_of_routes():
    cfg, topology = model(), cluster()
    one = next(m for m in space.meshes(cfg, limits(cfg, topology)) if m.mesh.expert == 8)
    names = {other.route for other in space.exchanges(one, limits(cfg, topology))}
    assert {"merge", "two_level", "two_level_merge"} <= names
    assert "duplicate" not in names  # there is no tensor axis


def test_codecs_are_taken_only_where_they_are_allowed():
    cfg, topology = model(), cluster(slow=1e6)
    plain = found_for(cfg, topology)
    coded = found_for(cfg, topology, codecs="hybrid")
    assert all(one.cfg.compression == plain.ranked[0].cfg.compression for one in plain.ranked)
    assert coded.ranked[0].seconds < plain.ranked[0].seconds
    assert coded.ranked[0].cfg.compression != plain.ranked[0].cfg.compression


def test_a_slow_network_is_avoided_and_a_fast_one_used():
    """Experts' weights are large and tokens few, or the other way round: the mesh follows."""
    heavy = model(moe={"expert_hidden": 512})
    slow, fast = cluster(slow=2e5, startup=1e-6), cluster(slow=1e12, fast=1e12, startup=1e-9)
    by_link = [found_for(heavy, topology).ranked[0] for topology in (slow, fast)]
    assert by_link[0].main.tally.bytes_sent != by_link[1].main.tally.bytes_sent
    crossing = [
        sum(size for (link, _), size in one.main.tally.bytes_sent.items() if link == "network")
        for one in by_link
    ]
    assert crossing[0] <= crossing[1]


def test_a_plan_that_does_not_fit_is_made_lighter_or_refused():
    cfg, roomy = model(model={"num_layers": 4}), cluster()
    best = found_for(cfg, roomy).ranked[0]
    tight = cluster(memory=int(best.peak.bytes * 0.8))
    found = found_for(cfg, tight)
    assert all(one.peak.bytes <= 0.95 * tight.device.memory_bytes for one in found.ranked)
    assert best.cfg not in [one.cfg for one in found.ranked]
    with pytest.raises(InputError, match="no plan fits 8 devices on 2 nodes"):
        found_for(cfg, cluster(memory=1000))


def test_no_mesh_is_said_in_one_line():
    cfg = change(model(), {"train.batch_sequences": 3})
    topology = cluster(inside=5, nodes=1)
    with pytest.raises(InputError, match="No mesh obeys all rules"):
        found_for(cfg, topology)


def test_the_baseline_spreads_experts_over_all_devices(found):
    assert found.baseline is not None
    assert found.baseline.cfg.mesh.expert == 8
    assert found.baseline.cfg.route == "split"
    assert found.ranked[0].seconds <= found.baseline.seconds


def test_skew_costs_what_a_plan_exchanges(found):
    crossing = found.baseline
    skewed = price(crossing.read, cluster(), read_routing("zipf:1.5", 8))
    assert skewed.seconds > crossing.seconds
    # Where every device has all experts, nothing is exchanged and nothing waits.
    alone = next(one for one in found.ranked if one.cfg.mesh.expert == 1)
    assert price(alone.read, cluster(), read_routing("zipf:1.5", 8)).seconds == alone.seconds


def test_terms_add_up_and_explain_the_difference(found):
    for one in found.ranked:
        assert sum(terms(one).values()) == pytest.approx(one.seconds)
    best, other = found.ranked[0], found.ranked[-1]
    rows = why(best, other, most=100)
    assert sum(b - a for _, a, b in rows) == pytest.approx(other.seconds - best.seconds)


def test_sketches_rank_as_prices_do_roughly(found):
    """A sketch chooses what is traced: the best plan must not be among its worst."""
    seen = sorted(found.ranked, key=lambda one: Sketch(one.cfg, cluster()).seconds())
    assert seen.index(found.ranked[0]) < max(3, len(seen) // 2)


def test_late_searches_still_compare_two():
    found = found_for(model(), cluster(), seconds=1e-9)
    assert len(found.ranked) >= 2


def test_a_plan_file_makes_the_same_config(found, tmp_path):
    save_plan(plan_from(found, cluster(), "balanced"), tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    applied = resolve_mesh(plan.apply(model()), 8, "cpu")
    best = found.ranked[0].cfg
    assert [get_value(applied, name) for name in plan.settings] == [
        get_value(best, name) for name in plan.settings
    ]
    assert plan.predicted["seconds"] == found.ranked[0].seconds


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "is not one"),
        ('{"version": 99}', "version is 99"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, content, said):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(InputError, match=said):
        load_plan(tmp_path / "plan.json")


def test_a_plan_with_unknown_or_wrong_settings_is_refused(found, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(plan_from(found, cluster(), "balanced"), path)
    written = json.loads(path.read_text())
    for settings, said in (({"mesh.breadth": 2}, "no setting"), ({"mesh.expert": -1}, "at least")):
        path.write_text(json.dumps(written | {"settings": settings}))
        with pytest.raises(InputError, match=said):
            load_plan(path)


def test_what_is_shown_names_the_winner_and_the_default(found):
    shown = StringIO()
    console = Console(file=shown, width=100)
    print_ranked(found, cluster(), console)
    print_why(found, console)
    text = shown.getvalue()
    assert "default" in text
    assert "meshes sketched" in text
    assert "x as fast as" in text


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


COMMON = ["--config", "configs/tiny.py", "--seconds", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology", "h200"], "no config"),
        (["--config", "configs/tiny.py"], "no topology"),
        ([*COMMON, "--topology", "nowhere"], "nowhere"),
        ([*COMMON, "--topology", "h200", "--free", "model.width"], "which no plan chooses"),
        ([*COMMON, "--topology", "h200", "--out", "plan.txt"], r"ends in \.json"),
        ([*COMMON, "--topology", "h200", "--routing", "uneven"], "cannot be read"),
    ],
)
def test_the_command_refuses_in_one_line(words, said, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(err)


def test_the_command_plans_for_a_file(tmp_path, capsys):
    write_topology(cluster(memory=GIB), tmp_path / "topology.json")
    words = [*COMMON, "--topology", str(tmp_path / "topology.json")]
    assert main([*words, "--out", str(tmp_path / "plan.json"), "--fewer"]) == 0
    assert "x as fast as" in capsys.readouterr().out
    assert load_plan(tmp_path / "plan.json").devices == 8
