"""Train steps for described accelerators, each built and compiled once in a process."""

import functools
from pathlib import Path

from moejax.aot.step import CONTROLS, build_described, compile_step, described_config
from moejax.aot.target import TARGETS
from moejax.config.load import load_config
from moejax.runtime.compiler import Options

CONFIGS = Path(__file__).parents[2] / "configs"
# conftest asks LLVM for little. ptxas then gets three times as much to do.
OPTIMIZE: Options = {"xla_backend_optimization_level": 3}


@functools.cache
def described_step(config, nodes, settings, kind="h200"):
    """The trainer of a config file on so many nodes, in one micro-batch, with other settings."""
    words = [f"--config.{word}" for word in ("train.micro_batches=1", *settings)]
    cfg = load_config(str(CONFIGS / config), words)
    return build_described(described_config(cfg, TARGETS[kind], nodes), TARGETS[kind])


@functools.cache
def compiled_step(config, nodes, settings, control=None):
    """Its step; control: of `CONTROLS`, the compiler options that are tried instead."""
    train_step = described_step(config, nodes, settings)
    return compile_step(train_step, OPTIMIZE | CONTROLS["gpu"].get(control, {}))
