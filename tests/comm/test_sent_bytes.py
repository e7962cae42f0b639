"""What crosses the link between two hosts is what is counted: no part of it goes twice.

Devices of one process stand for those of several hosts, and exchanges count what they send. Counted
is what plans are priced by: `Topology.shares` of the collectives in the traced program.
"""

import ctypes

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm.cpu import exchange, gloo
from moejax.config.fields import change
from moejax.plan.cluster.device import Device
from moejax.plan.cluster.topology import Link, Tier, Topology, same_links
from moejax.plan.trace.reader import collectives
from moejax.step.train_step import build_step
from tests.cases import CERTAIN, place, random_batch, small_config, step_for
from tests.step.test_step_together import KINDS

COLLECTIVES = {
    "all_to_all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
    "all_gather": lambda x, axes: lax.all_gather(x, axes, axis=0, tiled=True),
    "reduce_scatter": lambda x, axes: lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True),
    "all_reduce": lax.psum,
    "ppermute": lambda x, axes: lax.ppermute(x, axes, [(0, 1)]),
}
LATER = pytest.mark.exhaustive
# Hosts, and devices of each.
SHAPES = [(2, 4), (3, 2), pytest.param(2, 2, marks=LATER), pytest.param(4, 2, marks=LATER)]
LINKS = same_links(Link(0.0, 1.0))
DEVICE = Device("toy", "cpu", 2**30, {"float32": ((1.0, 1.0),)}, 1.0, 1.0, 0.0)


@pytest.fixture(autouse=True)
def everything_exchanged(monkeypatch):
    """Small arrays too."""
    monkeypatch.setattr("moejax.comm.cpu.gloo.LARGE", 0)


def by_hosts(mesh, hosts):
    """The exchange of a mesh whose devices, in its order, are of so many hosts."""
    connected = exchange.connected(mesh)
    count = len(connected.device_ids)
    return connected._replace(processes=tuple(d * hosts // count for d in range(count)))


def leaving(hosts, count):
    """Bytes that each host's devices have sent to other hosts' until now."""
    host = np.arange(count) * hosts // count
    library, number = exchange._library(), ctypes.c_int64
    every = range(count)
    sent = np.array([[library.moejax_sent(number(d), number(p)) for p in every] for d in every])
    across = np.where(host[:, None] == host[None, :], 0, sent).sum(axis=1)
    return np.array([across[host == h].sum() for h in range(hosts)])


def counted(kind, operand_bytes, inside, across, hosts, devices):
    """Bytes that a host sends to others in a collective of groups of so many devices."""
    tiers = (Tier("host", devices, LINKS), Tier("network", hosts, LINKS))
    topology = Topology(1, "toy", "a test", DEVICE, tiers)
    return devices * topology.shares(kind, operand_bytes, inside, across)[1]


@pytest.mark.parametrize(("hosts", "devices"), SHAPES)
@pytest.mark.parametrize("axes", [("host",), ("device",), ("host", "device")])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_sends_over_a_link_what_is_counted(kind, axes, hosts, devices):
    count = hosts * devices
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(hosts, devices), ("host", "device"))
    ordered = gloo.in_order(lambda x: COLLECTIVES[kind](x, axes), by_hosts(mesh, hosts))
    mapped = jax.shard_map(
        ordered,
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    x = np.zeros((count * count * 24, 5), np.float32)
    before = leaving(hosts, count)
    jax.block_until_ready(jax.jit(mapped)(x))
    sent = leaving(hosts, count) - before
    inside = devices if "device" in axes else 1
    across = hosts if "host" in axes else 1
    operand = x.nbytes // count * (inside * across if kind == "all_gather" else 1)
    wanted = counted(kind, operand, inside, across, hosts, devices)
    if kind == "ppermute":  # one device of each group sends: of the first host, if to another
        pass_on = across > 1 and inside == 1
        assert list(sent) == [wanted * pass_on] + [0] * (hosts - 1)
    else:
        np.testing.assert_array_equal(sent, np.full(hosts, wanted))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "gather_dense", "parts"),
    [
        ((1, 8, 1, 1), "use", 1),  # weights over all
        pytest.param((1, 2, 1, 4), "use", 1, marks=LATER),  # activations across
        pytest.param((1, 8, 1, 1), "use", 2, marks=LATER),
        pytest.param((1, 2, 4, 1), "use", 1, marks=LATER),  # experts inside
        pytest.param((1, 1, 8, 1), "step", 1, marks=LATER),  # experts over all
        pytest.param((8, 1, 1, 1), "use", 1, marks=LATER),  # copies over all
    ],
)
@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=LATER)])
def test_a_step_sends_over_a_link_what_is_counted(sizes, gather_dense, parts, hosts, monkeypatch):
    train = {"batch_sequences": 16, "micro_batches": parts}
    cfg = small_config(sizes, moe=CERTAIN, train=train)
    cfg = change(cfg, {"mesh.nodes": hosts, "mesh.gather_dense": gather_dense})
    check_step(cfg, hosts, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [15, pytest.param(18, marks=LATER), pytest.param(19, marks=LATER)])
def test_states_and_chosen_keys_cross_a_link_as_counted(kind, monkeypatch):
    """Sequences that the devices of two hosts share: effects, states and tails; or latents."""
    moe = CERTAIN | KINDS[kind].get("moe", {})
    train = {"batch_sequences": 4}
    cfg = small_config((1, 8, 1, 1), model=KINDS[kind]["model"], moe=moe, train=train)
    shared = {"mesh.context": 8, "mesh.context_stripe": 2, "data.sequence_length": 32}
    check_step(change(cfg, shared | {"mesh.nodes": 2}), 2, monkeypatch)


def check_step(cfg, hosts, monkeypatch):
    """Compares what a step sends with what its program counts."""
    plain = step_for(cfg)
    unordered = build_step(cfg, plain.mesh.abstract_mesh, "cpu")
    traced = unordered.step.trace(unordered.abstract, unordered.abstract_batch())
    monkeypatch.setattr(gloo, "is_gloo", lambda mesh: isinstance(mesh, Mesh))
    monkeypatch.setattr(gloo, "connected", lambda mesh: by_hosts(mesh, hosts))
    train_step, batch = step_for(cfg), random_batch(cfg)
    state = jax.block_until_ready(train_step.init())
    before = leaving(hosts, 8)
    jax.block_until_ready(train_step.step(state, place(train_step, batch)))
    sent = leaving(hosts, 8) - before

    wanted, layout = 0.0, train_step.layout
    for call in collectives(traced.jaxpr.jaxpr):
        if call.kind in COLLECTIVES:  # largest values go another way
            inside = layout.size(layout.inside_node(call.axes))
            across = layout.size(layout.between_nodes(call.axes))
            group = inside, across, hosts, 8 // hosts
            share = counted(call.kind, call.bytes, *group)
            if call.kind == "ppermute":  # one device of a chain sends to the next host, if any
                share = call.bytes * (across - 1) / across
            wanted += call.calls * share
    np.testing.assert_allclose(sent, np.full(hosts, wanted), rtol=0.03)
    assert min(sent) >= wanted
