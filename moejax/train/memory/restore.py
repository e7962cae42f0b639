"""Reads a step from the memory of hosts onto the devices of any mesh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moejax.checkpoint.compatible import same_reduction
from moejax.checkpoint.digests import together
from moejax.checkpoint.verify import wrong_numbers
from moejax.checkpoint.writer import arrays_of, state_of
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.memory.exchange import LocalSlot, RemoteSlot
from moejax.train.memory.find import IntactSlot, IntactStep
from moejax.train.memory.members import Members
from moejax.train.memory.placement import Piece, start_of

Source = tuple[IntactSlot, int]  # a slot, and a piece's position in its record


def read_state(
    found: IntactStep, train_step: TrainStep, members: Members
) -> tuple[TrainState | None, str]:
    """Returns the state with the shardings of this run, else the reason why it cannot be taken.

    The codecs' state is None if it is not valid for this run. All processes call it and get the
    same result.
    """
    valid = same_reduction(found.facts, train_step)
    abstract = {
        key: x
        for key, x in arrays_of(train_step.abstract).items()
        if valid or not key.startswith("reduction/")
    }
    for key, x in abstract.items():
        if found.kinds.get(key) != [list(x.shape), x.dtype.name]:
            return None, f"{key} has another shape"
    arrays, error = _read(found, abstract, members)
    errors = members.processes.gather(error)
    if failed := [f"process {n}: {text}" for n, text in enumerate(errors) if text is not None]:
        return None, failed[0]
    sums = together({one.process: one.sums for one in found.held}.values())
    known = {"arrays": {key: digests.to_json() for key, digests in sums.items()}}
    wrong = wrong_numbers(known, arrays, members.processes)
    if wrong is not None:
        jax.tree.map(lambda x: x.delete(), arrays)
        return None, f"its numbers are not those that were saved: {wrong}"
    return state_of(arrays, train_step.abstract, reduction=valid), ""


def _read(
    found: IntactStep, abstract: Mapping[str, Any], members: Members
) -> tuple[dict[str, jax.Array], str | None]:
    """Returns the arrays, or this process's error in words."""
    reader = _Reader(found, members)
    try:
        return {key: reader.array(key, x) for key, x in abstract.items()}, None
    except Exception as error:  # of a file or another host: another step is tried
        return {}, f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        reader.close()


class _Reader:
    """Reads parts of arrays from the slots of this host, else from another host's."""

    def __init__(self, found: IntactStep, members: Members):
        self._members, self._beside = members, members.beside
        self._local: dict[str, LocalSlot] = {}
        self._remote: dict[tuple[int, str], RemoteSlot] = {}
        self._sources: dict[str, dict[Piece, Source]] = {}
        for one in found.held:
            for number, (piece, _) in enumerate(one.rooms):
                known = self._sources.setdefault(piece.key, {})
                # A copy on this host is preferred.
                if piece not in known or one.holder in self._beside:
                    known[piece] = one, number

    def close(self) -> None:
        """Ends the connections to other hosts."""
        for slot in self._remote.values():
            slot.close()

    def array(self, key: str, like: Any) -> jax.Array:
        """Returns an array as it was saved, with the sharding of `like`."""
        shape, parts = tuple(like.shape), {}
        shard = like.sharding.shard_shape(shape)
        for index in like.sharding.addressable_devices_indices_map(shape).values():
            start = start_of(index)
            if start not in parts:
                parts[start] = self._part(key, start, np.empty(shard, like.dtype))
        return jax.make_array_from_callback(
            shape, like.sharding, lambda index: parts[start_of(index or ())]
        )

    def _part(self, key: str, start: tuple[int, ...], out: np.ndarray) -> np.ndarray:
        """Fills a part of an array from the pieces that overlap it."""
        filled = 0
        for piece, (one, number) in self._sources[key].items():
            met = overlap(start, out.shape, piece)
            if met is None:
                continue
            begin, size = met
            box = self._box(one, number, piece, begin, size)
            inside = tuple(
                slice(a - of, a - of + n) for a, of, n in zip(begin, start, size, strict=True)
            )
            out[inside] = box
            filled += box.size
        if filled != out.size:
            raise ValueError(f"copies in memory hold {filled:,} of {out.size:,} numbers of {key}")
        return out

    def _box(
        self,
        one: IntactSlot,
        number: int,
        piece: Piece,
        start: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> np.ndarray:
        members = self._members
        if one.holder in self._beside:
            if one.name not in self._local:
                self._local[one.name] = LocalSlot(members.folder, one.name)
            return self._local[one.name].read(number, start, shape)
        there = members.on_host_of(one.holder)  # they share the work
        at = (there[members.processes.index % len(there)], one.name)
        if at not in self._remote:
            self._remote[at] = RemoteSlot(members.addresses[at[0]], members.token, one.name)
        box = np.empty(shape, piece.dtype)
        self._remote[at].read(number, piece, start, box)
        return box


def overlap(
    start: Sequence[int], shape: Sequence[int], piece: Piece
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns start and shape of the overlap of a box and a piece; None if they have none."""
    begin = tuple(max(a, b) for a, b in zip(start, piece.start, strict=True))
    end = tuple(
        min(a + n, b + m) for a, n, b, m in zip(start, shape, piece.start, piece.shape, strict=True)
    )
    size = tuple(b - a for a, b in zip(begin, end, strict=True))
    return (begin, size) if min(size, default=1) > 0 and math.prod(size) else None
