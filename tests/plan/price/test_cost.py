"""Prices of single operations and of whole schedules, against arithmetic by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout
from moejax.plan.price.cost import BucketFill, Costs, alone, node_groups, simulate_step
from moejax.plan.trace.reader import read
from moejax.plan.trace.schedule import Collective, Op, Schedule
from tests.cases import small_config
from tests.plan.clusters import cluster


def costs(mesh=(1, 1, 8, 1), nodes=2, fill=None, **options):
    cfg = small_config(mesh)
    layout = build_layout(dataclasses.replace(cfg.mesh, nodes=nodes))
    return Costs(cluster(nodes=nodes, **options), layout, fill or BucketFill())


def on(priced, **device):
    """The same on a device with other rates."""
    topology = priced.topology
    topology = dataclasses.replace(topology, device=dataclasses.replace(topology.device, **device))
    return Costs(topology, priced.layout, priced.fill)


def run(priced, *ops):
    return simulate_step(Schedule(ops, ()), priced)


def all_to_all(size, axes=("expert_slow", "expert_fast")):
    one = Collective("all_to_all", axes, "float32", size, 1, "dispatch")
    return Op("collective", collective=one)


def test_a_collective_takes_what_its_slowest_tier_takes():
    size = 8_000_000
    found = run(costs(), all_to_all(size))
    # Seven of eight parts leave; four of them cross to the other node, each to a peer of its own.
    assert found.seconds == pytest.approx(4e-4 + size * 4 / 8 / 1e7)
    assert found.totals.bytes_sent["network", "dispatch"] == pytest.approx(size / 2)
    assert found.totals.bytes_sent["host", "dispatch"] == pytest.approx(size * 3 / 8)
    assert found.totals.exposed["dispatch"] == pytest.approx(found.seconds)


@pytest.mark.parametrize(
    ("op", "share", "seconds"),
    [
        # Products run at 1 GFLOP/s at 1e6 FLOPs and at 10 from 1e9 on; half way in logarithms
        # between them at half the logarithm; a smaller one takes as long as the smallest.
        (Op("product", flops=2e9, dtype="float32"), 1.0, 1e-5 + 2e9 / 1e10),
        (Op("product", flops=10**7.5, dtype="float32"), 1.0, 1e-5 + 10**7.5 / 10**9.5),
        (Op("product", flops=1e5, dtype="float32"), 1.0, 1e-5 + 1e6 / 1e9),
        # What a product moves hides behind what it computes, or the other way round.
        (Op("product", flops=1e9, dtype="float32", bytes=5e7), 1.0, 1e-5 + 0.1),
        (Op("product", flops=1e9, dtype="float32", bytes=3e8), 1.0, 1e-5 + 0.3),
        # Where half of the rows are filled, half is computed and half is moved.
        (Op("product", flops=2e9, dtype="float32", bytes=5e7), 0.5, 1e-5 + 0.1),
        (Op("product", flops=2e9, dtype="float32", bytes=6e8), 0.5, 1e-5 + 0.3),
        # A region starts once a pass; rows are gathered at half the rate of a copy.
        (Op("region", bytes=2e8), 1.0, 1e-5 + 0.2),
        (Op("region", bytes=2e8, passes=3), 1.0, 3e-5 + 0.2),
        (Op("gather", bytes=1e8), 1.0, 1e-5 + 0.2),
        (Op("gather"), 1.0, 1e-5),
        (Op("write", bytes=2e8), 1.0, 1e-5 + 0.2),
    ],
)
def test_a_single_operation_costs_what_it_does_by_hand(op, share, seconds):
    assert alone(op, cluster().device, share) == pytest.approx(seconds, rel=1e-12)


def test_a_program_takes_longer_than_its_operations_and_links_do_not():
    ops = (Op("product", scope="experts", flops=1e9, dtype="float32"), all_to_all(1_000_000))
    alone = costs(platform="gpu")
    slower = on(alone, program_overhead=3.0)
    for op, times in zip(ops, (3, 1), strict=True):
        before, after = (run(one, op).seconds for one in (alone, slower))
        assert after == pytest.approx(times * before)


@pytest.mark.parametrize("size", [100_000, 8_000_000])
def test_devices_that_take_turns_send_while_others_compute(size):
    def after(place, size, axis):
        return dataclasses.replace(all_to_all(size, (axis,)), after=(place,))

    work = Op("product", scope="experts", flops=5e8, dtype="float32")
    alone = costs()
    waiting = on(alone, oversubscription=4.0)
    both = Schedule((work, after(0, size, "expert_slow")), ())
    sending = run(alone, all_to_all(size, ("expert_slow",))).seconds
    computing = simulate_step(both, alone).seconds - sending
    shorter, longer = sorted((computing, sending))
    found = simulate_step(both, waiting)
    assert found.seconds == pytest.approx(longer + shorter / 4)
    assert found.totals.sent["network", "dispatch"] == pytest.approx(sending)
    # Once the devices of a node have met, nothing that they computed before hides anything.
    meet = after(0, 0, "expert_fast")
    met = run(waiting, work, meet, after(1, size, "expert_slow")).seconds
    assert met == pytest.approx(computing + sending, abs=1e-4)


def test_a_collective_takes_as_long_as_devices_need_to_meet_unless_it_is_right_behind_another():
    def seconds(costs_now, axis, size, *flops):
        """Seconds of as many collectives, each after so much compute, without the compute."""
        ops = []
        for work in flops:
            if work:
                before_it = (len(ops) - 1,) if ops else ()
                cost = {"flops": work, "dtype": "float32", "after": before_it}
                ops.append(Op("product", scope="experts", **cost))
            ops.append(dataclasses.replace(all_to_all(size, (axis,)), after=(len(ops) - 1,)))
        found = run(costs_now, *ops)
        return found.seconds - found.totals.computed["experts"]

    before = costs()
    tiers = [
        dataclasses.replace(t, sync_delay_s=s)
        for t, s in zip(before.topology.tiers, (1.0, 2.0), strict=True)
    ]
    after = Costs(
        dataclasses.replace(before.topology, tiers=tuple(tiers)), before.layout, before.fill
    )
    for axis, sync_delay_s in (("expert_fast", 1.0), ("expert_slow", 2.0)):
        alone = seconds(before, axis, 8_000, 1e6)
        assert alone < sync_delay_s
        assert seconds(after, axis, 8_000, 1e6) == pytest.approx(sync_delay_s)
        assert seconds(after, axis, 8_000, 1e6, 1e6) == pytest.approx(2 * sync_delay_s)
        assert seconds(after, axis, 8_000, 1e6, 0) == pytest.approx(sync_delay_s + alone)
        long = 8_000 * math.ceil(3 * sync_delay_s / alone)
        assert seconds(after, axis, long, 1e6) == seconds(before, axis, long, 1e6)


def test_a_region_takes_the_longer_of_its_memory_and_its_exponentials_and_sums():
    """A softmax: one exponential and two reductions of each value, read and written once."""
    shape = jax.ShapeDtypeStruct((10, 100), jnp.float32)
    (op,) = read(jax.make_jaxpr(jax.nn.softmax)(shape)).ops
    assert (op.exponentials, op.reduced, op.bytes) == (1000, 2000, 8000)
    device = dataclasses.replace(cluster().device, startup_s=0.0)
    assert alone(op, device) == pytest.approx(8000 / device.copy_bytes_per_s)
    slow = dataclasses.replace(device, exponentials_per_s=1e6, reductions_per_s=1e7)
    assert alone(op, slow) == pytest.approx(1000 / 1e6 + 2000 / 1e7)


def test_an_experts_weights_are_moved_at_the_rate_of_their_size():
    """A small array's rate: a cache may hold one expert's weights, not those of all."""
    device = dataclasses.replace(cluster().device, copies=((1e6, 4e9), (1e8, 1e9)))
    op = Op("product", flops=1e9, dtype="float32", bytes=1.6e7, blocks=(1024, 16))
    moved = alone(op, device) - alone(dataclasses.replace(op, bytes=0.0), device)
    assert moved == pytest.approx(1.6e7 / 4e9)


def test_experts_in_chunks_compute_whole_blocks_and_move_their_weights_each_time():
    def seconds(rows, moved=0.0):
        cost = {"flops": 1e7 * rows, "dtype": "float32", "scales_with_fill": True, "bytes": moved}
        op = Op("product", scope="experts", blocks=(rows, 2), **cost)
        return priced.compute(op, 0.8)

    priced = on(costs(), products={"float32": ((1.0, 1e10),)}, startup_s=0.0)
    # An expert's rows, one standard deviation below, at and above the mean of 512, take blocks of
    # 512, 512 and 512 + 64; of 64 they take 64, 64 and 128.
    assert seconds(1280) == pytest.approx(2 * (512 + 512 + 576) / 3 * 1e-3)
    assert seconds(160) == pytest.approx(2 * (64 + 64 + 128) / 3 * 1e-3)
    assert seconds(160, 1e8) - seconds(160) == pytest.approx(1e8 / priced.device.copy_bytes_per_s)


def test_on_cpu_collectives_go_one_by_one_and_take_compute_with_them():
    ops = (all_to_all(1_000_000, ("expert_fast",)), all_to_all(1_000_000, ("expert_slow",)))
    together = run(costs(platform="gpu"), *ops).seconds
    in_turn = run(costs(platform="cpu"), *ops).seconds
    alone = [run(costs(), op).seconds for op in ops]
    assert together == pytest.approx(max(alone))
    assert in_turn == pytest.approx(sum(alone))
    beside = (ops[0], Op("product", scope="experts", flops=1e8, dtype="float32"))
    free, taken = (run(costs(compute_share=share), *beside).seconds for share in (0.0, 1.0))
    parts = [run(costs(), op).seconds for op in beside]
    assert free == pytest.approx(max(parts))
    assert taken == pytest.approx(sum(parts))


def test_what_is_filled_is_what_experts_cost():
    op = Op("product", scope="experts", flops=1e9, dtype="float32", scales_with_fill=True)
    full, half = (run(costs(fill=BucketFill(filled=share)), op).seconds for share in (1.0, 0.5))
    assert half < 0.75 * full


def test_loops_cost_their_turns():
    def function(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=6)[0]

    schedule = read(jax.make_jaxpr(function)(jnp.ones((8, 8)), jnp.ones((8, 8))))
    one = simulate_step(
        next(op.body for op in schedule.ops if op.body is not None), costs()
    ).seconds
    found = simulate_step(schedule, costs())
    assert found.seconds == pytest.approx(6 * one, rel=1e-6)
    assert sum(found.totals.computed.values()) == pytest.approx(found.seconds)


def test_unrolled_turns_wait_for_what_they_carry():
    def function(x, w, unroll):
        def turn(x, _):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(turn, x, None, length=6, unroll=unroll)[0]

    arrays = jnp.ones((8, 8)), jnp.ones((8, 8))
    rolled, unrolled = (
        simulate_step(
            read(jax.make_jaxpr(lambda x, w, u=u: function(x, w, u))(*arrays)), costs()
        ).seconds
        for u in (1, 6)
    )
    assert unrolled == pytest.approx(rolled)


def transfer(size, senders):
    one = Collective("ppermute", ("stage",), "float32", size, 1, "stage", senders)
    return Op("collective", collective=one)


def of_stages(stages, nodes):
    mesh = MeshConfig(stage=stages, expert=8 // stages, nodes=nodes)
    return Costs(cluster(nodes=nodes), build_layout(mesh), BucketFill())


@pytest.mark.parametrize(
    ("stages", "senders", "beside", "together"),
    [
        (2, (0,), (1,), 1.0),  # opposite directions
        (2, (0,), (0,), 2.0),
        (4, (0, 1, 2), (3,), 1.0),  # to the next, and the share of the last
        (4, (0, 1, 2), (1, 2, 3), 2.0),  # a stage in the middle sends both ways
        (4, (1,), (2,), 1.0),  # other links
        (4, (0,), (1, 2, 3), 1.0),
    ],
)
def test_what_stages_send_waits_for_what_the_same_stages_send(stages, senders, beside, together):
    own = of_stages(stages, nodes=stages)
    one = run(own, transfer(10**6, (0,)))
    both = run(own, transfer(10**6, senders), transfer(10**6, beside))
    assert both.seconds == pytest.approx(together * one.seconds)
    assert both.totals.bytes_sent["network", "stage"] == 2e6


def test_a_ring_leaves_a_node_at_one_of_its_devices_beside_the_way_around():
    """Four devices of each of two nodes; a node's link has 4 x 1e7 bytes a second."""
    mesh = MeshConfig(fsdp=2, expert=4, nodes=2, context=8)
    own = Costs(cluster(), build_layout(mesh), BucketFill())

    def hop(*senders):
        about = ("fsdp", "expert"), "float32", 4 * 10**7, 1, "context", senders
        return Op("collective", collective=Collective("ppermute", *about))

    chain, around = hop(*range(7)), hop(7)
    both = run(own, chain, around)
    assert both.seconds == pytest.approx(run(own, chain).seconds) == pytest.approx(1.0, rel=0.01)
    assert both.totals.bytes_sent["network", "context"] == 2e7


