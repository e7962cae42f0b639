"""A run that plans for itself: what it chooses from, keeps, refuses and says."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from rich.console import Console

from moejax.checkpoint.compatible import check_resumable
from moejax.config.checks import check
from moejax.config.fields import change
from moejax.config.load import to_dict
from moejax.config.schema import PlanConfig
from moejax.errors import InputError
from moejax.plan.cluster.file import write_topology
from moejax.plan.search.file import Plan, save_plan
from moejax.runtime.processes import ALONE
from moejax.train import planning
from moejax.train.plan_monitor import WINDOW, PlanMonitor, compare
from moejax.train.planning import PLAN, kept_plan, plan_dry, plan_run, save_expert_load
from tests.cases import small_config
from tests.plan.clusters import cluster

QUIET = Console(quiet=True)


@pytest.fixture
def cfg(tmp_path):
    write_topology(cluster(), tmp_path / "topology.json")
    plan = PlanConfig(mode="auto", topology=str(tmp_path / "topology.json"), traces=2)
    # With a capacity a step has one branch, and is traced in half the time.
    shapes = {"vocab_size": 264, "mlp_hidden": 384}
    cfg = small_config(model=shapes, moe={"capacity_factor": 1.25})
    return dataclasses.replace(cfg, plan=plan, run_dir=str(tmp_path / "run"))


def planned(cfg, **options):
    return plan_run(cfg, jax.devices()[:8], ALONE, QUIET, **({"resuming": False} | options))


@pytest.mark.slow
def test_a_run_plans_and_writes_down_what_it_chose(cfg):
    found = planned(cfg)
    mesh = found.cfg.mesh
    assert mesh.replica * mesh.fsdp * mesh.expert * mesh.tensor == 8
    assert json.loads((Path(cfg.run_dir) / PLAN).read_text())["devices"] == 8
    rows = dict(found.rows())
    assert "ms a step predicted" in rows["plan"]
    assert "ms" in rows["runner-up"]
    check(found.cfg)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_resumed_run_keeps_its_plan(cfg):
    first = planned(cfg)
    path = Path(cfg.run_dir) / PLAN
    plan = json.loads(path.read_text())
    other = plan["settings"] | dict(
        zip(("mesh.replica", "mesh.fsdp", "mesh.expert"), (1, 1, 8), strict=True)
    )
    other |= {"mesh.tensor": 1, "route": "split"}
    path.write_text(json.dumps(plan | {"settings": other}))
    assert planned(cfg, resuming=True).cfg.mesh.expert == 8
    assert kept_plan(cfg).mesh.expert == 8
    assert planned(cfg, resuming=False).cfg.mesh == first.cfg.mesh


@pytest.mark.exhaustive
def test_a_plan_of_other_devices_is_made_again(cfg):
    planned(cfg)
    write_topology(cluster(nodes=1), Path(cfg.plan.topology))
    found = plan_run(cfg, jax.devices()[:4], ALONE, QUIET, resuming=True)
    assert found.plan is not None
    assert found.plan.devices == 4


def test_one_device_has_nothing_to_choose(cfg):
    found = plan_run(cfg, jax.devices()[:1], ALONE, QUIET, resuming=False)
    assert (found.plan, found.cfg.mesh.replica) == (None, 1)


def test_on_one_device_what_needs_others_is_refused(cfg):
    mine = change(cfg, {"route_chunks": 2})
    for plan in (
        lambda: plan_run(mine, jax.devices()[:1], ALONE, QUIET, resuming=False),
        lambda: plan_dry(mine, 1),
    ):
        with pytest.raises(InputError, match="`route_chunks` = 2 has no effect"):
            plan()


def test_a_hand_made_mesh_is_left_alone(cfg):
    mine = change(cfg, {"plan.mode": "default", "plan.topology": None, "mesh.expert": 8})
    assert planned(mine).cfg is mine


@pytest.mark.exhaustive
def test_a_plan_file_is_taken_whole(cfg, tmp_path):
    plan = planned(cfg).plan
    save_plan(plan, tmp_path / "mine.json")
    mine = change(cfg, {"plan.mode": str(tmp_path / "mine.json"), "plan.topology": None})
    assert planned(mine).cfg.mesh == planned(cfg).cfg.mesh
    with pytest.raises(InputError, match="for 8 devices, this program has 4"):
        plan_run(mine, jax.devices()[:4], ALONE, QUIET, resuming=False)
    replaced = planned(change(mine, {"mesh.expert": 128}))
    assert replaced.cfg.mesh == planned(mine).cfg.mesh
    assert any("replaces mesh.expert = 128" in note for note in replaced.notes)


def test_a_restart_with_a_plan_file_tells_of_no_setting_that_changed(cfg, tmp_path):
    chosen = {"mesh.tensor": 2, "mesh.expert": 4, "compression.dispatch": "int8"}
    save_plan(dataclasses.replace(plan_of(1.0), settings=chosen), tmp_path / "mine.json")
    mine = change(cfg, {"plan.mode": str(tmp_path / "mine.json"), "plan.topology": None})
    at_save = planned(mine).cfg
    assert (at_save.mesh.tensor, at_save.compression.dispatch) == (2, "int8")
    assert check_resumable(to_dict(at_save), kept_plan(mine), step=1) == []
    other = change(mine, {"train.log_every": 7})
    told = check_resumable(to_dict(at_save), kept_plan(other), step=1)
    assert told == ["train.log_every: 10 -> 7"]


def test_a_topology_of_another_size_is_refused(cfg):
    with pytest.raises(InputError, match="has 8 devices, this program has 4"):
        plan_run(cfg, jax.devices()[:4], ALONE, QUIET, resuming=False)


def test_nodes_set_by_hand_must_be_the_clusters(cfg, tmp_path):
    """A search for four nodes would end in a run on the cluster's two."""
    mine = change(cfg, {"mesh.nodes": 4})
    for ask in (planned, lambda mine: plan_dry(mine, 8)):
        with pytest.raises(InputError, match=r"`mesh.nodes` = 4, but .*topology.json has 2"):
            ask(mine)
    save_plan(plan_of(1.0), tmp_path / "mine.json")
    of_file = change(mine, {"plan.mode": str(tmp_path / "mine.json"), "plan.topology": None})
    with pytest.raises(InputError, match=r"`mesh.nodes` = 4, but plan .*mine.json has 2"):
        planned(of_file)
    assert planned(change(of_file, {"mesh.nodes": 2})).cfg.mesh.nodes == 2


