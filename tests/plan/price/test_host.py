"""Prices of copies between the memories of host and device, against arithmetic by hand."""

import dataclasses

import pytest

from moejax.errors import InputError
from moejax.plan.cluster.topology import Host
from moejax.plan.price.cost import HOST_MEMORY, BucketFill, Costs, simulate_step
from moejax.plan.price.sensitivity import changes
from moejax.plan.trace.schedule import Op, Schedule
from tests.plan.price.test_cost import costs
from tests.plan.trace.test_host import LAYER, traced, update

HOST = Host(to_device=1e8, from_device=2e8, memory_bytes=10**10)
START = 1e-5  # of an operation, of the test's cluster


def with_host(platform="gpu"):
    one = costs(nodes=1, platform=platform)
    return Costs(dataclasses.replace(one.topology, host=HOST), one.layout, BucketFill())


def work(seconds, *after):
    return Op("product", "work", after=after, flops=seconds * 1e10 - 1e5, dtype="float32")


def copy(kind, size, *after):
    return Op(kind, after=after, bytes=size)


def test_copies_in_both_directions_run_beside_compute():
    """A second each way and two of compute, none of which waits for another: two seconds."""
    ops = (copy("to_device", 1e8 - 1e3), copy("from_device", 2e8 - 2e3), work(2.0))
    found = simulate_step(Schedule(ops, ()), with_host())
    assert found.seconds == pytest.approx(2.0)
    assert found.totals.sent == pytest.approx(
        {("to device", HOST_MEMORY): 1.0, ("from device", HOST_MEMORY): 1.0}
    )
    assert found.totals.bytes_sent["to device", HOST_MEMORY] == 1e8 - 1e3
    assert found.totals.exposed == {}


def test_compute_that_needs_a_copy_waits_for_it_and_copies_of_one_direction_queue():
    """Two copies of a second, then two seconds of compute that need both: two are waited for."""
    ops = (copy("to_device", 1e8 - 1e3), copy("to_device", 1e8 - 1e3), work(2.0, 0, 1))
    found = simulate_step(Schedule(ops, ()), with_host())
    assert found.seconds == pytest.approx(4.0)
    assert found.totals.exposed == pytest.approx({HOST_MEMORY: 2.0})


def test_cores_that_copy_do_not_compute():
    ops = (copy("to_device", 1e8 - 1e3), work(2.0))
    found = simulate_step(Schedule(ops, ()), with_host("cpu"))
    assert found.seconds == pytest.approx(3.0)
    assert found.totals.exposed == pytest.approx({HOST_MEMORY: 1.0})


def test_a_layer_of_moments_comes_is_updated_and_goes():
    """Ten turns: 4 KiB at 100 MB/s, a pass that reads gradient and moments, 4 KiB at 200 MB/s.

    The turns are counted beside the first copy.
    """
    schedule = traced(update, (10, 32, 32), (10, 32, 32), on_host=(1,))
    found = simulate_step(schedule, with_host())
    sent = LAYER / 1e8 + LAYER / 2e8 + 2 * START
    assert found.seconds == pytest.approx(10 * (sent + START + 3 * LAYER / 1e9), rel=1e-4)
    assert found.totals.exposed == pytest.approx({HOST_MEMORY: 10 * (sent - START)}, rel=1e-3)


def test_a_cluster_without_a_host_tier_has_no_price_for_a_copy():
    with pytest.raises(InputError, match=r"no `host`.*probe.*to_device"):
        simulate_step(Schedule((copy("to_device", 1),), ()), costs(nodes=1))


def test_the_rate_of_copies_is_one_that_may_change():
    one = with_host()
    ops = (copy("to_device", 1e8 - 1e3), copy("from_device", 4e8 - 2e3, 0))
    assert simulate_step(Schedule(ops, ()), one).seconds == pytest.approx(3.0)
    assert "copies between host and device" not in changes(costs(nodes=1).topology)
    faster = changes(one.topology)["copies between host and device"](2.0)
    found = simulate_step(Schedule(ops, ()), Costs(faster, one.layout, one.fill))
    assert found.seconds == pytest.approx(1.5, rel=1e-4)
