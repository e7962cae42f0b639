"""Trains a small model some way, and records the experts that tokens of texts choose.

Letters: B rows of text, T bytes of a row, L layers, K experts of a token.
"""

import contextlib
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.skew.texts import OTHER, OWN, files_of, rows_of
from moejax.api import LiveRun, run_training
from moejax.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)
from moejax.convert.exporting import export_run
from moejax.convert.importing import import_folder
from moejax.serve.engine import Engine
from moejax.serve.samples import Sample


class _EnoughError(Exception):
    """All is recorded. A run that ends by itself would score all held-out text first."""


CALL = 64  # rows that an engine takes at once
# Runs are short, so the bias moves three times as fast as DeepSeek-V3's. Its loss of a sequence is
# a sum over expert layers.
BIAS_RATE, SEQUENCE_LOSS = 3e-3, 1e-4


@dataclass(frozen=True)
class Setup:
    """The model, its training, and how much of a text is recorded."""

    layers: int = 8
    width: int = 64
    experts: int = 32
    choices: int = 4
    hidden: int = 64
    length: int = 256
    batch: int = 8
    steps: int = 300
    recorded: tuple[int, ...] = (50, 100, 200, 300)
    rows: int = 288  # at the last step
    rows_before: int = 64  # at the others
    rows_other: int = 128  # of other texts, at the last step


@dataclass
class Recorded:
    """What a run's tokens chose.

    Attributes:
      choices: step -> experts [B, T, L, K] on held-out text of the kind it was trained on.
      other: kind of text -> the same at the last step.
      bits: step or kind of text -> bits per byte.
      samples: kind of text -> the first rows, as the engine returned them.
    """

    choices: dict[int, np.ndarray] = field(default_factory=dict)
    other: dict[str, np.ndarray] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)


def ways(layers: int) -> dict[str, RouterConfig]:
    """Returns the ways to balance."""
    return {
        "balance loss": RouterConfig(),
        "selection bias": RouterConfig("sigmoid", balance_loss=0.0, bias_update_rate=BIAS_RATE),
        "bias and sequence loss": RouterConfig(
            "sigmoid",
            balance_loss=SEQUENCE_LOSS * layers,
            balance_over="sequence",
            bias_update_rate=BIAS_RATE,
        ),
        "none": RouterConfig(balance_loss=0.0),
    }


def config_of(setup: Setup, router: RouterConfig) -> Config:
    """Returns the config of a run, which saves its end."""
    heads = setup.width // 32
    return Config(
        model=ModelConfig(
            vocab_size=264,
            width=setup.width,
            num_layers=setup.layers,
            num_heads=heads,
            num_kv_heads=heads // 2,
            head_width=32,
            qk_norm="full",  # so that each router has a family, which exports it
        ),
        moe=MoEConfig(
            num_experts=setup.experts,
            experts_per_token=setup.choices,
            expert_hidden=setup.hidden,
            router=router,
        ),
        data=DataConfig(sequence_length=setup.length),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=0.1),
        train=TrainConfig(
            num_steps=setup.steps,
            batch_sequences=setup.batch,
            log_every=50,
            eval_every=None,
            sample_tokens=0,
        ),
        checkpoint=CheckpointConfig(save_every=setup.steps),
    )


def read(engine: Engine, row_BT: np.ndarray) -> list[Sample]:
    """Returns what an engine tells of rows of text: experts and log probabilities."""
    found = []
    for first in range(0, len(row_BT), CALL):
        rows = [row.tolist() for row in row_BT[first : first + CALL]]
        found += engine.sample(rows, tokens=1, routing=True, prompt_logprobs=True)
    return found


def choices_of(samples: list[Sample]) -> np.ndarray:
    """Returns the experts of the samples' prompts, [B, T, L, K]."""
    parts = [sample.expert_TLK[: len(sample.prompt_ids)] for sample in samples]
    return np.stack(parts).astype(np.int16)


def bits_of(samples: list[Sample]) -> float:
    """Returns the bits of a byte behind a row's first."""
    return -float(np.mean([sample.prompt_logprobs for sample in samples])) / math.log(2)


def imported(folder: Path) -> Engine:
    """Returns the model at the end of the run in folder/run, exported and imported again."""
    export_run(folder / "run", folder / "exported", dtype="float32")
    import_folder(folder / "exported", folder / "imported")
    return Engine(folder / "imported")


def train(setup: Setup, router: RouterConfig, texts: dict[str, np.ndarray]) -> Recorded:
    """Trains a model, and records its choices at some steps, and as imported those of all texts."""
    recorded = Recorded()

    def record(run: LiveRun) -> None:
        if run.step not in setup.recorded:
            return
        if run.step == setup.steps:
            raise _EnoughError
        own = read(run.engine(), texts[OWN][: setup.rows_before])
        recorded.choices[run.step], recorded.bits[str(run.step)] = choices_of(own), bits_of(own)

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        settings = [f"run_dir={folder / 'run'}"]
        every = math.gcd(*setup.recorded)
        with contextlib.suppress(_EnoughError):
            cfg = config_of(setup, router)
            run_training(cfg, settings, quiet=True, on_step=record, every=every)
        engine = imported(folder)
        for kind, rows in texts.items():
            found = read(engine, rows)
            choices, bits = choices_of(found), bits_of(found)
            recorded.samples[kind] = found
            if kind == OWN:
                recorded.choices[setup.steps], recorded.bits[str(setup.steps)] = choices, bits
            else:
                recorded.other[kind], recorded.bits[kind] = choices, bits
    return recorded


def all_texts(setup: Setup) -> dict[str, Any]:
    """Returns the rows of every kind of text."""
    counts = {OWN: setup.rows} | dict.fromkeys(OTHER, setup.rows_other)
    return {kind: rows_of(files_of(kind), n, setup.length) for kind, n in counts.items()}
