"""Finds the newest step that is whole in the hosts' memory.

Every process reads a share of its host's slots. All of them exchange their findings, so they come
to the same result. Touches no device.
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
)


class IntactSlot(NamedTuple):
    """A slot that is as it was written.

    Attributes:
      holder: a process of the host with the slot.
      name: of the slot.
      process: the process whose pieces it holds.
      rooms: its pieces, and where each begins, in bytes.
      sums: that process's part of the digests of numbers.
    """

    holder: int
    name: str
    process: int
    rooms: list[tuple[Piece, int]]
    sums: Mapping[str, Any]


class IntactStep(NamedTuple):
    """A step with all of its parts.

    Attributes:
      start_id: of the start that saved it.
      held: the slots that hold it.
      kinds: shape and dtype of each array of the state, by key.
      facts: entries of a manifest about the run.
    """

    step: int
    start_id: str
    held: list[IntactSlot]
    kinds: dict[str, list[Any]]
    facts: dict[str, Any]


def find(
    members: Members, newer_than: int, passed_over: Collection[tuple[int, str]] = ()
) -> tuple[IntactStep | None, list[str]]:
    """Returns the newest intact step after `newer_than`, and notes about steps with missing parts.

    Slots that are damaged, or of another run, are removed. All processes call it and get the same.

    Args:
      passed_over: (step, identity of the start that saved it) of steps to leave out.
    """
    own, notes = _survey(members)
    listed = [
        [name, record["begun"], record["step"], record["process"], record["processes"]]
        for name, record in own.items()
    ]
    everywhere = members.processes.gather([listed, notes])
    all_notes = [note for _, there in everywhere for note in there]
    steps: dict[tuple[int, str], int] = {}
    for known, _ in everywhere:
        steps |= {
            (step, start_id): count for _, start_id, step, _, count in known if step > newer_than
        }
    for (step, start_id), count in sorted(steps.items(), reverse=True):
        if (step, start_id) in passed_over:
            continue
        found, missing, damaged = _whole(members, own, step, start_id, count)
        all_notes += damaged
        if found is not None:
            return found, all_notes
        all_notes.append(f"step {step} in memory is not whole: {missing}")
    return None, all_notes


def _survey(members: Members) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns the records of this process's share of its host's slots, by name, and notes."""
    records, notes = {}, []
    turn, count = members.turn
    for name in names_in(members.folder):
        # By the writer in its name, not by position in the list: others remove slots meanwhile.
        if int(name.partition("-")[0]) % count != turn:
            continue
        try:
            record = read_record(members.folder, name)
            if record["run"] == members.run:
                records[name] = record
            else:
                discard(members.folder, name)
        except SlotError as error:
            notes += remove_damaged(members, name, str(error))
    return records, notes


def remove_damaged(members: Members, name: str, damage: str) -> list[str]:
    """Removes a slot that is damaged. Returns a note about it."""
    discard(members.folder, name)
    return [f"copy in memory {members.folder / name} removed: {damage}"]


def _whole(
    members: Members, own: Mapping[str, dict[str, Any]], step: int, start_id: str, count: int
) -> tuple[IntactStep | None, str, list[str]]:
    """Returns a step if all parts are there, else a missing part in words; and notes.

    Args:
      own: records of this process's share of the slots.
      count: number of processes that saved the step.
    """
    intact, notes = [], []
    for name, record in own.items():
        if (record["step"], record["begun"]) == (step, start_id):
            try:
                check_slot(members.folder, name, record)
            except SlotError as error:
                notes += remove_damaged(members, name, str(error))
            else:
                facts = record["facts"] if record["process"] == 0 else None
                one = [name, record["process"], record["pieces"], record["sums"]]
                intact.append([*one, record["arrays"], facts])
    everywhere = members.processes.gather([intact, notes])
    notes = [note for _, there in everywhere for note in there]
    held, kinds, facts = [], {}, {}
    for holder, (slots, _) in enumerate(everywhere):
        for name, process, pieces, sums, arrays, about in slots:
            held.append(IntactSlot(holder, name, process, pieces_of({"pieces": pieces}), sums))
            kinds, facts = arrays, about or facts
    missing = _missing(held, kinds, count)
    if missing is not None:
        return None, missing, notes
    return IntactStep(step, start_id, held, kinds, facts), "", notes


def _missing(held: Sequence[IntactSlot], kinds: Mapping[str, Any], count: int) -> str | None:
    """Returns a part that no host holds, in words; None if no part is missing.

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
