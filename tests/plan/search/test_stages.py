"""Pipeline stages in the search: where they are chosen, and where they are not."""

import dataclasses

import pytest

from moejax.config.fields import change, get_value
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.price.terms import terms
from moejax.plan.search import space
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.search import search
from tests.plan.clusters import cluster, limits_of, to_plan

LOAD = read_expert_load("balanced", 8)


def model(hidden=32, length=16):
    experts = {"capacity_factor": 1.25, "num_experts": 8, "expert_hidden": hidden}
    cfg = to_plan(64, model={"num_layers": 4}, moe=experts)
    return change(cfg, {"data.sequence_length": length})


def priced(cfg, topology, **values):
    changes = {f"mesh.{name}": value for name, value in values.items()}
    one = space.resolve(change(cfg, changes), limits_of(cfg, topology))
    assert one is not None
    return price(trace_config(one, "cpu"), topology, LOAD)


def test_meshes_with_stages_divide_layers_and_micro_batches():
    cfg, topology = model(), cluster()
    found = [one for one in space.meshes(cfg, limits_of(cfg, topology)) if one.mesh.stage > 1]
    assert {one.mesh.stage for one in found} == {2, 4}
    for one in found:
        assert one.train.micro_batches in (2 * one.mesh.stage, 8 * one.mesh.stage)
    for changes in ({"model.num_layers": 6}, {"train.micro_batches": 2}):
        cfg = change(model(), changes)
        assert {one.mesh.stage for one in space.meshes(cfg, limits_of(cfg, topology))} == {1, 2}


def test_a_search_changes_what_stages_keep_their_order_and_micro_batches():
    cfg, topology = model(), cluster()
    limits = limits_of(cfg, topology)
    values = {"mesh.stage": 2, "mesh.expert": 4, "train.micro_batches": 8}
    # On a GPU exchanges are asynchronous, so that they hide behind another pass.
    gpu = dataclasses.replace(limits, platform="gpu")
    one = space.resolve(change(cfg, values), gpu)
    found = list(space.schedules(one, gpu))
    names = ("mesh.stage_keeps", "mesh.schedule", "train.micro_batches")
    changed = [[n for n in names if get_value(a, n) != get_value(one, n)] for a in found]
    assert [name for (name,) in changed] == [*names, "train.micro_batches"]
    assert space.orders(limits) == ("1f1b",)
    alone = space.resolve(change(cfg, {"mesh.expert": 8}), limits)
    assert list(space.schedules(alone, limits)) == []


def test_a_search_makes_visits_of_a_stage_shorter_and_longer():
    cfg, topology = model(), cluster()
    limits = limits_of(cfg, topology)
    values = {"mesh.stage": 2, "mesh.expert": 4, "train.micro_batches": 8}

    def others(**more):
        one = space.resolve(change(cfg, values | more), limits)
        found = space.shorter_tasks(one, limits)
        return [(other.mesh.stage_slices, other.model.stage_chunks) for other in found]

    assert others() == [(2, 1), (1, 2)]
    assert others(**{"mesh.stage_slices": 4}) == [(8, 1), (2, 1)], "no chunks beside slices"
    assert others(**{"model.stage_chunks": 2}) == [(1, 1)], "four layers, and no slices beside"
    pinned_chunks = dataclasses.replace(limits, pinned=frozenset({"model.stage_chunks"}))
    one = space.resolve(change(cfg, values), limits)
    assert [o.mesh.stage_slices for o in space.shorter_tasks(one, pinned_chunks)] == [2]
    alone = space.resolve(change(cfg, {"mesh.expert": 8}), limits)
    assert list(space.shorter_tasks(alone, limits)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mesh.stage_slices", "model.stage_chunks"])
def test_visits_are_shorter_where_micro_batches_are_few(name):
    """Two of them on two stages leave a stage idle for a third of its ticks."""
    cfg, topology = model(256, 256), cluster(slow=1e9)
    fixed = {"mesh.stage": 2, "mesh.expert": 4, "train.micro_batches": 2}
    cfg = change(cfg, fixed)
    other = {"mesh.stage_slices", "model.stage_chunks"} - {name}
    limits = dataclasses.replace(limits_of(cfg, topology), pinned=frozenset(fixed) | other)
    found = search(cfg, topology, limits, LOAD, traces=8).ranked[0]
    assert get_value(found.cfg, name) > 1
    assert found.seconds < 0.98 * priced(cfg, topology, stage=2, expert=4).seconds


ANY = pytest.mark.exhaustive
SLOW = cluster(slow=1e5, startup=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("hidden", "length", "topology", "stages"),
    [
        # Many weights, few tokens, a slow network: gradients would be most of what crosses it.
        pytest.param(2048, 16, SLOW, True, marks=ANY),
        # Many tokens, few weights.
        pytest.param(8, 256, SLOW, False, marks=ANY),
        # One node.
        (2048, 16, cluster(inside=8, nodes=1), False),
    ],
)
def test_stages_are_chosen_where_gradients_cost_more_than_hidden_states(
    hidden, length, topology, stages
):
    cfg = model(hidden, length)
    limits = limits_of(cfg, topology)
    found = search(cfg, topology, limits, LOAD, traces=4)
    assert (found.ranked[0].cfg.mesh.stage > 1) == stages
    best = {True: float("inf"), False: float("inf")}
    for mesh in ({"stage": 2, "expert": 4}, {"replica": 2, "expert": 4}):
        cfg = change(cfg, {"train.micro_batches": 8 if "stage" in mesh else 1})
        one = priced(cfg, topology, **mesh)
        best["stage" in mesh] = one.seconds
    assert (best[True] < best[False]) == stages


@pytest.mark.exhaustive
def test_estimates_of_stages_are_near_their_prices():
    cfg, topology = model(2048, 64), cluster(slow=1e6, memory=2**40)
    for values in ({"stage": 2, "expert": 4}, {"stage": 4, "fsdp": 2}):
        one = priced(change(cfg, {"train.micro_batches": 8}), topology, **values)
        estimate = Estimate(one.cfg, topology)
        assert 0.4 < estimate.seconds() / one.seconds < 2.5
        assert 0.3 < estimate.bytes() / one.peak.bytes < 3


@pytest.mark.exhaustive
def test_what_stages_add_has_names():
    """A fifth of a step stood under "the rest", where reasons of plans with stages ended."""
    cfg = change(model(hidden=256, length=64), {"train.micro_batches": 8})
    found = terms(priced(cfg, cluster(), stage=2, expert=4))
    assert found["stage_slots"] > 0
    assert found["stage_sums"] > 0
    assert found["the rest"] < 0.1 * sum(found.values())


@pytest.mark.slow
def test_stages_need_as_much_memory_however_many_micro_batches_there_are():
    cfg, topology = model(length=64), cluster()
    peaks = {}
    for parts in (8, 32):
        own = change(cfg, {"train.micro_batches": parts, "train.batch_sequences": parts * 4})
        peaks[parts] = priced(own, topology, stage=2, expert=4).steps.temporary
    assert peaks[32] < 1.05 * peaks[8]


@pytest.mark.slow
def test_a_stage_that_keeps_its_input_alone_needs_less_memory_and_more_time():
    cfg, topology = change(model(length=64), {"train.micro_batches": 8}), cluster()
    kept, less = (
        priced(cfg, topology, stage=2, expert=4, stage_keeps=keeps)
        for keeps in ("residuals", "input")
    )
    assert less.steps.temporary < kept.steps.temporary
    assert less.seconds > 1.1 * kept.seconds
