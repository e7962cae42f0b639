"""Compares the copies of a state, and names a device that silently computed something else.

Every device that holds a copy of a part of the state must hold the same bits. Each device adds up
its own copies (`digests`), and the sums are compared; nothing of the state is sent.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

import jax

from moejax.checkpoint.digests import device_sums
from moejax.errors import ReplicasError
from moejax.runtime.processes import Processes

SHOWN = 4  # arrays that a message names


def differing_copies(arrays: Mapping[str, jax.Array], processes: Processes) -> str | None:
    """Returns the devices whose copies differ from the others', in words; None if all are equal.

    All processes call it and get the same. Waits for the arrays.
    """
    here = {
        key: [[list(start), device, text] for start, device, text in device_sums(x)]
        for key, x in arrays.items()
        if copied(x)
    }
    everywhere = processes.gather(here)
    odd: dict[str, list[str]] = defaultdict(list)  # keys of arrays, by devices
    for key in here:
        copies: dict[tuple[int, ...], dict[str, str]] = defaultdict(dict)
        for index, found in enumerate(everywhere):
            for start, device, text in found[key]:
                copies[tuple(start)][f"device {device} (process {index})"] = text
        for devices in map(_odd, copies.values()):
            if devices and key not in odd[devices]:
                odd[devices].append(key)
    return "; ".join(map(_sentence, odd, odd.values())) or None


def copied(x: jax.Array) -> bool:
    """Whether several devices hold the same part of an array."""
    if not isinstance(x, jax.Array):  # a number of the host
        return False
    parts = x.sharding.devices_indices_map(x.shape).values()
    starts = [tuple(one.start or 0 for one in part) for part in parts]
    return len(set(starts)) < len(starts)


def _odd(sums: Mapping[str, str]) -> str:
    """Returns the devices whose sum is not the majority's; all without one; "" if all agree."""
    counts = Counter(sums.values()).most_common(2)
    if len(counts) < 2:
        return ""
    most = counts[0][0] if counts[0][1] > counts[1][1] else None
    return ", ".join(device for device, text in sums.items() if text != most)


def _sentence(devices: str, keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"{devices}: other numbers than the copies in {', '.join(keys[:SHOWN])}{more}"


def check_replicas(arrays: Mapping[str, jax.Array], step: int, processes: Processes) -> None:
    """Raises ReplicasError, in all processes, if copies of a state differ; it names the devices."""
    if (found := differing_copies(arrays, processes)) is not None:
        raise ReplicasError(
            f"devices computed different numbers. After step {step}: {found}. Copies of one state "
            "are the same, to the bit. The checkpoints from before are whole, and none was written "
            "now: look at these devices (moejax doctor --smoke), leave out those that fail, and "
            "run the same command again."
        )
