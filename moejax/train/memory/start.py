"""Copies in memory in the order of a run: a step is found at its start, then steps are saved."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from moejax.checkpoint.compatible import check_same_base, describe_run, resume_notes
from moejax.checkpoint.find import Saved
from moejax.checkpoint.restore import Resumed
from moejax.checkpoint.writer import arrays_of
from moejax.config.schema import Config
from moejax.data.skipped import SkippedData
from moejax.data.sources import Content
from moejax.errors import InputError
from moejax.runtime.processes import Processes
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.memory.checkpoints import MemoryCheckpoints
from moejax.train.memory.find import IntactStep, find, remove_damaged
from moejax.train.memory.members import Members, open_members
from moejax.train.memory.restore import read_state
from moejax.train.records.skipped_data import ENTRY, to_json


class Memory:
    """The copies that hosts hold of a run at its start; none without `checkpoint.memory_every`.

    Attributes:
      found: the newest step that may be resumed; None without one.
      notes: about steps with missing or damaged parts.
    """

    def __init__(self, cfg: Config, processes: Processes, saved: Saved | None):
        """Looks for a step that is newer than the checkpoint `saved`. Touches no device.

        Raises:
          InputError: in all processes, if state cannot be kept in memory.
        """
        self._newer_than = 0 if saved is None else saved.step
        self._held_slot: int | None = None
        self._members: Members | None = None
        self.found: IntactStep | None = None
        self.notes: list[str] = []
        if cfg.checkpoint.memory_every is not None:
            self._members = open_members(cfg, processes)
            self.found, self.notes = find(self._members, self._newer_than)

    def resume(
        self,
        train_step: TrainStep,
        content: Content,
        skipped: Sequence[SkippedData],
        base: dict[str, str] | None,
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> Resumed | None:
        """Returns the state of the newest step in memory that fits this run; None without one.

        A step that cannot be taken is passed over with a note, and an older one is tried.

        Args:
          base: path and digest of the frozen weights of a run with adapters.
          say: takes the line that names the step, before it is read.
        """
        passed_over: list[tuple[int, str]] = []
        while self._members is not None and (found := self.found) is not None:
            unfit = _unfit(found, train_step.cfg, content, base, note)
            if found.facts[ENTRY] != to_json(skipped):
                unfit = "the run went back to before it"
            if unfit is not None:
                passed_over.append((found.step, found.start_id))
            else:
                say(f"resuming at step {found.step} from the memory of hosts")
                state, unfit = read_state(found, train_step, self._members)
                if state is not None:
                    self._held_slot = int(found.held[0].name[-1])  # in each process: 0 or 1
                    return Resumed(_with_reduction(state, train_step, found, note), found.facts)
                for one in found.held:
                    if one.holder == self._members.processes.index:
                        remove_damaged(self._members, one.name, unfit)
            note(f"step {found.step} in memory is not taken: {unfit}")
            self.found, notes = find(self._members, self._newer_than, passed_over)
            for text in notes:
                note(text)
        return None

    def begin_saves(
        self,
        train_step: TrainStep,
        content: Content,
        base: dict[str, str] | None,
        on_event: Callable[..., None],
        warn: Callable[[str], None],
    ) -> MemoryCheckpoints | None:
        """Returns the saver of later states; None without `checkpoint.memory_every`. All call it.

        Args:
          on_event: takes a name, a step and values of each event.
          warn: takes a warning, once, if a step could not be kept.

        Raises:
          InputError: in all processes, if a host has no room.
        """
        if self._members is None:
            return None
        warned = False

        def record(event: str, step: int, **values: Any) -> None:
            nonlocal warned
            on_event(event, step, **values)
            if event == "memory_failed" and not warned:
                warned = True
                warn(f"warning: step {step} is not kept in memory: {values['text']}")

        facts = {**describe_run(train_step, content, base), "jax": jax.__version__}
        arrays = arrays_of(train_step.abstract)
        return MemoryCheckpoints(self._members, arrays, facts, record, held=self._held_slot)


def _unfit(
    found: IntactStep,
    cfg: Config,
    content: Content,
    base: dict[str, str] | None,
    note: Callable[[str], None],
) -> str | None:
    """Returns why a step does not fit this run, checked as a checkpoint is; None if it does."""
    try:
        for text in resume_notes(found.facts, cfg, content, step=found.step):
            note(text)
        if base is not None:
            check_same_base(found.facts, base)
    except InputError as error:
        return str(error)
    return None


def _with_reduction(
    state: TrainState, train_step: TrainStep, found: IntactStep, note: Callable[[str], None]
) -> TrainState:
    if state.reduction is not None:
        return state
    if any(key.startswith("reduction/") for key in found.kinds):
        note(
            "warning: mesh or compression differ from those of the step in memory: the codecs' "
            "state is dropped"
        )
    return state._replace(reduction=train_step.first_reduction())
