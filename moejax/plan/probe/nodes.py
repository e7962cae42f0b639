"""Finds the tiers of a running program's devices: what is a node, and in which order nodes stand.

A node is what the fastest links join: of TPUs a slice, of GPUs an NVLink domain (JAX numbers both
`slice_index`), of CPUs a host. Whether that is so, the probe measures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moejax.errors import InputError
from moejax.runtime.memory import device_memory
from moejax.runtime.start import platform_of

NAMES = {"cpu": ("host", "network"), "gpu": ("nvlink", "network"), "tpu": ("ici", "dcn")}


@dataclass(frozen=True)
class Nodes:
    """The devices by node.

    Attributes:
      devices: node after node, in the order in which meshes are filled.
      names: of the nodes: their hosts, or slices.
      tier_names: inside a node, across.
      warning: what of the order would make a mesh slow.
    """

    devices: tuple[tuple[Any, ...], ...]
    names: tuple[str, ...]
    tier_names: tuple[str, str]
    warning: str | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Nodes, and devices of each."""
        return len(self.devices), len(self.devices[0])


def find_nodes(devices: Sequence[Any], hosts: Sequence[str], asked: int | None = None) -> Nodes:
    """Groups devices by node.

    Args:
      devices: of the program, processes one after the other.
      hosts: each process's host name.
      asked: how many nodes the user says there are; None: look at the devices.

    Raises:
      InputError: if nodes have unequally many devices.
    """
    tier_names = NAMES[platform_of(list(devices))]
    if asked is not None:
        if asked < 1 or len(devices) % asked:
            raise InputError(
                f"--nodes is {asked}. There are {len(devices)} devices. Nodes must share them "
                f"evenly. Correct it, or leave it out."
            )
        size = len(devices) // asked
        parts = [tuple(devices[n * size : (n + 1) * size]) for n in range(asked)]
        return Nodes(tuple(parts), _unique([_name(part[0], hosts) for part in parts]), tier_names)
    groups: dict[str, list[Any]] = {}
    for device in devices:
        groups.setdefault(_name(device, hosts), []).append(device)
    sizes = {name: len(group) for name, group in groups.items()}
    if len(set(sizes.values())) > 1:
        seen = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise InputError(
            f"nodes differ. Devices: {seen}. Every node must have as many. Start as many on each, "
            f"or say what a node is with --nodes."
        )
    together = tuple(tuple(group) for group in groups.values())
    warning = None
    if [d for group in together for d in group] != list(devices):
        warning = (
            "the processes of a node are not numbered one after the other, so meshes of the "
            "trainer would mix nodes: number them node by node"
        )
    return Nodes(together, tuple(groups), tier_names, warning)


def memory_of(device: Any, nodes: Nodes, host_of: Sequence[str]) -> int:
    """Bytes of memory that one device may use; CPU devices share their host's."""
    here = host_of[device.process_index]
    every = [d for node in nodes.devices for d in node]
    return device_memory(device, sum(host_of[d.process_index] == here for d in every))


def _name(device: Any, hosts: Sequence[str]) -> str:
    """What tells the device's node from others."""
    slice_index = getattr(device, "slice_index", None)
    if device.platform != "cpu" and slice_index is not None:
        return f"slice {slice_index}"
    return str(hosts[device.process_index])


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names; with numbers where several are alike."""
    if len(set(names)) == len(names):
        return tuple(names)
    width = int(math.log10(len(names))) + 1
    return tuple(f"{name}/{place:0{width}d}" for place, name in enumerate(names))
