"""Slots: files in memory that hold the pieces of one step, each with a record.

A slot is a file of fixed size that is mapped and reused, so that no page is made while a step
waits. Its record is written last and atomically, and removed before the slot is overwritten: a slot
without a record holds nothing. Format: docs/formats/memory.md.
"""

import hashlib
import json
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.checkpoint.manifest import digest_of
from moejax.train.memory.placement import Piece, start_of

FORMAT_VERSION = 1
NAMES = re.compile(r"(\d+)(-from-(\d+))?-([01])")
RECORD_BYTES = 1 << 28  # a record is no larger
CHUNK = 1 << 24  # bytes that are hashed or sent at once
AHEAD = 4  # pieces that travel from the devices while others are copied


class SlotError(Exception):
    """A slot or its record is not as it was written. The message says how."""


class Slot:
    """A slot that this process writes."""

    def __init__(self, folder: Path, name: str):
        """Takes its name, without suffix; touches no file."""
        self._data, self._record = _paths(folder, name)
        self.bytes = np.empty(0, np.uint8)  # the mapped file

    def prepare(self, size: int) -> None:
        """Reserves and maps its memory, unless that was done. A change of size loses the content.

        Raises:
          OSError: if there is no room.
        """
        if self.bytes.size == size and self._data.exists():
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(self._data, flags, 0o600)
        try:
            if os.fstat(opened).st_size != size:
                self.forget()
                os.ftruncate(opened, size)
            if size:
                # A page that is not reserved would end the process when memory is full.
                os.posix_fallocate(opened, 0, size)
                now = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                self.bytes = np.frombuffer(mmap.mmap(opened, size, flags=now), np.uint8)
        finally:
            os.close(opened)

    @property
    def stored(self) -> int:
        """The size of its file; 0 without one."""
        return self._data.stat().st_size if self._data.exists() else 0

    def forget(self) -> None:
        """Removes its record: its content is ignored from now on."""
        self._record.unlink(missing_ok=True)

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Writes its record atomically, after which others may read the slot."""
        beside = self._record.with_suffix(".partial")
        beside.write_text(json.dumps(sealed(facts)), encoding="utf-8")
        beside.rename(self._record)


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.slot", folder / f"{name}.json"


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with its format and its digest."""
    record = {"format_version": FORMAT_VERSION, **facts}
    return {**record, "digest": digest_of(json.loads(json.dumps(record)))}


def fill(slot: Slot, rooms: Sequence[tuple[Piece, int]], arrays: Mapping[str, jax.Array]) -> None:
    """Copies pieces from this process's devices into a slot.

    No view of the devices' memory outlives the call: with one the next step would copy its donated
    state.

    Args:
      rooms: pieces, and where each begins in the slot.
    """
    shards = {
        key: {start_of(shard.index): shard.data for shard in x.addressable_shards}
        for key, x in arrays.items()
    }
    ordered = [shards[piece.key][piece.start] for piece, _ in rooms]
    for shard in ordered[:AHEAD]:
        shard.copy_to_host_async()
    for number, (piece, offset) in enumerate(rooms):
        if number + AHEAD < len(ordered):
            ordered[number + AHEAD].copy_to_host_async()
        room = view_of(slot.bytes, piece, offset)
        np.copyto(room, np.asarray(ordered[number]))


def view_of(data: np.ndarray, piece: Piece, offset: int) -> np.ndarray:
    """Returns the numbers of a piece in the bytes of a slot, without copying."""
    return data[offset : offset + piece.nbytes].view(piece.dtype).reshape(piece.shape)


def sha256_of(data: np.ndarray) -> str:
    """Returns the digest of bytes."""
    return hashlib.sha256(memoryview(data)).hexdigest()


def names_of(process: int) -> list[str]:
    """Returns the names of the two slots of a process."""
    return [f"{process}-{slot}" for slot in (0, 1)]


def names_from(process: int, sender: int) -> list[str]:
    """Returns the names of the two slots that a process keeps for a process of another host."""
    return [f"{process}-from-{sender}-{slot}" for slot in (0, 1)]


def names_in(folder: Path) -> list[str]:
    """Returns the names of the slots that have a record."""
    names = (path.stem for path in folder.glob("*.json"))
    return sorted(name for name in names if NAMES.fullmatch(name))


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Returns the record of a slot.

    Raises:
      SlotError: if it is not as it was written.
    """
    path = _paths(folder, name)[1]
    try:
        if path.stat().st_size > RECORD_BYTES:
            raise SlotError(f"its record has more than {RECORD_BYTES:,} bytes")
        return check_record(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise SlotError(f"its record cannot be read: {error!r}") from error


def check_record(record: Any) -> dict[str, Any]:
    """Checks a record that was read, and returns it.

    Raises:
      SlotError: if it is not as it was written.
    """
    if not isinstance(record, dict):
        raise SlotError("its record is no object")
    if record.get("format_version") != FORMAT_VERSION:
        raise SlotError(f"its record has format {record.get('format_version')!r}")
    if record.get("digest") != digest_of(record):
        raise SlotError("its record has another digest")
    return record


def pieces_of(record: Mapping[str, Any]) -> list[tuple[Piece, int]]:
    """Returns the pieces that a record lists, and where each begins in the slot, in bytes."""
    return [
        (Piece(key, tuple(start), tuple(shape), dtype), offset)
        for key, start, shape, dtype, offset in record["pieces"]
    ]


def listed(rooms: Sequence[tuple[Piece, int]]) -> list[list[Any]]:
    """Returns pieces as a record lists them, the inverse of `pieces_of`."""
    return [[p.key, list(p.start), list(p.shape), p.dtype, offset] for p, offset in rooms]


def open_slot(folder: Path, name: str, record: Mapping[str, Any]) -> np.ndarray:
    """Returns the bytes of a slot, mapped to be read.

    Raises:
      SlotError: if it is missing or has another size.
    """
    path, size = _paths(folder, name)[0], record["bytes"]
    stored = path.stat().st_size if path.is_file() else None
    if stored is None or stored < size:
        raise SlotError(f"its file has {stored or 0:,} bytes, its record says {size:,}")
    if size == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r", shape=(size,))


def check_slot(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Raises SlotError if the bytes of a slot are not those of its record."""
    actual, expected = sha256_of(open_slot(folder, name, record)), record["sha256"]
    if actual != expected:
        raise SlotError(f"it has digest {actual[:12]}, its record says {expected[:12]}")


def discard(folder: Path, name: str) -> None:
    """Removes a slot and its record, the record first."""
    data, record = _paths(folder, name)
    record.unlink(missing_ok=True)
    data.unlink(missing_ok=True)


def discard_others(folder: Path, names: Sequence[str]) -> None:
    """Removes all slots but `names`: the others are of an earlier start."""
    for path in folder.iterdir():
        if path.stem not in names and NAMES.fullmatch(path.stem):
            discard(folder, path.stem)
