"""A run whose programs are Python functions: the loop and the evaluation without a compilation."""

import io
import math
from pathlib import Path

import numpy as np
from rich.console import Console

from moejax.checkpoint.writer import Checkpoints
from moejax.config.compression import NO_COMPRESSION
from moejax.config.schema import Config
from moejax.data.batches import Batches
from moejax.data.tokenizer import ByteTokenizer
from moejax.data.tokens import MemorySource
from moejax.step.state import Metrics, TrainState
from moejax.train.inputs import Inputs
from moejax.train.records.display import Display
from moejax.train.records.metrics import Meter, Records
from moejax.train.run import Run
from tests.cases import step_for

BAD = {"loss": math.nan, "norm": math.nan}  # what a step measures that is skipped


class FakeJitted:
    """Stands for a jitted function that is compiled before it is called."""

    def __init__(self, function):
        self.function = function

    def lower(self, *_):
        return self

    def compile(self):
        return self

    def __call__(self, state, batch):
        return self.function(state, batch)


class Saves(Checkpoints):
    """Checkpoints that are directories with an empty manifest."""

    def __init__(self, directory: Path):
        self.directory = directory

    def save(self, step, state, facts):
        (self.directory / str(step)).mkdir(parents=True)
        (self.directory / str(step) / "moejax_manifest.json").touch()

    def finished(self):
        return None

    def wait(self):
        return None

    @property
    def steps(self):
        return sorted(int(path.name) for path in self.directory.glob("*"))


def metrics(*, loss=1.0, norm=1.0, skipped=0, has_targets=None):
    """What a step gives, on the host."""
    return Metrics(
        np.float32(loss),
        np.float32(1),
        np.float32(1),
        np.zeros((0, 1), np.int32),
        np.zeros((0, 3), np.int32),
        np.float32(norm),
        np.int32(skipped),
        has_targets=has_targets,
    )


def initial_state(step=0, skipped=0):
    """A state of counters alone."""
    return TrainState(np.int32(step), np.int32(skipped), None, None, None, None)


def stream(length, num_bytes=None):
    """A stream of tokens that differ from their neighbours."""
    tokens = (np.arange(length) * 7 % 60).astype(np.uint32)
    return MemorySource(tokens, vocab_size=63, eos_id=62, target_bytes=num_bytes)


def build_run(cfg: Config, folder: Path, *, held_out=None, **programs):
    """A run on one device, and what it shows.

    Args:
      programs: functions (state, batch) in the place of the trainer's programs, by name.
    """
    train_step = step_for(cfg)
    assert train_step.spec.compression == NO_COMPRESSION
    for name, function in programs.items():
        train_step.__dict__[name] = FakeJitted(function)  # where a cached property keeps its value
    B, T = cfg.train.batch_sequences, cfg.data.sequence_length
    order = Batches(
        stream(40 * B * T),
        sequence_length=T,
        batch_sequences=B,
        seed=0,
        shuffle=True,
        repeat=True,
        isolate_documents=True,
    )
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=False)
    return Run(
        cfg,
        train_step,
        Inputs(cfg, order, held_out, ByteTokenizer(), 62),
        Saves(folder / "checkpoints"),
        Records(folder),
        Meter(
            tokens_per_step=1,
            flops_per_token=1,
            peak=1.0,
            num_steps=cfg.train.num_steps,
            schedule=lambda updates: 0.0,
        ),
        Display(console, cfg.train.num_steps, 0),
        console,
    ), shown
