"""Training from Python, as in a notebook."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moejax.config.load import load_config, override
from moejax.config.schema import Config
from moejax.report.runs import Column, read_run
from moejax.screen import screen
from moejax.step.state import TrainState
from moejax.train.loop import train


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended.

    Attributes:
      state: the last train state; None if the run had reached its end before.
      stopped: whether it was asked to stop before its last step.
      run_dir: the directory of its checkpoints and records.
      metrics: name -> steps and values, over all its starts; docs/formats/metrics.md lists them.
    """

    state: TrainState | None
    stopped: bool
    run_dir: Path
    metrics: dict[str, Column]


def run_training(
    config: Config | str | os.PathLike[str], overrides: Iterable[str] = (), *, quiet: bool = False
) -> TrainedRun:
    """Trains or resumes as `moejax train` does, and returns the ended run.

        run = moejax.run_training("tiny", ["train.num_steps=50", "run_dir=runs/first"])
        run.metrics["loss"].values[-1]

    Args:
      config: a config, a file, or the name of a config that comes with moejax.
      overrides: as `train.num_steps=5`; later ones win.
      quiet: whether to print nothing.

    Raises:
      InputError: for anything the user can fix.
      RunError: if the run could not reach its end.
    """
    if isinstance(config, Config):
        cfg = override(config, overrides)
    else:
        cfg = load_config(config, overrides)
    ended = train(cfg, screen(quiet=quiet))
    run_dir = Path(cfg.run_dir)
    return TrainedRun(ended.state, ended.stopped, run_dir, read_run(run_dir, run_dir.name).columns)
