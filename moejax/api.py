"""Training from Python, as in a notebook."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from moejax.config.load import load_config, override
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.report.runs import Column, read_run
from moejax.runtime.processes import ALONE, Processes
from moejax.screen import screen
from moejax.serve.engine import Engine
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.loop import train
from moejax.train.run import OnStep, Run


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended. `moejax.Engine(run)` is its model.

    Attributes:
      state: the last train state; None if the run had reached its end before.
      stopped: whether it was asked to stop before its last step.
      run_dir: the directory of its checkpoints and records.
      metrics: name -> steps and values, over all its starts; docs/formats/metrics.md lists them.
      train_step: the compiled functions that take the state; None without a state.
      processes: the program's.
    """

    state: TrainState | None
    stopped: bool
    run_dir: Path
    metrics: dict[str, Column]
    train_step: TrainStep | None = None
    processes: Processes = ALONE


@dataclass
class _Made:
    """The engine of a run, kept from call to call for its compiled functions."""

    run: Run | None = None
    engine: Engine | None = None


@dataclass(frozen=True)
class LiveRun:
    """A run between two of its steps, as `run_training` hands it to `on_step`.

    Attributes:
      step: optimizer steps that were done.
      state: the train state. The next step deletes its arrays, so nothing may keep them, and
        nothing may delete or donate them.
      run_dir: the directory of the run's checkpoints and records.
      train_step: the compiled functions that take the state, such as `evaluate`.
      processes: the program's. All of them make the same call.
    """

    step: int
    state: TrainState
    run_dir: Path
    train_step: TrainStep
    processes: Processes
    _made: _Made = field(default_factory=_Made, repr=False)

    def engine(self) -> Engine:
        """Returns the run's model with the weights of now, on the run's mesh.

        The first call describes it; what it compiles serves later calls too. When `on_step`
        returns, the engine gives up its copy of the weights: the next step needs the memory.

        Raises:
          InputError: if the copy does not fit beside the state.
        """
        if self._made.engine is None:
            self._made.engine = Engine(self)
        elif not self._made.engine.has_weights:
            self._made.engine.update(self.state)
        return self._made.engine


def run_training(
    config: Config | str | os.PathLike[str],
    overrides: Iterable[str] = (),
    *,
    quiet: bool = False,
    on_step: Callable[[LiveRun], object] | None = None,
    every: int = 100,
) -> TrainedRun:
    """Trains or resumes as `moejax train` does, and returns the ended run.

        run = moejax.run_training("tiny", ["train.num_steps=50", "run_dir=runs/first"])
        run.metrics["loss"].values[-1]

    Args:
      config: a config, a file, or the name of a config that comes with moejax.
      overrides: as `train.num_steps=5`; later ones win.
      quiet: whether to print nothing.
      on_step: called with the run between two steps, by all processes; the losses are the same, to
        the bit, with it and without. Its step was found good, and a checkpoint of the step is
        on its way if one is due. After a rollback a step may come once more. An error in it ends
        the run as any error does: the same call goes on from the newest checkpoint.
      every: steps between two calls of it, which come at multiples of this number.

    Raises:
      InputError: for anything the user can fix.
      RunError: if the run could not reach its end.
    """
    if every < 1:
        raise InputError(f"`every` is out of range. Got {every}. It is at least 1. Raise it.")
    if isinstance(config, Config):
        cfg = override(config, overrides)
    else:
        cfg = load_config(config, overrides)
    called = None if on_step is None else OnStep(_caller(on_step), every)
    ended = train(cfg, screen(quiet=quiet), called)
    run_dir = Path(cfg.run_dir)
    metrics = read_run(run_dir, run_dir.name).columns
    return TrainedRun(
        ended.state, ended.stopped, run_dir, metrics, ended.train_step, ended.processes
    )


def _caller(on_step: Callable[[LiveRun], object]) -> Callable[[Run, TrainState], None]:
    """Returns what the loop calls in place of the user's function."""
    made = _Made()

    def call(run: Run, state: TrainState) -> None:
        if made.run is not run:  # the first call, or hosts or plan have changed
            made.run, made.engine = run, None
        run_dir, step = Path(run.cfg.run_dir), int(state.step)
        on_step(LiveRun(step, state, run_dir, run.train_step, run.processes, made))
        if made.engine is not None:
            made.engine.release()

    return call
