"""Plans that keep arrays in the host's memory: chosen where they must or pay, else not."""

from dataclasses import replace
from pathlib import Path

import pytest

from moejax.config.checks.planned import CHOSEN
from moejax.config.checks.size import parameters_of
from moejax.config.fields import change
from moejax.config.load import load_config
from moejax.errors import InputError
from moejax.plan.cluster.file import load_topology
from moejax.plan.cluster.topology import Host
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.cost import HOST_MEMORY
from moejax.plan.price.routing import read_expert_load
from moejax.plan.report.tables import host_seconds
from moejax.plan.search import space
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.fitting import Fitting
from moejax.plan.search.search import search
from moejax.plan.search.space import Limits
from tests.plan.clusters import GIB, cluster, to_plan
from tests.plan.search.test_search import found_for

ROOT = Path(__file__).parents[3]
HOST = Host(1e7, 1e7, 100 * GIB)
OPTIMIZER = "memory.optimizer"


def small(**values):
    """A model whose moments are more than its activations."""
    cfg = to_plan(8, model={"vocab_size": 4096}, moe={"capacity_factor": 1.25})
    mesh = {"mesh.replica": 1, "mesh.fsdp": 8, "mesh.expert": 1}
    return change(cfg, mesh | values)


def there(memory=8 * GIB, host=HOST, **rates):
    return replace(cluster(inside=8, nodes=1, memory=memory, platform="gpu", **rates), host=host)


def priced(cfg, topology, **values):
    one = space.resolve(change(cfg, values), Limits(topology.devices, topology.nodes, "gpu"))
    assert one is not None
    load = read_expert_load("balanced", cfg.moe.num_experts)
    return price(trace_config(one, "gpu", load), topology, load)


@pytest.fixture(scope="module")
def sizes():
    """Plans with moments on the device and on the host."""
    return [priced(small(), there(), **{OPTIMIZER: kind}) for kind in ("device", "host")]


@pytest.mark.slow
def test_moments_move_from_one_memory_to_the_other(sizes):
    device, host = sizes
    assert (device.host_bytes, device.node_bytes) == (0, 0)
    assert host.node_bytes == 8 * host.host_bytes > 0
    assert device.peak.bytes - host.peak.bytes == pytest.approx(host.host_bytes, rel=0.01)
    assert host_seconds(device) == (0, 0)
    # There and back at 10 MB/s; the start of each copy takes 10 us.
    sent, waited = host_seconds(host)
    assert sent == pytest.approx(2 * host.host_bytes / 1e7, rel=0.02)
    assert waited == pytest.approx(sent, rel=0.05)  # the update hides a little
    assert host.seconds - device.seconds == pytest.approx(waited, rel=0.02)


def between(sizes):
    """Bytes of a device, of which what may be used lies between what the two plans need."""
    return int(sum(plan.peak.bytes for plan in sizes) / 2 / 0.95)


@pytest.mark.slow
def test_moments_go_to_the_host_only_where_nothing_else_fits(sizes):
    assert [p.cfg.memory.optimizer for p in found_for(small(), there(), OPTIMIZER).ranked] == [
        "device"
    ]
    tight = there(between(sizes))
    assert [p.cfg.memory.optimizer for p in found_for(small(), tight, OPTIMIZER).ranked] == ["host"]


@pytest.mark.slow
def test_where_hosts_are_not_known_nothing_goes_there(sizes):
    with pytest.raises(InputError, match="no plan fits 8 devices"):
        found_for(small(), there(between(sizes), host=None), OPTIMIZER)
    with pytest.raises(InputError, match=r"no `host`.*plan probe again"):
        found_for(small(**{OPTIMIZER: "host"}), there(host=None))


def test_what_devices_of_a_node_keep_must_fit_its_host(sizes):
    node = sizes[1].node_bytes
    for share, fits in ((0.91, True), (0.89, False)):  # of which 0.9 may be used
        held = replace(HOST, memory_bytes=int(node / 0.9 * share / 0.9))
        assert Fitting(small(), there(host=held), limits()).fits(sizes[1]) == fits
    with pytest.raises(InputError, match=r"fits the memory of hosts.*GiB of a node's"):
        found_for(small(**{OPTIMIZER: "host"}), there(host=replace(HOST, memory_bytes=node)))


def limits():
    return Limits(8, 1, "gpu")


