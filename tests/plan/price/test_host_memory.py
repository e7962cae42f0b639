"""The bytes of a node's host that a run takes, counted by hand and as the run places them."""

import pytest

from moejax.checkpoint.writer import arrays_of
from moejax.config.fields import change
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.plan.price.host import copies_bytes, node_bytes
from moejax.step.train_step import build_step
from moejax.train.memory.placement import Piece, place, start_of
from tests.cases import on_nodes, small_config, step_for

COPIES = {"checkpoint.memory_every": 10}


def abstract_step(cfg, platform="cpu"):
    return build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), platform)


def placed(step, nodes):
    """Bytes that each host keeps of a state, and of its neighbour's, in one copy."""
    holders = {}
    for key, x in arrays_of(step.abstract).items():
        shape = x.sharding.shard_shape(x.shape)
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            piece = Piece(key, start_of(index), shape, x.dtype.name)
            holders.setdefault(piece, set()).add(device.id // (8 // nodes))
    shares = place({piece: frozenset(on) for piece, on in holders.items()}, list("ab")[:nodes])
    sent = [sum(piece.nbytes for piece in share.sent) for share in shares]
    own = [sum(piece.nbytes for piece in share.pieces) for share in shares]
    return [mine + theirs for mine, theirs in zip(own, sent[::-1], strict=True)]


@pytest.mark.parametrize(
    ("cfg", "nodes"),
    [
        (small_config((2, 1, 2, 2)), 1),
        (on_nodes((2, 2, 1, 2)), 2),  # nodes hold the same
        (on_nodes((1, 4, 1, 2)), 2),  # each holds half of each weight
        (on_nodes((1, 2, 4, 1)), 2),
    ],
)
def test_copies_of_the_state_take_what_they_are_placed_in(cfg, nodes):
    cfg = change(cfg, COPIES)
    first, *others = placed(step_for(cfg), nodes)
    assert all(other == pytest.approx(first, rel=0.01) for other in others)
    assert copies_bytes(abstract_step(cfg)) == pytest.approx(2 * first, rel=0.01)


def test_without_copies_there_are_none():
    assert copies_bytes(abstract_step(small_config())) == 0


def test_a_node_holds_what_its_devices_keep_there_and_a_cpu_its_devices_too():
    """Four of eight devices are on a node."""
    cfg = on_nodes((2, 2, 1, 2))
    assert node_bytes(abstract_step(cfg), 1000, 7) == 4 * 1007
    assert node_bytes(abstract_step(cfg, "gpu"), 1000, 7) == 4 * 7
    copied = change(cfg, COPIES)
    extra = copies_bytes(abstract_step(copied, "gpu"))
    assert node_bytes(abstract_step(copied, "gpu"), 1000, 7) == 4 * 7 + extra > extra > 0


def test_moments_on_the_host_are_counted_there_alone():
    cfg = small_config((1, 2, 2, 2))
    device, host = (
        abstract_step(change(cfg, {"memory.optimizer": kind})) for kind in ("device", "host")
    )
    moved = host.host_bytes()
    assert device.host_bytes() == 0 < moved
    assert host.argument_bytes()["optimizer"] == device.argument_bytes()["optimizer"] - moved
