"""Finds the newest step that is whole in the memory of the hosts that are there.

Every process looks at a share of its host's slots, and all of them exchange what they found, so
that they come to the same result. Touches no device.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from moejax.train.memory.members import Members
from moejax.train.memory.placement import Piece
from moejax.train.memory.slots import (
    SlotError,
    check_slot,
    discard,
    names_in,
    pieces_of,
    read_record,
    writer_of,
)


class Held(NamedTuple):
    """A slot that is as it was written.

    Attributes:
      holder: a process of the host that it lies on.
      name: of the slot.
      process: which process wrote what is in it.
      rooms: its pieces, and where each begins.
      sums: that process's part of the digests of numbers.
    """

    holder: int
    name: str
    process: int
    rooms: list[tuple[Piece, int]]
    sums: Mapping[str, Any]


class Found(NamedTuple):
    """A step that is whole.

    Attributes:
      begun: the start that saved it.
      kinds: shape and dtype of each array of the state, by key.
      facts: entries of a manifest about the run.
    """

    step: int
    begun: str
    held: list[Held]
    kinds: dict[str, list[Any]]
    facts: dict[str, Any]

    @property
    def slot(self) -> int:
        """Which of the two slots of each process it lies in."""
        return int(self.held[0].name[-1])


def find(
    members: Members, newer_than: int, passed_over: Collection[tuple[int, str]] = ()
) -> tuple[Found | None, list[str]]:
    """Returns the newest whole step after `newer_than`, and notes about steps that are not whole.

    Slots that are damaged, or of another run, are removed. All processes call it, and return the
    same.

    Args:
      passed_over: (step, start that saved it) of steps that are not taken.
    """
    own, notes = _survey(members)
    listed = [
        [name, record["begun"], record["step"], record["process"], record["processes"]]
        for name, record in own.items()
    ]
    everywhere = members.processes.gather([listed, notes])
    told = [note for _, there in everywhere for note in there]
    steps: dict[tuple[int, str], int] = {}
    for known, _ in everywhere:
        steps |= {(step, begun): count for _, begun, step, _, count in known if step > newer_than}
    for (step, begun), count in sorted(steps.items(), reverse=True):
        if (step, begun) in passed_over:
            continue
        found, missing, damaged = _whole(members, own, step, begun, count)
        told += damaged
        if found is not None:
            return found, told
        told.append(f"step {step} in memory is not whole: {missing}")
    return None, told


def _survey(members: Members) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns the records of this process's share of its host's slots, by name, and notes."""
    records, notes = {}, []
    turn, count = members.turn
    for name in names_in(members.folder):
        # By name, not by place in the list: others remove slots from it meanwhile.
        if writer_of(name) % count != turn:
            continue
        try:
            record = read_record(members.folder, name)
            if record["run"] == members.run:
                records[name] = record
            else:
                discard(members.folder, name)
        except SlotError as error:
            notes += set_aside(members, name, str(error))
    return records, notes


def set_aside(members: Members, name: str, damage: str) -> list[str]:
    """Removes a slot that is not as it was written. Returns the note."""
    discard(members.folder, name)
    return [f"copy in memory {members.folder / name} removed: {damage}"]


def _whole(
    members: Members, own: Mapping[str, dict[str, Any]], step: int, begun: str, count: int
) -> tuple[Found | None, str, list[str]]:
    """Returns a step if all of it is there, else what is missing; and notes of damaged slots.

    Args:
      own: records of this process's share of the slots.
      count: how many processes saved the step.
    """
    intact, notes = [], []
    for name, record in own.items():
        if (record["step"], record["begun"]) == (step, begun):
            try:
                check_slot(members.folder, name, record)
            except SlotError as error:
                notes += set_aside(members, name, str(error))
            else:
                facts = record["facts"] if record["process"] == 0 else None
                one = [name, record["process"], record["pieces"], record["sums"]]
                intact.append([*one, record["arrays"], facts])
    everywhere = members.processes.gather([intact, notes])
    notes = [note for _, there in everywhere for note in there]
    held, kinds, facts = [], {}, {}
    for holder, (slots, _) in enumerate(everywhere):
        for name, process, pieces, sums, arrays, about in slots:
            held.append(Held(holder, name, process, pieces_of({"pieces": pieces}), sums))
            kinds, facts = arrays, about or facts
    missing = _missing(held, kinds, count)
    if missing is not None:
        return None, missing, notes
    return Found(step, begun, held, kinds, facts), "", notes


def _missing(held: Sequence[Held], kinds: Mapping[str, Any], count: int) -> str | None:
    """Returns what no host holds, in words; None if all is there.

    Pieces of one save are equal or disjoint, so their numbers say whether they cover an array.
    """
    gone = sorted(set(range(count)) - {one.process for one in held})
    if gone:
        return f"no host holds what process {gone[0]} of {count} saved"
    covered: dict[str, int] = dict.fromkeys(kinds, 0)
    for piece in {piece for one in held for piece, _ in one.rooms}:
        covered[piece.key] += math.prod(piece.shape)
    for key, (shape, _) in kinds.items():
        if covered[key] != math.prod(shape):
            return f"no host holds a part of {key}"
    return None
