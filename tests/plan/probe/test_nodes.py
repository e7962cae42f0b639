"""Which devices make up a node."""

import types

import pytest

from moejax.errors import InputError
from moejax.plan.probe import nodes
from moejax.plan.probe.nodes import find_nodes, host_memory_of


def device(process, platform="cpu", **more):
    return types.SimpleNamespace(process_index=process, platform=platform, **more)


def test_a_cpu_node_is_a_host_whatever_its_processes():
    devices = [device(process) for process in (0, 0, 1, 1, 2, 2, 3, 3)]
    found = find_nodes(devices, ["a", "a", "b", "b"])
    assert (found.sizes, found.names, found.tier_names) == ((2, 4), ("a", "b"), ("host", "network"))
    assert found.warning is None


def test_an_accelerator_node_is_a_slice():
    devices = [device(n, "gpu", slice_index=n // 4) for n in range(8)]
    found = find_nodes(devices, [f"h{n}" for n in range(8)])
    assert (found.sizes, found.names) == ((2, 4), ("slice 0", "slice 1"))
    assert found.tier_names == ("nvlink", "network")
    found = find_nodes([device(0, "tpu", slice_index=None)] * 4, ["a"])
    assert (found.sizes, found.tier_names) == ((1, 4), ("ici", "dcn"))


def test_processes_that_mix_nodes_are_warned_of():
    found = find_nodes([device(process) for process in range(4)], ["a", "b", "a", "b"])
    assert found.sizes == (2, 2)
    assert found.warning is not None
    assert "numbered" in found.warning


def test_the_user_may_say_what_a_node_is():
    devices = [device(0) for _ in range(6)]
    assert find_nodes(devices, ["a"], 3).sizes == (3, 2)
    assert find_nodes(devices, ["a"], 3).names == ("a/0", "a/1", "a/2")
    with pytest.raises(InputError, match="share them evenly"):
        find_nodes(devices, ["a"], 4)


def test_nodes_of_unequal_size_are_refused():
    with pytest.raises(InputError, match="a 2, b 1"):
        find_nodes([device(0), device(0), device(1)], ["a", "b"])


def test_nodes_of_one_host_share_its_memory_and_one_of_several_hosts_has_theirs(monkeypatch):
    monkeypatch.setattr(nodes, "machine_memory", lambda: 600)
    devices = [device(0) for _ in range(6)]
    assert host_memory_of(devices[0], find_nodes(devices, ["a"], 3), ["a"]) == 200
    devices = [device(n // 2, "tpu", slice_index=0) for n in range(4)]
    assert host_memory_of(devices[0], find_nodes(devices, ["a", "b"]), ["a", "b"]) == 1200