def test_on_links_between_stages_other_collectives_wait_for_transfers_of_all():
    own = of_stages(2, nodes=2)
    every = all_to_all(10**6, ("stage",))
    first, last = transfer(10**6, (0,)), transfer(10**6, (1,))
    alone = [run(own, op).seconds for op in (every, first)]
    found = run(own, first, last, every)
    assert found.seconds == pytest.approx(sum(alone))


def test_on_cpu_a_transfer_begins_only_when_those_before_it_have_begun():
    """The second could travel while the first waits for a product."""
    product = Op("product", flops=2e9, dtype="float32")
    waits = dataclasses.replace(transfer(10**6, (0,)), after=(0,))
    own = of_stages(2, nodes=2)
    ops = (product, waits, transfer(10**6, (1,)))
    found = run(own, *ops).timeline
    assert found.start_s[2] == found.end_s[0] == found.start_s[1]


def test_a_gather_beside_the_step_is_hidden_behind_it_and_no_collective_waits_for_it():
    """Two sites of four devices: 4e7 bytes cross in a second, and a sum inside a site meanwhile."""
    layout = build_layout(MeshConfig(replica=2, expert=4, nodes=2))
    size, product = 2 * 10**7, Op("product", flops=2e10, dtype="float32")  # two seconds
    inner = all_to_all(10**6, ("expert",))

    def step(beside):
        about = "all_gather", ("replica",), "uint8", size, 1, "outer", (), beside
        return run(
            Costs(cluster(), layout, BucketFill()),
            Op("collective", collective=Collective(*about)),
            inner,
            dataclasses.replace(product, after=(1,)),
            Op("region", bytes=0, after=(0, 2)),
        )

    hidden, waited = step(beside=True), step(beside=False)
    assert hidden.totals.bytes_sent["network", "outer"] == size / 2
    assert hidden.totals.sent["network", "outer"] == pytest.approx(1.0, rel=0.01)
    assert hidden.totals.exposed.get("outer", 0.0) < 0.01
    assert hidden.seconds == pytest.approx(2.0, rel=0.02)
    assert waited.seconds == pytest.approx(3.0, rel=0.02)


