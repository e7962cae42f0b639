"""How often `train.spike_threshold` calls a loss a spike that is none, and how soon it finds one.

Losses are drawn: noise of several kinds around a level or a steep descent, without a spike, so that
every alarm is false; and with a shift of the level, which must be found. Then the losses of real
runs are read, which logged every step. Writes spikes.md.

    python -m benchmarks.learning.spikes --runs DIR ... --out benchmarks/results
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from moejax.train.faults.spikes import Spikes

STEPS = 100_000  # of each kind of noise and each threshold
THRESHOLDS = (3.0, 4.0, 6.0, 8.0, 12.0)
SHIFTS = (5, 10, 20, 40)  # of the level, in standard deviations of its noise
TRIALS = 100  # of each shift
SMALL = Path("runs/spikes")  # a real run whose batches are small, and so its losses noisy
COMMAND = (
    f"moejax train --config tiny --config.run_dir={SMALL} --config.mesh.simulated_devices=1 "
    "--config.mesh.expert=1 --config.mesh.tensor=1 --config.train.log_every=1 "
    "--config.train.num_steps=1000 --config.model.width=64 --config.model.num_layers=2 "
    "--config.data.sequence_length=64 --config.train.eval_every=none"
)

Drawn = Callable[[np.random.Generator, int], np.ndarray]


def _slow(rng: np.random.Generator, count: int) -> np.ndarray:
    """Noise that forgets a tenth a step, such as that of data that are not shuffled."""
    noise = np.zeros(count)
    for at, one in enumerate(rng.normal(0, 0.02, count)):
        noise[at] = 0.9 * noise[at - 1] + one
    return 3 + noise


def _descent(rng: np.random.Generator, count: int) -> np.ndarray:
    """Begins at 10.8 and falls to 2.5, again and again, as at the beginnings of many runs."""
    step = np.arange(count) % 1000
    return 2.5 + 8.3 / (1 + step / 30) + rng.normal(0, 0.05, count)


NOISE: dict[str, Drawn] = {
    "normal": lambda rng, count: 3 + rng.normal(0, 0.05, count),
    "uniform": lambda rng, count: 3 + rng.uniform(-0.1, 0.1, count),
    "long tails (Student t of 3 degrees)": lambda rng, count: 3 + 0.05 * rng.standard_t(3, count),
    "one in twenty batches is of other data, 1 nat above": lambda rng, count: (
        3 + rng.normal(0, 0.05, count) + (rng.random(count) < 0.05)
    ),
    "slow (each keeps 0.9 of the one before)": _slow,
    "steep descents": _descent,
}


def alarms(losses: Iterable[float], threshold: float) -> list[int]:
    """Returns the steps at which a spike is told."""
    spikes = Spikes(threshold)
    return [at for at, loss in enumerate(losses) if spikes.after(at, float(loss)) is not None]


def false_alarms() -> dict[str, list[int]]:
    """Returns by kind of noise the number of alarms at each threshold."""
    found = {}
    for name, draw in NOISE.items():
        losses = draw(np.random.default_rng(0), STEPS).tolist()
        if name == "steep descents":  # each begins anew
            runs = [losses[at : at + 1000] for at in range(0, STEPS, 1000)]
        else:
            runs = [losses]
        found[name] = [sum(len(alarms(run, t)) for run in runs) for t in THRESHOLDS]
    return found


def found_shifts(threshold: float) -> list[int]:
    """Returns of each shift in how many of the trials it is told at its third step."""
    rng, found = np.random.default_rng(1), []
    for shift in SHIFTS:
        told = 0
        for _ in range(TRIALS):
            losses = 3 + rng.normal(0, 0.05, 210)
            losses[200:] += shift * 0.05
            told += alarms(losses, threshold) == [202]
        found.append(told)
    return found


def logged(run_dir: Path) -> list[float]:
    """Returns the losses of a run in order of steps."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]


def page(runs: list[Path]) -> str:
    """Returns the measured tables as a page."""
    head = "| | " + " | ".join(f"{t:g}" for t in THRESHOLDS) + " |\n|---|" + "---:|" * 5 + "\n"
    words = " ".join(["python -m benchmarks.learning.spikes --runs", *map(str, runs)])
    text = f"# Spikes of the loss\n\n`{words}`\n\n"
    text += (
        f"False alarms in {STEPS:,} steps without a spike, by `train.spike_threshold`:\n\n{head}"
    )
    for name, counts in false_alarms().items():
        text += f"| {name} | " + " | ".join(map(str, counts)) + " |\n"
    text += f"\nOf {TRIALS} shifts of the level, told at their third step:\n\n"
    text += "| shift in standard deviations | " + " | ".join(f"{t:g}" for t in THRESHOLDS)
    text += " |\n|---:|" + "---:|" * 5 + "\n"
    columns = [found_shifts(t) for t in THRESHOLDS]
    for row, shift in enumerate(SHIFTS):
        text += f"| {shift} | " + " | ".join(str(column[row]) for column in columns) + " |\n"
    text += f"\nAlarms in real runs:\n\n{head}"
    for run in runs:
        losses = logged(run)
        counts = [len(alarms(losses, t)) for t in THRESHOLDS]
        text += f"| {run.name}, {len(losses)} steps | " + " | ".join(map(str, counts)) + " |\n"
    if SMALL in runs:
        text += f"\n`{SMALL}` is a run of `{COMMAND}`.\n"
    return text


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = page(args.runs)
    print(text)
    if args.out is not None:
        (args.out / "spikes.md").write_text(text)


if __name__ == "__main__":
    main()
