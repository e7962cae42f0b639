"""Resumes a run from its newest checkpoint, with the checks that need devices.

A checkpoint with intact files may still hold another step or other numbers than the saved ones. It
is renamed to STEP.corrupt, and the step before it is tried.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from rich.console import Console

from moejax.checkpoint.compatible import same_reduction, sites_before
from moejax.checkpoint.find import Saved, quarantine
from moejax.checkpoint.verify import wrong_numbers
from moejax.checkpoint.writer import arrays_of, restore_state, step_of_state
from moejax.errors import InputError
from moejax.runtime.processes import Processes
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep


class Resumed(NamedTuple):
    """A state from which a run resumes, if there is one, and the entries of its manifest."""

    state: TrainState | None
    facts: Mapping[str, Any]


# Chooses among the remaining checkpoints. Returns one, a source of weights, and notes.
Choose = Callable[[], tuple[Saved | None, Any, list[str]]]


def quarantine_wrong_steps(
    saved: Saved | None, train_step: TrainStep, choose: Choose, processes: Processes
) -> tuple[Saved | None, list[str]]:
    """Sets aside checkpoints whose state has another step counter than their name.

    The state can be read only on devices, so this follows `choose_checkpoint`. Returns the
    checkpoint to resume.

    Raises:
      InputError: if none remains.
    """
    notes: list[str] = []
    while saved is not None and (step := step_of_state(saved, train_step.abstract)) != saved.step:
        notes += quarantine(saved.path, f"its state is of step {step}", processes)
        saved, _, more = choose()
        notes += more
    return saved, notes


def resume(
    train_step: TrainStep,
    saved: Saved | None,
    choose: Choose,
    processes: Processes,
    console: Console,
    note: Callable[[str], None],
) -> Resumed:
    """Returns the state of the newest checkpoint whose numbers equal the saved ones.

    It is None if `saved` is None. Runs before `Checkpoints` is built: its manager remembers the
    steps that it finds then.

    Args:
      note: called with a line about each checkpoint that was set aside.
    Raises:
      InputError: if none remains.
    """
    found_one = saved is not None
    while saved is not None:
        state = _read(train_step, saved, console)
        wrong = wrong_numbers(saved.manifest, arrays_of(state), processes)
        if wrong is None:
            if state.reduction is None:
                state = state._replace(reduction=train_step.first_reduction())
            if sites_before(saved.manifest, train_step) is not None:
                state = train_step.at_sites(state)
            return Resumed(state, saved.manifest)
        jax.tree.map(lambda x: x.delete(), state)
        notes = quarantine(
            saved.path, f"its numbers are not those that were saved: {wrong}", processes
        )
        saved, _, chosen = choose()
        saved, more = quarantine_wrong_steps(saved, train_step, choose, processes)
        for text in dict.fromkeys((*notes, *chosen, *more)):
            note(text)
    if found_one:
        raise InputError(
            "no checkpoint of the run is left: the numbers of all differ from the saved "
            "ones, so they were set aside. No run begins anew over them. Name another run_dir."
        )
    return Resumed(None, {})


def _read(train_step: TrainStep, saved: Saved, console: Console) -> TrainState:
    """Returns the state of a checkpoint; codec state only where it is still valid."""
    console.print(f"resuming at step {saved.step} from {saved.path}", soft_wrap=True)
    valid = same_reduction(saved.manifest, train_step)
    if not valid and any(name.startswith("reduction/") for name in saved.manifest["files"]):
        console.print(
            "warning: mesh or compression differ from the checkpoint's: the codecs' "
            "state is dropped",
            soft_wrap=True,
        )
    abstract = train_step.abstract
    if (before := sites_before(saved.manifest, train_step)) is not None:
        console.print(
            f"sites: the checkpoint's run had {before}, this one has {train_step.num_sites}. All "
            "begin at the outer weights, with the mean of the optimizers' moments",
            soft_wrap=True,
        )
        abstract = train_step.of_sites(before)
    return restore_state(saved, abstract, reduction=valid)
