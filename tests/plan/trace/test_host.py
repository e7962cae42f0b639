"""Arrays in the host's memory in a schedule: what moves, and what each memory holds."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm.host import MEMORY_KIND, empty, to_device, to_host
from moejax.config.fields import change
from moejax.plan.trace.memory import peak
from moejax.plan.trace.reader import read
from moejax.plan.trace.schedule import walk
from moejax.step.optimizer import _layer_by_layer
from tests.cases import small_config
from tests.plan.trace.test_reader import schedule_of

LAYER = 1024 * 4  # bytes


def traced(function, *shapes, on_host=()):
    """The schedule of a function of float32 arrays, some of them in the host's memory."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    kinds = [MEMORY_KIND if number in on_host else "device" for number in range(len(shapes))]
    places = [NamedSharding(mesh, P(), memory_kind=kind) for kind in kinds]
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        for shape, place in zip(shapes, places, strict=True)
    ]
    return read(jax.jit(function).trace(*arrays).jaxpr)


def copied(schedule):
    """Bytes that move to the device and from it."""
    return tuple(
        sum(op.bytes * times for op, times in walk(schedule) if op.kind == kind)
        for kind in ("to_device", "from_device")
    )


def update(gradient, moments):
    """The update of moments in place, a layer at a time."""
    return _layer_by_layer(lambda g, m: 0.9 * m + 0.1 * g, gradient, moments)


def test_an_array_moves_once_and_costs_the_device_nothing_else():
    def square(x):
        y = to_device(x)
        return y @ y

    schedule = traced(square, (32, 32), on_host=(0,))
    assert [op.kind for op in schedule.ops] == ["to_device", "product"]
    assert copied(schedule) == (LAYER, 0)


def test_a_part_of_an_array_moves_alone():
    def part(x, n):
        return to_device(jax.lax.dynamic_index_in_dim(x, n.astype(int)[0], keepdims=False)) * 2

    schedule = traced(part, (10, 32, 32), (1,), on_host=(0,))
    assert copied(schedule) == (LAYER, 0)
    found = peak(schedule)
    assert (found.host_arguments, found.host_temporary) == (10 * LAYER, 0)
    assert found.arguments == 4
    assert found.temporary == LAYER


def test_an_update_in_place_moves_each_layer_there_and_back():
    """Ten layers of 4 KiB of gradients on the device and of moments on the host."""
    host, device = (
        traced(update, (10, 32, 32), (10, 32, 32), on_host=on_host) for on_host in ((1,), ())
    )
    assert copied(host) == (10 * LAYER, 10 * LAYER)
    assert copied(device) == (0, 0)
    found, before = peak(host), peak(device)
    assert (found.host_arguments, found.host_temporary) == (10 * LAYER, 0)
    assert found.arguments == 10 * LAYER == before.arguments - 10 * LAYER
    assert found.temporary == LAYER  # of moments that came; those that go take its place
    assert (before.host_arguments, before.host_temporary) == (0, 0)


def test_what_forward_keeps_on_the_host_is_there_for_every_turn():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst=MEMORY_KIND,
    )

    def loss(w, x):
        def turn(x, w):
            y = jax.ad_checkpoint.checkpoint_name(x @ w, "kept")
            return jnp.sin(y), None

        return jax.lax.scan(jax.checkpoint(turn, policy=policy), x, w)[0].sum()

    schedule = traced(jax.grad(loss), (5, 32, 32), (32, 32))
    assert copied(schedule) == (5 * LAYER, 5 * LAYER)
    found = peak(schedule)
    assert found.host_arguments == 0
    assert found.host_temporary == 5 * LAYER  # each goes straight to its place


def test_zeros_that_go_to_the_host_move():
    def zeros(x):
        return jax.lax.map(lambda _: to_host(jnp.zeros((32, 32))), jnp.arange(3)), x

    schedule = traced(zeros, (4,))
    assert copied(schedule) == (0, 3 * LAYER)


def test_what_is_not_written_yet_does_not_move():
    def slots(x):
        kept = jax.lax.dynamic_update_index_in_dim(empty((5, 32, 32), x.dtype), to_host(x), 2, 0)
        return to_device(jax.lax.dynamic_index_in_dim(kept, 2, 0, keepdims=False))

    schedule = traced(slots, (32, 32))
    assert copied(schedule) == (LAYER, LAYER)
    assert peak(schedule).host_temporary == 5 * LAYER


def test_computing_on_the_host_is_no_part_of_a_step():
    with pytest.raises(NotImplementedError, match="add in the host's memory"):
        traced(lambda x, y: to_device(to_host(x) + y), (4,), (4,), on_host=(1,))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizer_of_a_step_moves_the_moments_of_matrices(name):
    cfg = small_config((1, 2, 2, 2), optimizer={"name": name})
    on_device = peak(schedule_of(cfg))
    schedule = schedule_of(change(cfg, {"memory.optimizer": "host"}))
    found = peak(schedule)
    assert found.host_arguments == on_device.arguments - found.arguments > 0
    assert copied(schedule) == (found.host_arguments, found.host_arguments)
    assert found.host_temporary == 0
