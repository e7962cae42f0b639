"""Batches that a run leaves out for good, after it went back to a checkpoint.

A run that goes back to an earlier step goes on with the batches behind the ones that made its
numbers bad. The batch of a step stays a pure function of the step and of the list of batches left
out, in the order of these events.
"""

from collections.abc import Sequence
from typing import NamedTuple


class SkippedData(NamedTuple):
    """Batches left out at once.

    Attributes:
      after_step: the step that the run went back to; the next step reads behind these batches.
      skip: number of batches left out.
    """

    after_step: int
    skip: int


def data_position(step: int, skipped: Sequence[SkippedData]) -> int:
    """Returns the index of the batch that follows `step`, counted from 0.

    It is the number of batches read or left out so far. An entry no longer counts once the run went
    back to before its step: the later entry covers it.
    """
    position, earliest = step, step
    for entry in reversed(skipped):
        if entry.after_step <= earliest:
            position, earliest = position + entry.skip, entry.after_step
    return position


def skip_to(after_step: int, last: int, skipped: Sequence[SkippedData]) -> list[SkippedData]:
    """Returns the list, extended for a run that goes back from step `last` to `after_step`.

    The batches of the steps in between, as the run numbered them so far, are left out.
    """
    skip = data_position(last, skipped) - data_position(after_step, skipped)
    return [*skipped, SkippedData(after_step, skip)]
