"""What the training loop costs over the bare compiled step, and how long a checkpoint stalls it.

One process, one compiled step. Rounds alternate between calling the step on a batch that is
already on the devices, and the loop of `moejax.train.loop` with data, metrics and progress. Then
the loop runs with a checkpoint every few steps; a stall is how much longer the interval that holds
a save takes than the median interval. Writes loop.json and loop.md.

    python -m benchmarks.cpu.loop --out benchmarks/results
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.machine import describe
from moejax.checkpoint.writer import Checkpoints
from moejax.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    TrainConfig,
)
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.screen import screen
from moejax.step.state import TrainState
from moejax.step.train_step import build_step
from moejax.train.inputs import open_inputs
from moejax.train.records.display import Display
from moejax.train.records.metrics import Meter, Records
from moejax.train.run import Run
from moejax.train.steps import run_steps

CFG = Config(
    model=ModelConfig(width=256, num_layers=4, num_heads=8, num_kv_heads=8, tie_embeddings=False),
    moe=MoEConfig(num_experts=8, experts_per_token=2, expert_hidden=512),
    data=DataConfig(sequence_length=256),
    train=TrainConfig(num_steps=1, batch_sequences=8, log_every=5, eval_every=None),
    checkpoint=CheckpointConfig(save_every=None, keep=2),
)


class Clock(Display):
    """A display that shows nothing and notes when each step ended."""

    def __init__(self) -> None:
        super().__init__(screen(quiet=True), 1, 0)
        self.ends: list[float] = []

    def step(self, step: int) -> None:
        """Called by the loop after each step."""
        self.ends.append(time.perf_counter())


def advance(run: Run, state: TrainState, count: int, save_every: int | None = None) -> TrainState:
    """Runs the loop for `count` more steps."""
    last = int(state.step) + count
    train = dataclasses.replace(CFG.train, num_steps=last)
    checkpoint = dataclasses.replace(CFG.checkpoint, save_every=save_every)
    run.cfg = dataclasses.replace(CFG, train=train, checkpoint=checkpoint)
    run.meter = new_meter(last)
    return run_steps(run, state)[0]


def new_meter(last: int) -> Meter:
    """Returns a meter of a run of `last` steps, whose clock has not started."""
    return Meter(
        tokens_per_step=2048, flops_per_token=1, peak=1.0, num_steps=last, schedule=lambda _: 0.0
    )


def bare(run: Run, state: TrainState, batch: object, count: int) -> TrainState:
    """Calls the compiled step `count` times."""
    for _ in range(count):
        state, metrics = run.train_step.step(state, batch)
        jax.block_until_ready(metrics.loss)
    return state


def measure(rounds: int, count: int, saves: int) -> dict:
    """Returns seconds a step of both sides by round, and the stall of each save."""
    devices = jax.devices()[:1]
    train_step = build_step(CFG, build_mesh(build_layout(CFG.mesh), devices), "cpu")
    with tempfile.TemporaryDirectory() as directory:
        inputs = open_inputs(CFG)
        records = Records(Path(directory))
        checkpoints = Checkpoints(Path(directory) / "checkpoints", keep=1)
        clock = Clock()
        run = Run(CFG, train_step, inputs, checkpoints, records, new_meter(1), clock, clock.console)
        state = train_step.init()
        with inputs.batches(train_step, 0, 1) as found:
            batch = next(iter(found))
        state = bare(run, state, batch, 3)
        sides: dict[str, list[float]] = {"bare": [], "loop": []}
        for turn in range(rounds):
            for side in sorted(sides, reverse=bool(turn % 2)):
                began = time.perf_counter()
                if side == "bare":
                    state = bare(run, state, batch, count)
                else:
                    # The last step's checkpoint is not the loop's cost: it is taken off below.
                    state = loop_without_save(run, state, count)
                sides[side].append((time.perf_counter() - began) / count)
        clock.ends.clear()
        every = 6
        state = advance(run, state, every * saves, save_every=every)
        checkpoints.close()
        records.close()
    gaps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    # The save after step k falls between the ends of steps k and k + 1.
    held = [gap for place, gap in enumerate(gaps, 1) if place % every == 0]
    median = statistics.median(gap for place, gap in enumerate(gaps, 1) if place % every)
    return {"seconds": sides, "step": median, "stalls": [gap - median for gap in held]}


def loop_without_save(run: Run, state: TrainState, count: int) -> TrainState:
    """Runs the loop's steps with a checkpointer that does nothing."""
    kept, run.checkpoints = run.checkpoints, NoCheckpoints()  # type: ignore[assignment]
    try:
        return advance(run, state, count)
    finally:
        run.checkpoints = kept


class NoCheckpoints:
    """Stands in for Checkpoints where their cost is not the question."""

    def save(self, *_: object) -> None:
        """Saves nothing."""

    def finished(self) -> None:
        """Nothing ever finishes."""

    def wait(self) -> None:
        """Nothing to wait for."""


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="steps of one turn")
    parser.add_argument("--saves", type=int, default=4)
    args = parser.parse_args()
    result = measure(args.rounds, args.steps, args.saves)
    pairs = zip(result["seconds"]["loop"], result["seconds"]["bare"], strict=True)
    ratios = sorted(loop / bare for loop, bare in pairs)
    result |= {"ratios": ratios, "machine": describe(sorted(os.sched_getaffinity(0)))}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "loop.json").write_text(json.dumps(result, indent=1) + "\n")
    worst, step = max(result["stalls"]), result["step"]
    text = (
        "# The loop over the bare step\n\n`python -m benchmarks.cpu.loop`\n\n"
        f"The loop takes **{statistics.median(ratios):.3f} x** the bare compiled step (median of "
        f"{len(ratios)} rounds in turns; range {ratios[0]:.3f} to {ratios[-1]:.3f}).\n\n"
        f"A checkpoint stalls the loop for {statistics.median(result['stalls']) / step:.2f} of a "
        f"step (median of {len(result['stalls'])} saves; worst {worst / step:.2f}).\n\n"
        f"Machine: {json.dumps(result['machine'])}\n"
    )
    (args.out / "loop.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
