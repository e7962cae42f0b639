"""The codecs of each step of a run, and the compiled step for each choice."""

from typing import Any

import jax

from moejax.config.compression import NO_COMPRESSION, Codecs, describe_codecs
from moejax.runtime.processes import Processes
from moejax.runtime.watch import Watch
from moejax.step.train_step import TrainStep


class CodecSchedule:
    """The compiled steps of a run, one for each choice of codecs."""

    def __init__(self, train_step: TrainStep, processes: Processes, watch: Watch):
        self._train_step, self._processes, self._watch = train_step, processes, watch
        self._policy = train_step.spec.compression
        self._steps: dict[Codecs, Any] = {}
        self._compiled: jax.stages.Compiled | None = None

    def step_for(self, step: int) -> tuple[Any, str]:
        """Returns the jitted train step after `step` steps, and its codecs as text (or empty).

        Compiles the step first if its codecs are new.
        """
        codecs = self._policy.at(step)
        if codecs not in self._steps:
            train_step = self._train_step.at(codecs)
            shapes = train_step.abstract, train_step.abstract_batch()
            with self._watch.during("compile", step):
                self._compiled = self._processes.compile(train_step.step, *shapes)
            self._steps[codecs] = train_step.step
        text = describe_codecs(codecs) if self._policy != NO_COMPRESSION else ""
        return self._steps[codecs], text

    def program(self) -> str:
        """Returns the text of the step that was compiled last."""
        assert self._compiled is not None, "no step was compiled yet"
        return self._compiled.as_text() or ""
