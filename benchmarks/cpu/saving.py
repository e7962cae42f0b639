"""What a checkpoint costs a run: the stall of its step, the digests, and the hashing beside steps.

One process, one compiled step. Rounds alternate between intervals of steps with a save at their
begin and intervals without one, so that both sides meet the same machine; a save's cost is how much
longer its interval takes. Digests of numbers are timed beside SHA-256 of the same arrays on the
host, in turns. Writes saving.json and saving.md.

    python -m benchmarks.cpu.saving --out benchmarks/results
"""

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cpu.loop import CFG
from benchmarks.machine import describe
from moejax.checkpoint import writer as checkpoint
from moejax.checkpoint.digests import add_up, together
from moejax.checkpoint.manifest import hash_files, read_manifest
from moejax.checkpoint.writer import Checkpoints, arrays_of
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep, build_step
from moejax.train.inputs import open_inputs

Steps = Callable[[TrainState, int], tuple[TrainState, list[float]]]


def prepare() -> tuple[TrainStep, TrainState, Steps]:
    """Returns the compiled step, a state, and a function that runs steps and times each."""
    train_step = build_step(CFG, build_mesh(build_layout(CFG.mesh), jax.devices()[:1]), "cpu")
    inputs = open_inputs(CFG)
    with inputs.batches(train_step, 0, 1) as found:
        batch = next(iter(found))

    def steps(state: TrainState, count: int) -> tuple[TrainState, list[float]]:
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            state, metrics = train_step.step(state, batch)
            jax.block_until_ready(metrics.loss)
            seconds.append(time.perf_counter() - began)
        return state, seconds

    return train_step, steps(train_step.init(), 3)[0], steps


class Watched:
    """Notes how long what follows Orbax's commit takes, in its thread."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._commit = checkpoint.commit

    def __call__(self, *args: Any) -> None:
        """Stands for `commit`."""
        began = time.perf_counter()
        self._commit(*args)
        self.seconds.append(time.perf_counter() - began)


def measure_saves(
    steps: Steps, state: TrainState, directory: Path, rounds: int, count: int
) -> tuple[TrainState, dict[str, Any]]:
    """Returns seconds of intervals with and without a save, and of the parts of each save."""
    watched = Watched()
    checkpoint.commit = watched  # type: ignore[assignment]
    writer = Checkpoints(directory, keep=2)
    found: dict[str, list[Any]] = {"with": [], "without": [], "call": [], "in_background": []}
    began = time.perf_counter()
    writer.save(0, state, {})  # compiles what adds numbers up
    first = time.perf_counter() - began
    writer.wait()
    watched.seconds.clear()
    number = 0
    for turn in range(rounds):
        for side in sorted(("with", "without"), reverse=bool(turn % 2)):
            began = time.perf_counter()
            if side == "with":
                number += 1
                writer.save(number, state, {})
                found["call"].append(time.perf_counter() - began)
            state, _ = steps(state, count)
            found[side].append(time.perf_counter() - began)
            if side == "with":
                while writer.finished() is None:
                    state, _ = steps(state, 1)
                found["in_background"].append(time.perf_counter() - began)
    writer.close()
    return state, found | {"commit": watched.seconds, "steps": count, "first": first}


def measure_digests(state: TrainState, step: Path, rounds: int) -> dict[str, Any]:
    """Returns seconds of both kinds of digests of one state, in turns, and of its files."""
    arrays = arrays_of(state)
    together([add_up(arrays).here()])
    found: dict[str, list[float]] = {"on_devices": [], "dispatch": [], "sha256": [], "files": []}
    for _ in range(rounds):
        began = time.perf_counter()
        sums = add_up(arrays)
        found["dispatch"].append(time.perf_counter() - began)
        together([sums.here()])
        found["on_devices"].append(time.perf_counter() - began)
        began = time.perf_counter()
        for x in arrays.values():
            hashlib.sha256(np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8))
        found["sha256"].append(time.perf_counter() - began)
        began = time.perf_counter()
        hash_files(step)
        found["files"].append(time.perf_counter() - began)
    return found | {"bytes": sum(x.nbytes for x in arrays.values()), "arrays": len(arrays)}


def write_page(out: Path, saves: dict[str, Any], digests: dict[str, Any], load: float) -> None:
    """Writes the results as JSON and as a page."""
    plain, middle = saves["without"], statistics.median
    step = middle(plain) / saves["steps"]
    pairs = zip(saves["with"], plain, strict=True)
    stalls = sorted((held - free) / step for held, free in pairs)
    ratios = sorted(held / free for held, free in zip(saves["with"], plain, strict=True))
    machine = describe(sorted(os.sched_getaffinity(0)))
    result = {"saves": saves, "digests": digests, "machine": machine, "load": load}
    out.mkdir(parents=True, exist_ok=True)
    (out / "saving.json").write_text(json.dumps(result, indent=1) + "\n")
    call, device = saves["call"], middle(digests["on_devices"])
    speed = digests["bytes"] / device / 1e9
    slower = middle(a / b for a, b in zip(digests["sha256"], digests["on_devices"], strict=True))
    rows = {
        f"{saves['steps']} steps with a save at their begin, over as many without, in turns": (
            f"{middle(ratios):.3f} x (median of {len(ratios)}; {ratios[0]:.3f} to {ratios[-1]:.3f})"
        ),
        "the same as a stall, in steps": (
            f"{middle(stalls):.2f} ({stalls[0]:.2f} to {stalls[-1]:.2f})"
        ),
        "`save()` alone, in steps": f"{middle(call) / step:.2f} (worst {max(call) / step:.2f})",
        "of it the start of the digests of numbers": f"{middle(digests['dispatch']) / step:.3f}",
        "the first `save()` of a run, which compiles them": f"{saves['first']:.2f} s",
        "digests of numbers, of every layer and expert, until they are on the host": (
            f"{1e3 * device:.1f} ms, {device / step:.2f} of a step, {speed:.1f} GB/s"
        ),
        "SHA-256 of the same arrays on the host, one thread": (
            f"{1e3 * middle(digests['sha256']):.0f} ms, {slower:.1f} x as long"
        ),
        "in the background: SHA-256 of the files, four threads": (
            f"{1e3 * middle(digests['files']):.0f} ms"
        ),
        "in the background: all that follows Orbax's commit, beside steps": (
            f"{1e3 * middle(saves['commit']):.0f} ms"
        ),
        "from `save()` to a finished checkpoint, beside steps": (
            f"{middle(saves['in_background']):.2f} s"
        ),
    }
    table = "\n".join(f"| {question} | {answer} |" for question, answer in rows.items())
    text = (
        f"# What a checkpoint costs\n\n`python -m benchmarks.cpu.saving`\n\n"
        f"A state of {digests['bytes'] / 1e6:,.0f} MB in {digests['arrays']} arrays, one process, "
        f"a step of {1e3 * step:,.0f} ms. Load of the machine by others at the begin: {load:.1f}."
        f"\n\n| question | answer |\n|---|---|\n{table}\n\n"
        f"Machine: {json.dumps(machine)}\n"
    )
    (out / "saving.md").write_text(text)
    print(text)


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps of one interval")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    _, state, steps = prepare()
    with tempfile.TemporaryDirectory() as folder:
        state, saves = measure_saves(
            steps, state, Path(folder) / "checkpoints", args.rounds, args.steps
        )
        newest = Path(folder) / "checkpoints" / str(args.rounds)
        read_manifest(newest)
        digests = measure_digests(state, newest, args.rounds)
    write_page(args.out, saves, digests, load)


if __name__ == "__main__":
    main()
