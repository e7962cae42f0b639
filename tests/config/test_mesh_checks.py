"""Rules between the mesh, the devices, the nodes and the batch."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config.checks import AXES, check, resolve_mesh
from moejax.config.load import from_dict
from tests.config.files import cases, message_of, settings

MISFITS = """
mesh.expert=4 mesh.tensor=4 on 8 gpu -> \
replica=1 x fsdp=1 x expert=4 x tensor=4 needs 16 devices, found 8 (gpu)
mesh.replica=1 on 8 gpu -> needs 1 devices, found 8 (gpu) ... mesh.replica=none to use all
mesh.replica=none mesh.expert=4 on 6 tpu -> \
mesh fsdp=1 x expert=4 x tensor=1 needs a multiple of 4 devices, found 6 (tpu)
mesh.replica=none mesh.expert=4 on 6 cpu -> mesh.simulated_devices=8
mesh.replica=none mesh.expert=4 on 2 cpu -> mesh.simulated_devices=4
mesh.replica=none train.batch_sequences=12 on 8 gpu -> \
`train.batch_sequences` = 12 is not divisible by 8 = mesh.replica 8 ... 8 or 16
mesh.stage=2 train.micro_batches=4 mesh.replica=none mesh.expert=2 on 6 gpu -> \
mesh stage=2 x fsdp=1 x expert=2 x tensor=1 needs a multiple of 4 devices
"""


@pytest.mark.parametrize(("words", "said"), cases(MISFITS))
def test_a_mesh_that_does_not_fit_the_devices_is_refused(words, said):
    words, _, place = words.partition(" on ")
    devices, platform = place.split()
    message = message_of(resolve_mesh, settings(words), int(devices), platform)
    for part in said.split(" ... "):
        assert part in message
    assert "simulated" not in message or platform == "cpu"


def test_stages_are_counted_among_the_devices():
    cfg = settings("mesh.stage=2 train.micro_batches=4 mesh.replica=none mesh.expert=2")
    assert resolve_mesh(cfg, 8, "gpu").mesh.replica == 2


SIZES = st.integers(1, 12)


@given(
    fsdp=SIZES, expert=SIZES, tensor=SIZES, replica=st.none() | SIZES, devices=st.integers(1, 64)
)
def test_a_resolved_mesh_covers_all_devices_or_is_refused(fsdp, expert, tensor, replica, devices):
    sizes = {"fsdp": fsdp, "expert": expert, "tensor": tensor, "replica": replica}
    cfg = from_dict({"mesh": sizes, "train.batch_sequences": devices})
    others = fsdp * expert * tensor
    fits = devices % others == 0 if replica is None else replica * others == devices
    if not fits:
        message = message_of(resolve_mesh, cfg, devices, "cpu")
        assert f"found {devices} (cpu)" in message
        return
    mesh = resolve_mesh(cfg, devices, "cpu").mesh
    assert math.prod(getattr(mesh, axis) for axis in AXES) == devices
    assert (mesh.fsdp, mesh.expert, mesh.tensor) == (fsdp, expert, tensor)
    assert replica in (None, mesh.replica)
    resolved = resolve_mesh(cfg, devices, "cpu")
    assert resolve_mesh(resolved, devices, "cpu") == resolved


@given(batch=st.integers(1, 96), fsdp=SIZES, expert=SIZES, micro=st.integers(1, 4), devices=SIZES)
def test_every_device_gets_whole_sequences_or_the_batch_is_refused(
    batch, fsdp, expert, micro, devices
):
    devices *= fsdp * expert
    values = {"train.batch_sequences": batch, "train.micro_batches": micro}
    cfg = from_dict({**values, "mesh": {"fsdp": fsdp, "expert": expert, "replica": None}})
    if batch % (devices * micro):
        message = message_of(resolve_mesh, cfg, devices, "cpu")
        assert f"`train.batch_sequences` = {batch} is not divisible" in message
    else:
        assert resolve_mesh(cfg, devices, "cpu").mesh.replica == devices // (fsdp * expert)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_experts_divide_their_owners_or_are_refused(experts, expert, tensor, folded):
    values = {
        "moe.num_experts": experts,
        "moe.experts_per_token": 1,
        "moe.router.renormalize": False,
        "moe.router.score": "sigmoid",  # an only expert's softmax is always one
        "mesh.expert": expert,
        "mesh.tensor": tensor,
        "mesh.expert_weights": "folded" if folded and tensor > 1 else "hidden",
        "model.width": math.lcm(*range(1, 9)),
        "model.num_heads": 12,
        "model.num_kv_heads": 12,
        "data.sequence_length": 12,
        "train.batch_sequences": expert,
    }
    owners = expert * tensor if folded else expert
    cfg = from_dict(values)
    if experts % owners:
        assert f"{experts} experts on an expert" in message_of(check, cfg)
    else:
        check(cfg)


NODES = {"mesh.expert": 4, "mesh.tensor": 2, "train.batch_sequences": 32}


def resolve(changes, devices=8, **known):
    cfg = from_dict(NODES | changes)
    check(cfg)
    return resolve_mesh(cfg, devices, "cpu", **known).mesh


def test_nodes_are_as_many_as_processes_unless_set():
    assert resolve({}, processes=2).nodes == 2
    assert resolve({"mesh.nodes": 4}, processes=2).nodes == 4
    assert resolve({}).nodes is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh.nodes": 3}, "`mesh.nodes` = 3 does not divide 8 devices. Nodes have"),
        ({"mesh.nodes": 8, "route": "two_level"}, "a node holds 1 of 4 owners of experts"),
        ({"route": "two_level_merge", "mesh.nodes": 1}, "a node holds 4 of 4 owners"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(changes, said):
    assert said in message_of(resolve, changes)


def test_a_node_holds_whole_pieces_of_an_axis():
    changes = {"mesh.expert": 6, "mesh.tensor": 1, "mesh.replica": 2, "mesh.nodes": 3}
    sizes = {"moe.num_experts": 12, "train.batch_sequences": 48, "model.width": 96}
    assert "2 pieces of 2" in message_of(resolve, {**changes, **sizes}, devices=12)


@pytest.mark.parametrize(("nodes", "slots", "most"), [(1, 3, 3), (2, 2, 2), (2, 3, 2), (4, 3, 3)])
def test_each_slot_has_another_device_inside_a_node_or_across(nodes, slots, most):
    """Four devices of experts: offsets 1 to 3 of one node, 1 inside and 1 across two, 3 across."""
    values = {"mesh.expert": 4, "mesh.nodes": nodes, "moe.slots": slots}
    cfg = from_dict({**values, "train.batch_sequences": 4})
    if slots <= most:
        assert resolve_mesh(cfg, 4, "cpu").moe.slots == slots
    else:
        said = message_of(lambda one: resolve_mesh(one, 4, "cpu"), cfg)
        assert f"`moe.slots` = {slots} needs as many other devices" in said
        assert f"There are {most}." in said
