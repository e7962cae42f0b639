"""Estimates against prices: an estimate chooses what is traced."""

from dataclasses import replace

import pytest

from moejax.config.checks.size import attention_parameters
from moejax.config.fields import change
from moejax.plan.cluster.topology import Host
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.search import space
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.space import Limits
from tests.cases import small_config
from tests.plan.clusters import cluster, to_plan


def costs(hidden, batch, meshes):
    """(priced seconds, estimated seconds, mesh) where the network is slow."""
    # With a capacity a step has one branch, and is traced in half the time.
    experts = {"capacity_factor": 1.25, "expert_hidden": hidden, "num_experts": 16}
    cfg = to_plan(batch, moe=experts)
    there = cluster(slow=1e5, startup=1e-6)
    found = []
    for sizes in meshes:
        mesh = change(cfg, dict(zip(space.MESH, sizes, strict=True)))
        one = space.resolve(mesh, Limits(there.devices, there.nodes, "cpu"))
        assert one is not None
        priced = price(trace_config(one, "cpu"), there, read_expert_load("balanced", 16))
        found.append((priced.seconds, Estimate(one, there).seconds(), sizes))
    return found


@pytest.mark.exhaustive
def test_estimates_tell_apart_what_prices_tell_apart():
    """What is clearly slower must not stand before the faster; the rest may stand in any order.

    Where tokens are many, they should not cross a slow network; where experts are large, their
    weights should not.
    """
    across, inside, nowhere = (1, 1, 1, 8, 1), (1, 2, 1, 4, 1), (1, 8, 1, 1, 1)
    orders = []
    for hidden, batch in ((64, 2048), (2048, 32)):
        found = costs(hidden, batch, (across, inside, nowhere))
        apart = [(a, b) for a in found for b in found if 1.2 * a[0] < b[0]]
        assert len(apart) >= 2
        assert all(a[1] < b[1] for a, b in apart)
        orders.append([mesh for *_, mesh in sorted(found)])
    assert orders[0][-1] == orders[1][0] == across


def test_only_blocks_with_experts_count_as_such():
    """Models with half of their blocks dense were taken for twice their size."""
    cfg = small_config(model={"num_layers": 4, "mlp_hidden": 8, "predict_ahead": 0})
    experts = 3 * cfg.moe.num_experts * cfg.model.width * cfg.moe.expert_hidden
    table = ("experts", "dense", "dense", "dense")
    for changes, share in (
        ({}, 1),
        ({"model.moe_every": 2}, 1 / 2),
        ({"model.first_dense_layers": 1}, 3 / 4),
        ({"model.layer_mlps": table}, 1 / 4),
    ):
        of_block = Estimate(change(cfg, changes), cluster()).weights
        assert of_block[1] == share * experts
        hidden = (1 - share) * 8 * 3 * cfg.model.width
        assert of_block[0] == pytest.approx(hidden + attention_parameters(cfg.model))


def test_moments_on_the_host_are_eight_bytes_a_parameter_and_sixteen_on_the_link():
    there = replace(cluster(platform="gpu"), host=Host(2e7, 1e7, 10**10))
    cfg = change(to_plan(), {"mesh.fsdp": 8, "mesh.replica": 1})
    device, host = (
        Estimate(change(cfg, {"memory.optimizer": kind}), there) for kind in ("device", "host")
    )
    assert host.host_bytes() == 8 * device.own > device.host_bytes() == 0
    assert device.bytes() - host.bytes() == pytest.approx(8 * device.own)
    seconds = 8 * device.own * (1 / 2e7 + 1 / 1e7)
    assert host.seconds() - device.seconds() == pytest.approx(seconds)


def test_residuals_on_the_host_leave_what_passes_between_blocks():
    there = replace(cluster(platform="gpu"), host=Host(1e1, 1e1, 10**10))
    cfg = change(to_plan(), {"mesh.fsdp": 8, "mesh.replica": 1, "model.remat": "attention"})
    device, host = (
        Estimate(change(cfg, {"memory.residuals": kind}), there) for kind in ("device", "host")
    )
    moved = host.host_bytes()
    assert device.bytes() - host.bytes() == pytest.approx(moved)
    # Float32, 32 sequences of 16 positions on eight devices: what passes stays.
    passed = 4 * (32 * 16 / 8) * cfg.model.width * cfg.model.blocks
    assert host._kept() - moved == pytest.approx(passed)
    # So slow a link that compute hides next to nothing of it.
    assert host.seconds() - device.seconds() == pytest.approx(moved / 1e1, rel=0.01)


def test_stages_hold_three_slots_on_the_device_and_all_and_one_more_on_the_host():
    there = replace(cluster(platform="gpu"), host=Host(1e1, 1e1, 10**10))
    values = {"mesh.stage": 4, "mesh.fsdp": 2, "mesh.replica": 1, "train.micro_batches": 8}
    cfg = change(to_plan(model={"num_layers": 4}), values)
    device, host = (
        Estimate(change(cfg, {"memory.residuals": kind}), there) for kind in ("device", "host")
    )
    slots, slot = device.schedule.slots, device._kept()
    assert slots > 3
    assert host.host_bytes() == pytest.approx((slots + 1) * slot)
    assert device.bytes() - host.bytes() == pytest.approx((slots - 3) * slot)