def test_a_group_along_an_axis_pays_for_the_links_of_its_own_nodes():
    """Four nodes, replica 2 x fsdp 2 over them: 0 and 1 are near, and so are 2 and 3."""
    layout = build_layout(MeshConfig(replica=2, fsdp=2, expert=2, nodes=4))
    assert node_groups(layout, ("fsdp",)) == ((0, 1), (2, 3))
    assert node_groups(layout, ("replica",)) == ((0, 2), (1, 3))
    assert node_groups(layout, ("replica", "fsdp", "expert")) == ((0, 1, 2, 3),)
    assert node_groups(layout, ("expert",)) == ()
    pairs = tuple(
        tuple(0.0 if a == b else 8e7 if a // 2 == b // 2 else 1e7 for b in range(4))
        for a in range(4)
    )
    topology = dataclasses.replace(cluster(inside=2, nodes=4), pairs=pairs)
    costs = Costs(topology, layout, BucketFill())
    for axis, rate in (("fsdp", 8e7), ("replica", 1e7)):
        gather = Collective("all_gather", (axis,), "float32", 2 * 10**6, 1)
        ((tier, seconds, size),) = costs.links(gather)
        assert (tier.name, size) == ("network", 1e6)
        startup = 1e-4 * max(1.0, 1 / 3)
        assert seconds == pytest.approx(startup + 1e6 / rate)
    # Two axes along which one starts at a fast mesh axis and one at a slow one.
    split = build_layout(MeshConfig(replica=4, expert=2, nodes=2))
    assert node_groups(split, split.replica) == ((0, 1),)