def test_experts_and_residuals_go_where_a_step_has_them():
    plain = small(**{"model.remat": "none"})
    named = change(plain, {"model.remat": "attention"})
    assert kinds(plain) == [{"optimizer"}, {"experts"}, {"optimizer", "experts"}]
    assert {"residuals"} in kinds(named)
    assert len(kinds(named)) == 7
    staged = change(plain, {"mesh.stage": 2})
    assert kinds(staged) == [{"optimizer"}, {"residuals"}, {"optimizer", "residuals"}]
    assert kinds(change(staged, {"mesh.stage_keeps": "input"})) == [{"optimizer"}]
    fixed = Limits(8, 1, "gpu", pinned=frozenset({OPTIMIZER}))
    assert kinds(plain, fixed) == [{"experts"}]


def kinds(cfg, bound=None):
    found = space.hosted(cfg, bound or limits())
    return [{name for name, kind in vars(one.memory).items() if kind == "host"} for one in found]


def test_plans_that_compute_less_again_are_tried_where_a_link_is_fast_enough():
    """The config's own plan has no recomputation; this one has, and its moments could make room."""
    first = small(**{"train.batch_sequences": 64, "data.sequence_length": 256})
    now = space.resolve(change(first, {"model.remat": "full"}), limits())
    assert now is not None
    for rate, tried in ((1e13, True), (1e3, False)):
        fast = there(host=Host(rate, rate, 100 * GIB))
        found = list(Fitting(first, fast, limits()).offloaded(now, None))
        assert bool(found) == tried
        for one in found:
            assert "host" in vars(one.memory).values()
            assert one.model.remat != "full"
            assert Estimate(one, fast).seconds() < Estimate(now, fast).seconds()


def h200(nodes):
    return load_topology(f"h200:{nodes}")


@pytest.mark.slow
def test_a_small_step_of_a_model_that_fits_keeps_its_moments():
    """Qwen3-30B-A3B on eight H200s, 131,072 tokens: 16 bytes a parameter at 50 GB/s are 1.2 s."""
    batch = {"train.batch_sequences": 32, "train.micro_batches": 1}
    mesh = {"mesh.nodes": None, "mesh.replica": 1, "mesh.fsdp": 1, "mesh.expert": 8}
    cfg, node = change(load_config(ROOT / "configs/qwen3_30b_a3b.py"), batch | mesh), h200(1)
    device, host = (priced(cfg, node, **{OPTIMIZER: kind}) for kind in ("device", "host"))
    formula = 16 * parameters_of(cfg) / 8 / 50e9
    assert formula == pytest.approx(1.22, abs=0.01)
    assert host.seconds - device.seconds == pytest.approx(formula, rel=0.03)
    assert host.seconds > 1.5 * device.seconds
    assert host.main.totals.exposed[HOST_MEMORY] > 0.98 * host_seconds(host)[0]
    fitting = Fitting(change(cfg, {"model.remat": "none"}), node, limits())
    assert fitting.fits(device)
    offered = fitting.offloaded(device.cfg, device)
    assert all(one.memory.optimizer == "device" for one in offered)


@pytest.mark.slow
def test_a_large_model_goes_where_it_fits_no_other_way():
    """Mixtral 8x22B, 141 B parameters, on three nodes of eight H200s, 1.08 M tokens a step.

    Masters, gradients, their copy, their sum and moments are 24 bytes a parameter: 131 GiB of each
    of 24 devices that let a plan have 123. Moments are 44, and cost 1.9 of 49 s.
    """
    shapes = {
        "model.width": 6144,
        "model.num_layers": 56,
        "model.num_heads": 48,
        "model.vocab_size": 32768,
        "moe.expert_hidden": 16384,
        "model.remat": "full",
    }
    batch = {"train.batch_sequences": 264, "train.micro_batches": 11, "data.sequence_length": 4096}
    mesh = {"mesh.nodes": None, "mesh.replica": 1, "mesh.fsdp": 3, "mesh.expert": 8}
    cfg = change(load_config(ROOT / "configs/mixtral_8x7b.py"), shapes | batch | mesh)
    assert parameters_of(cfg) == pytest.approx(140.6e9, rel=0.01)
    bound = Limits(24, 3, "gpu", pinned=frozenset(CHOSEN) - {OPTIMIZER})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "rules", lambda *_: {})
        found = search(cfg, h200(3), bound, read_expert_load("balanced", 8), seconds=1e6)
    (plan,) = found.ranked
    assert (plan.cfg.memory.optimizer, found.traced) == ("host", 2)
    assert plan.host_bytes == pytest.approx(8 * 140.6e9 / 24, rel=0.01)
    sent, waited = host_seconds(plan)
    assert sent == pytest.approx(16 * 140.6e9 / 24 / 50e9, rel=0.02)
    assert waited / plan.seconds == pytest.approx(0.04, abs=0.005)
