"""The stretches of a run: codecs may change on the way, and each choice is a program of its own."""

from typing import Any

import numpy as np

from moejax.config.compression import NO_COMPRESSION, Codecs, describe
from moejax.runtime.processes import Processes
from moejax.step.state import TrainState
from moejax.step.trainer import Trainer


class Stretches:
    """The compiled steps of a run, one for each choice of codecs.

    Attributes:
      advance: the jitted step of where the run is.
    """

    advance: Any

    def __init__(self, trainer: Trainer, processes: Processes):
        self._trainer, self._processes = trainer, processes
        self._policy = trainer.program.compression
        self._steps: dict[Codecs, Any] = {}
        self._rungs: tuple[int, int] | None = None

    def go_to(self, step: int, state: TrainState) -> str:
        """Chooses what to do after `step` steps; compiles it first if it is new.

        Returns the codecs in words; nothing for a run without any.

        Args:
          state: after them. It is waited for where the step before it chose strengths.
        """
        every = self._policy.adapt_every
        if self._policy.adaptive and (self._rungs is None or (step - 1) % every == 0):
            dense, experts = map(int, np.asarray(state.reduction.rungs))
            self._rungs = dense, experts
        codecs = self._policy.at(step, self._rungs or (0, 0))
        if codecs not in self._steps:
            trainer = self._trainer.at(codecs)
            shapes = trainer.abstract, trainer.abstract_batch()
            self._processes.compile(trainer.step, *shapes)
            self._steps[codecs] = trainer.step
        self.advance = self._steps[codecs]
        return describe(codecs) if self._policy != NO_COMPRESSION else ""
