"""Groups a running program's devices into nodes, and orders the nodes.

A node is a group joined by the fastest links: a TPU slice, an NVLink domain of GPUs (JAX numbers
both with `slice_index`), a host of CPU devices. The probe measures whether that is so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moejax.config.checks.machine import machine_memory
from moejax.errors import InputError
from moejax.runtime.memory import device_memory
from moejax.runtime.start import platform_of

NAMES = {"cpu": ("host", "network"), "gpu": ("nvlink", "network"), "tpu": ("ici", "dcn")}


@dataclass(frozen=True)
class Nodes:
    """The devices by node.

    Attributes:
      devices: devices of each node, in the order of the mesh.
      names: hosts or slices of the nodes.
      tier_names: name of the tier inside nodes, and of the one across.
      warning: an order of devices that would make a mesh slow; or empty.
    """

    devices: tuple[tuple[Any, ...], ...]
    names: tuple[str, ...]
    tier_names: tuple[str, str]
    warning: str | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of nodes, and of devices in each."""
        return len(self.devices), len(self.devices[0])


def find_nodes(devices: Sequence[Any], hosts: Sequence[str], asked: int | None = None) -> Nodes:
    """Groups devices by node.

    Args:
      devices: all devices, sorted by process.
      hosts: each process's host name.
      asked: number of nodes from the user; None: find them from the devices.

    Raises:
      InputError: if nodes have different numbers of devices.
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
    """Returns the memory of one device in bytes; CPU devices share their host's."""
    return device_memory(device, _beside(device, nodes, host_of))


def host_memory_of(device: Any, nodes: Nodes, host_of: Sequence[str]) -> int:
    """Returns the bytes of hosts' memory for the devices of a node, equal shares of each host's."""
    return machine_memory() * nodes.sizes[1] // _beside(device, nodes, host_of)


def _beside(device: Any, nodes: Nodes, host_of: Sequence[str]) -> int:
    """Returns the number of devices on a device's host."""
    here = host_of[device.process_index]
    return sum(host_of[d.process_index] == here for node in nodes.devices for d in node)


def _name(device: Any, hosts: Sequence[str]) -> str:
    slice_index = getattr(device, "slice_index", None)
    if device.platform != "cpu" and slice_index is not None:
        return f"slice {slice_index}"
    return str(hosts[device.process_index])


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names, numbered if some are equal."""
    if len(set(names)) == len(names):
        return tuple(names)
    width = int(math.log10(len(names))) + 1
    return tuple(f"{name}/{index:0{width}d}" for index, name in enumerate(names))
