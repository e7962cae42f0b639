"""What do quantiles do for balance and loss, beside a bias moved by steps and beside a loss?

A small model of 16 experts on the source of Python's library, with the same seed and data each
time: without balance, with the auxiliary loss, with loss-free balance at two rates, and with
quantiles. By the command of a user, on two simulated devices. Writes balance.json and balance.md.

    python -m benchmarks.learning.balance --out benchmarks/results
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, ROOT, stamp

STEPS, LAST, EARLY = 240, 40, 10  # steps of a run, of its end that means are over, of its start
MODEL = (
    "model.vocab_size=264",
    "model.width=64",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_width=16",
    "moe.num_experts=16",
    "moe.expert_hidden=64",
    "moe.router.score=sigmoid",
    "data.sequence_length=256",
    "train.batch_sequences=8",
    f"train.num_steps={STEPS}",
    "train.log_every=1",
    "train.eval_batches=16",
    "train.sample_tokens=0",
    "train.compare_every=none",
    "optimizer.learning_rate=3e-3",
    "optimizer.warmup_steps=20",
    "plan.mode=hand",
    "mesh.simulated_devices=2",
    "mesh.expert=2",
)
NO_LOSS = "moe.router.balance_loss=0"
RUNS = {
    "none": (NO_LOSS,),
    "auxiliary loss, 0.04": (),
    "loss-free, rate 0.001": (NO_LOSS, "moe.router.bias_update_rate=0.001"),
    "loss-free, rate 0.01": (NO_LOSS, "moe.router.bias_update_rate=0.01"),
    "quantiles, 1000 bins": (NO_LOSS, "moe.router.quantile_bins=1000"),
}


def trained(folder: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    """Trains once; returns losses, bits per byte, speed, and busiest expert over mean by layer."""
    config = folder / "config.json"
    config.write_text(json.dumps({"run_dir": str(folder / "run")}))
    words = [f"--config.{word}" for word in (*MODEL, *settings)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moejax", "train", "--config", str(config), *words]
    began = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    loads = [json.loads(line) for line in (folder / "run/experts.jsonl").read_text().splitlines()]
    busiest = {row["step"]: over_mean(row["load"]) for row in loads}
    return {
        "losses": [row["loss"] for row in rows if row["event"] == "step"],
        "held_out": next(r["bits_per_byte"] for r in rows if r["event"] == "final_eval"),
        "tokens_per_second": float(
            np.median([row["tokens_per_second"] for row in rows if row["event"] == "step"])
        ),
        "busiest": busiest,
        "seconds": seconds,
    }


def over_mean(load: list[list[int]]) -> list[float]:
    """Returns the largest load of an expert over the mean, by layer."""
    load_LE = np.asarray(load, np.float64)
    return (load_LE.max(axis=1) / load_LE.mean(axis=1)).tolist()


def mean_busiest(found: dict[str, Any], first: int, last: int) -> list[float]:
    """Returns the mean of `over_mean` over steps first to last, by layer."""
    rows = [row for step, row in found["busiest"].items() if first <= int(step) <= last]
    return [fmean(layer) for layer in zip(*rows, strict=True)]


def page(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    runs = result["runs"]
    lines = ["# Balance of experts", "", *(__doc__ or "").strip().splitlines(), ""]
    lines += ["| balance | loss | held out | busiest, early | busiest, end | by layer | tokens/s |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for name, found in runs.items():
        early = mean_busiest(found, 0, EARLY + 20)
        end = mean_busiest(found, STEPS - LAST, STEPS)
        cells = [
            f"{fmean(found['losses'][-LAST:]):.3f}",
            f"{found['held_out']:.3f}",
            f"{max(early):.2f}",
            f"{max(end):.2f}",
            ", ".join(f"{layer:.2f}" for layer in end),
            f"{found['tokens_per_second']:,.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = (
        f"{STEPS} steps of 2,048 bytes, 16 experts of which a byte visits 2, sigmoid scores, one "
        f"seed. Loss: nats a byte, mean of the last {LAST} steps. Held out: bits per byte. "
        "Busiest: largest load of an expert over the mean, a mean over steps, in the worst layer: "
        f"early over the first {EARLY + 20} steps, end over the last {LAST}, and the end by layer. "
        "Speed is a median on a shared machine, no comparison. One seed says nothing of "
        f"differences of a hundredth in loss. JAX {result['jax']}, {result['date']}."
    )
    return "\n".join([*lines, "", text, ""])


def main() -> None:
    """Trains all runs and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = {}
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = trained(Path(folder), settings)
        print(f"{name}: {found[name]['losses'][-1]:.3f} nats a byte", flush=True)
    result = {"runs": found, **stamp()}
    (args.out / "balance.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "balance.md").write_text(page(result))


if __name__ == "__main__":
    main()
