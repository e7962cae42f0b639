"""Batches that a run leaves out for good: after it went back to a checkpoint.

A run that goes back to the state of an earlier step goes on with the batches behind those that made
its numbers bad. Which batch a step reads stays a pure function: of the step, and of a list of what
was left out, in the order in which it happened.
"""

from collections.abc import Sequence
from typing import NamedTuple


class SkippedData(NamedTuple):
    """Batches left out at once.

    Attributes:
      after_step: the step that the run went back to; the next step reads behind the batches.
      skip: how many batches.
    """

    after_step: int
    skip: int


def data_position(step: int, skipped: Sequence[SkippedData]) -> int:
    """Returns how many batches are read or left out once the step after `step` reads the next.

    This is the index of the next step's batch, counted from 0. What a run left out after a step no
    longer counts once it went back to before that step: the later entry covers it.
    """
    position, earliest = step, step
    for entry in reversed(skipped):
        if entry.after_step <= earliest:
            position, earliest = position + entry.skip, entry.after_step
    return position


def skip_to(after_step: int, last: int, skipped: Sequence[SkippedData]) -> list[SkippedData]:
    """Returns the longer list of a run that goes back from step `last` to `after_step`.

    The batches of the steps in between, as the run numbered them so far, are left out.
    """
    skip = data_position(last, skipped) - data_position(after_step, skipped)
    return [*skipped, SkippedData(after_step, skip)]
