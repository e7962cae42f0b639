"""Assigns each shard of the state to a process that keeps it, and some to the next host as well.

Every host keeps each shard that its devices hold, once. A shard that lies on one host alone also
goes to the next host. So each shard lies on two hosts, and if one host vanishes the others hold the
whole state.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Piece(NamedTuple):
    """A shard of an array: the array's key, where the shard starts, its shape and its dtype."""

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Share(NamedTuple):
    """The pieces that one process keeps.

    Attributes:
      sent: pieces that lie on its host alone, and go to the next host.
      kept: its other pieces, which lie on another host as well.
    """

    sent: tuple[Piece, ...]
    kept: tuple[Piece, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, the sent ones first."""
        return self.sent + self.kept


def holders_of(arrays: Mapping[str, Any]) -> dict[Piece, frozenset[int]]:
    """Returns the pieces of arrays, or of their shapes with shardings, and the holders of each.

    Pieces of one array are equal or disjoint, and cover it.
    """
    found: dict[Piece, set[int]] = {}
    for key, x in arrays.items():
        shape, dtype = x.sharding.shard_shape(x.shape), np.dtype(x.dtype).name
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            piece = Piece(key, start_of(index), shape, dtype)
            found.setdefault(piece, set()).add(device.process_index)
    return {piece: frozenset(processes) for piece, processes in found.items()}


def start_of(index: tuple[slice, ...]) -> tuple[int, ...]:
    """Returns where a shard starts along each dimension."""
    return tuple(part.start or 0 for part in index)


def place(holders: Mapping[Piece, frozenset[int]], hosts: Sequence[str]) -> list[Share]:
    """Returns the share of each process; a pure function, the same in all processes.

    On each host, of the processes that hold a piece, the one with the fewest bytes so far keeps it.
    """
    sent: list[list[Piece]] = [[] for _ in hosts]
    kept: list[list[Piece]] = [[] for _ in hosts]
    load = [0] * len(hosts)
    several = len(set(hosts)) > 1
    for piece in sorted(holders, key=lambda piece: (-piece.nbytes, piece)):
        here: dict[str, list[int]] = {}
        for process in sorted(holders[piece]):
            here.setdefault(hosts[process], []).append(process)
        target = sent if several and len(here) == 1 else kept
        for processes in here.values():
            keeper = min(processes, key=lambda process: load[process])
            load[keeper] += piece.nbytes
            target[keeper].append(piece)
    return [Share(tuple(one), tuple(other)) for one, other in zip(sent, kept, strict=True)]


def neighbours(hosts: Sequence[str]) -> list[int | None]:
    """Returns the process on the next host to which each process sends; None on a single host.

    The processes of a host spread over those of the next one.
    """
    members: dict[str, list[int]] = {}
    for process, host in enumerate(hosts):
        members.setdefault(host, []).append(process)
    if len(members) == 1:
        return [None] * len(hosts)
    order = list(members)
    after = dict(zip(order, order[1:] + order[:1], strict=True))
    targets = []
    for process, host in enumerate(hosts):
        there = members[after[host]]
        targets.append(there[members[host].index(process) % len(there)])
    return targets


def offsets_of(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """Returns where each piece begins in a slot, at multiples of 64 bytes, and the slot's size."""
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += -(-piece.nbytes // 64) * 64
    return offsets, at