@pytest.mark.exhaustive
def test_a_resumed_run_with_other_nodes_does_not_keep_its_plan(cfg):
    save_plan(plan_of(1.0), Path(cfg.run_dir) / PLAN)
    assert planned(change(cfg, {"mesh.nodes": 2}), resuming=True).plan == plan_of(1.0)
    write_topology(cluster(inside=2, nodes=4), Path(cfg.plan.topology))
    found = planned(change(cfg, {"mesh.nodes": 4}), resuming=True)
    assert (found.plan.nodes, found.cfg.mesh.nodes) == (4, 4)


@pytest.mark.slow
def test_a_dry_run_needs_known_links(cfg):
    assert plan_dry(cfg, 8).plan is not None
    with pytest.raises(InputError, match="links are not known"):
        plan_dry(change(cfg, {"plan.topology": None}), 8)


@pytest.mark.slow
def test_links_that_an_earlier_start_measured_are_not_measured_again(cfg, monkeypatch):
    cfg = change(cfg, {"plan.topology": None})
    fits = dataclasses.replace(cluster(), device=dataclasses.replace(cluster().device, name="cpu"))
    measured = []

    def measure(*_):
        measured.append(fits)
        return fits, ()

    monkeypatch.setattr(planning, "measure", measure)
    first = planned(cfg)
    assert len(measured) == 1
    monkeypatch.setattr(planning, "_search", lambda *_: first.plan)
    again = planned(cfg)
    assert len(measured) == 1
    assert again.cfg == first.cfg
    assert f"{Path(cfg.run_dir) / 'topology.json'}" in again.notes[0]
    path = Path(cfg.run_dir) / "topology.json"
    elsewhere = dataclasses.replace(cluster().device, name="another device")
    write_topology(dataclasses.replace(cluster(), device=elsewhere), path)
    planned(cfg)
    assert len(measured) == 2


def test_what_is_no_mode_is_refused(cfg):
    with pytest.raises(InputError, match="is not a planning mode"):
        check(change(cfg, {"plan.mode": "magic"}))
    with pytest.raises(InputError, match="has no effect: the planner is off"):
        check(change(cfg, {"plan.mode": "hand"}))


def test_routing_is_recorded_for_the_next_plan(tmp_path):
    save_expert_load([[3, 1], [2, 2]], tmp_path / "routing.json")
    assert json.loads((tmp_path / "routing.json").read_text()) == {"load": [[3, 1], [2, 2]]}


def plan_of(seconds):
    predicted = {"seconds": seconds, "terms": {"experts": seconds}}
    return Plan("test", 8, 2, "balanced", {}, predicted)


