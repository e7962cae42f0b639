"""Checks of `moejax doctor --mesh` on devices: data arrives as sent, and how fast."""

import math
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm import wire
from moejax.comm.cpu import gloo
from moejax.config.checks import AXES
from moejax.layout.layout import Axes, Layout
from moejax.plan.probe.links import collective
from moejax.plan.probe.timer import Stopwatch
from moejax.runtime.processes import Processes

# Numbers from each device to each other: few, and so many that CPU processes exchange them by
# another code path, which overlaps with computation (`comm.cpu.gloo`).
WIDTHS = 64, 4096
REPEATS = 3  # a link may be wrong now and then
SHOWN = 4  # wrong pairs that are named
SIZES = 2**20, 2**23, 2**26  # bytes of a device's operand
ENOUGH_S = 0.0125  # a call that takes longer is mostly bytes, so a larger size is not needed
AIM_S = 0.1


class WrongError(Exception):
    """A check failed; the message says how. The processes can go on together."""


def groups_of(layout: Layout) -> dict[str, Axes]:
    """Returns each axis of several devices, and all axes together if there are several."""
    named: dict[str, Axes] = {name: getattr(layout, name) for name in AXES}
    found = {name: axes for name, axes in named.items() if layout.size(axes) > 1}
    return found | {"all devices": layout.mesh_axes} if len(found) > 1 else found


def check_exchange(mesh: Mesh, axes: Axes, processes: Processes) -> str:
    """Sends different numbers from each device to each other along `axes`, and compares all.

    Returns a text about the comparison.

    Raises:
      WrongError: if this process received other numbers; it names the pairs of devices.
    """
    wrong: list[str] = []
    size = math.prod(mesh.shape[axis] for axis in axes)
    spec = P(mesh.axis_names)
    for width in WIDTHS:
        x_QPW, senders_QP = _operand(mesh, axes, width)
        mapped = gloo.shard_map(
            lambda x_1PW: wire.all_to_all(x_1PW[0], axes, tag=None)[None], mesh, spec, spec
        )
        run = jax.jit(mapped)
        processes.compile(run, x_QPW)
        for _ in range(REPEATS):
            y_QPW = jax.block_until_ready(run(x_QPW))
            wrong += _wrong_pairs(y_QPW, senders_QP, mesh, axes)
    if wrong:
        kinds = list(dict.fromkeys(wrong))
        more = f", and {len(kinds) - SHOWN} pairs more" if len(kinds) > SHOWN else ""
        raise WrongError("; ".join(kinds[:SHOWN]) + more)
    pairs = mesh.size * (size - 1)
    return f"{pairs:,} pairs of devices, {REPEATS} times {' and '.join(map(str, WIDTHS))} numbers"


def _operand(mesh: Mesh, axes: Axes, width: int) -> tuple[jax.Array, np.ndarray]:
    """Returns the rows that devices (Q) send to peers (P), and the senders to each device.

    Returns:
      `x_QPW`, on the mesh; and `senders_QP`: the devices whose rows device q receives.
    """
    shape = mesh.devices.shape
    place_Q = np.stack(np.unravel_index(np.arange(mesh.size), shape), axis=1)
    dims = [mesh.axis_names.index(axis) for axis in axes]
    peers = [shape[dim] for dim in dims]
    count = math.prod(peers)
    senders_QP = np.empty((mesh.size, count), np.int64)
    for peer in range(count):
        place = place_Q.copy()
        place[:, dims] = np.unravel_index(peer, peers)
        senders_QP[:, peer] = np.ravel_multi_index(tuple(place.T), shape)

    def of(index: Any) -> np.ndarray:
        devices = range(mesh.size)[index[0]]
        rows = [[numbers(q, peer, width) for peer in range(count)] for q in devices]
        return np.asarray(rows, np.uint32)

    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size, count, width), sharding, of), senders_QP


def numbers(sender: int, peer: int, width: int) -> np.ndarray:
    """Returns the numbers that a device sends to a peer; they differ by sender, peer, place."""
    first = (sender * 0x9E3779B1 + peer * 0x85EBCA77) & 0xFFFFFFFF
    return (first + np.arange(width, dtype=np.uint64) * 0xC2B2AE3D).astype(np.uint32)


def _wrong_pairs(y_QPW: jax.Array, senders_QP: np.ndarray, mesh: Mesh, axes: Axes) -> Iterator[str]:
    """Yields a text for each device of this process and sender whose numbers arrived changed."""
    devices = list(mesh.devices.flat)
    for shard in y_QPW.addressable_shards:
        receiver = shard.index[0].start or 0
        got_PW = np.asarray(shard.data)[0]
        place = list(senders_QP[receiver]).index(receiver)
        for sender, got in zip(senders_QP[receiver], got_PW, strict=True):
            if not np.array_equal(got, numbers(int(sender), place, got.size)):
                a, b = (devices[q] for q in (sender, receiver))
                yield (
                    f"device {a.id} of process {a.process_index} to device {b.id} of process "
                    f"{b.process_index}: other numbers than were sent"
                )


def measure_exchange(watch: Stopwatch, axis: str) -> str:
    """Times an all-to-all along an axis of the stopwatch's mesh; returns the rate in words.

    The rate counts the bytes that a device sends: median and range of the rounds.
    """
    count = watch.mesh.shape[axis]
    rounds: list[float] = []
    sent = 0
    for size in SIZES:
        operate, start, sent = collective("all_to_all", axis, size, count)
        rounds = [one for (one,) in watch.in_turns([(operate, start)], AIM_S)]
        if statistics.median(rounds) > ENOUGH_S:
            break
    middle = statistics.median(rounds)
    most, usual, least = (sent / seconds / 1e9 for seconds in (min(rounds), middle, max(rounds)))
    return (
        f"{usual:.3g} GB/s a device ({least:.3g} to {most:.3g} in {len(rounds)} rounds), "
        f"{sent:,} bytes in {middle * 1e3:.2f} ms"
    )


def differing(values: list[dict[str, Any]]) -> str | None:
    """Describes the processes whose values differ from process 0's; None if there are none."""
    found = []
    for number, own in enumerate(values):
        for name in dict.fromkeys((*values[0], *own)):
            theirs, first = own.get(name, "none"), values[0].get(name, "none")
            if theirs != first:
                found.append(f"process {number} has {name} {theirs}, process 0 has {first}")
    more = f", and {len(found) - SHOWN} differences more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more if found else None