def test_a_run_that_plans_anew_keeps_its_chunks_of_layers(cfg, monkeypatch):
    """Its checkpoints have a layer group for each."""
    asked = []

    def search(cfg, topology, limits, *_):
        asked.append((cfg.model.stage_chunks, limits.free("model.stage_chunks")))
        raise InputError("enough")

    monkeypatch.setattr(planning, "_search", search)
    old = dataclasses.replace(plan_of(1.0), devices=16, settings={"model.stage_chunks": 2})
    Path(cfg.run_dir).mkdir()
    save_plan(old, Path(cfg.run_dir) / PLAN)
    for resuming in (True, False):
        with pytest.raises(InputError, match="enough"):
            planned(cfg, resuming=resuming)
    assert asked == [(2, False), (1, True)]
    one = plan_run(cfg, jax.devices()[:1], ALONE, QUIET, resuming=True).cfg
    assert one.model.stage_chunks == 2


def test_a_run_that_plans_anew_keeps_its_outer_loop_or_has_none(cfg, monkeypatch):
    asked = []

    def search(cfg, *_):
        asked.append((cfg.outer.every, cfg.outer.codec, cfg.plan.sites))
        raise InputError("enough")

    monkeypatch.setattr(planning, "_search", search)
    mine = change(cfg, {"plan.sites": True})
    Path(cfg.run_dir).mkdir()
    for every in (16, None):
        chosen = {"outer.every": every, "outer.codec": "int8", "outer.order": "layers"}
        old = dataclasses.replace(plan_of(1.0), devices=16, settings=chosen)
        save_plan(old, Path(cfg.run_dir) / PLAN)
        with pytest.raises(InputError, match="enough"):
            planned(mine, resuming=True)
    assert asked == [(16, "int8", True), (None, "int4+feedback", False)]


def test_one_slow_report_is_not_enough_and_the_changed_link_is_named():
    slower = cluster(slow=2.5e6)
    monitor = PlanMonitor(plan_of(1.0), cluster())
    assert not any(monitor.off(seconds) for seconds in (0.81, 1.24, 1.0) * WINDOW)
    said = [monitor.off(seconds) for seconds in (2.0, 1.0, *(2.0,) * WINDOW)]
    assert said == [False] * (WINDOW + 1) + [True]
    text = monitor.mismatch(2.0, slower)
    assert "2.00 x what was predicted" in text
    assert "over network" in text
    assert not any(monitor.off(2.0) for _ in range(2 * WINDOW))  # it speaks once


def test_without_new_links_the_largest_term_and_a_way_to_measure_are_named():
    monitor = PlanMonitor(plan_of(1.0), cluster())
    assert [monitor.off(2.0) for _ in range(WINDOW)][-1]
    text = monitor.mismatch(2.0, None)
    assert "largest term is experts" in text
    assert "Another program may have used the machine" in text
    assert "--config.plan.replan=true" in text


@pytest.mark.parametrize(
    ("now", "seconds", "cause"),
    [
        (cluster(), 3.0, "no link or rate explains it"),
        (cluster(slow=1e8), 3.0, "no link or rate explains it"),  # faster links
        (cluster(slow=1e8), 0.3, "over network"),
    ],
)
def test_the_cause_is_a_rate_that_changed_as_the_steps_did(now, seconds, cause):
    monitor = PlanMonitor(plan_of(1.0), cluster())
    assert cause in monitor.mismatch(seconds, now)


def test_rates_are_compared_one_by_one():
    rows = compare(cluster(), cluster(slow=5e6))
    changed = {name for name, before, after in rows if before != after}
    assert changed == {f"{kind} over network, bytes" for kind in cluster().tiers[1].links}


@pytest.mark.slow
def test_a_run_whose_hosts_change_keeps_links_and_plans_for_other_numbers(cfg, monkeypatch):
    monkeypatch.setenv("MOEJAX_ASSIGNMENT", "a file")
    path = Path(cfg.run_dir)
    first = planned(cfg)
    half = plan_run(cfg, jax.devices()[:4], ALONE, QUIET, resuming=True)
    assert half.plan is not None
    assert (half.plan.devices, half.topology.devices, half.topology.nodes) == (4, 4, 1)
    assert sorted(kept.name for kept in (path / "plans").iterdir()) == ["4.json", "8.json"]
    # The links of the cluster that is left lie in the run's directory now.
    monkeypatch.setattr(planning, "_search", lambda *_: pytest.fail("it was planned before"))
    back = planned(cfg, resuming=True)
    assert back.cfg.mesh == first.cfg.mesh
    assert back.topology.devices == 8
    assert json.loads((path / PLAN).read_text())["devices"] == 8


def test_devices_that_fill_no_nodes_have_no_known_links(cfg, monkeypatch):
    monkeypatch.setenv("MOEJAX_ASSIGNMENT", "a file")
    with pytest.raises(InputError, match="has 8 devices, this program has 6"):
        plan_run(cfg, jax.devices()[:6], ALONE, QUIET, resuming=False)
