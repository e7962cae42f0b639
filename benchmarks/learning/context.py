"""Does a model learn the same where devices share its sequences?

A small model on the source of Python's library, one sequence of 16,384 bytes a step: on one device,
and on four that share the sequence, with keys gathered and along a ring. By the command of a user.
Writes context_loss.json and context_loss.md.

    python -m benchmarks.learning.context --out benchmarks/results
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, ROOT, stamp

STEPS = 15
MODEL = (
    "model.vocab_size=264",
    "model.width=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_width=16",
    "moe.num_experts=8",
    "moe.expert_hidden=64",
    "data.sequence_length=16384",
    "train.batch_sequences=1",
    f"train.num_steps={STEPS}",
    "train.log_every=1",
    "train.sample_tokens=0",
    "train.compare_every=none",
    "optimizer.learning_rate=1e-2",
    "optimizer.warmup_steps=3",
    "plan.mode=hand",
)
SHARED = ("mesh.simulated_devices=4", "mesh.fsdp=4", "mesh.context=4")
RUNS = {
    "one device": ("mesh.simulated_devices=1",),
    "4 share, gather": SHARED,
    "4 share, ring": (*SHARED, "mesh.context_exchange=ring"),
}


def losses(folder: Path, settings: tuple[str, ...]) -> list[float]:
    """Trains once; returns the loss of each step in nats."""
    config = folder / "config.json"
    config.write_text(json.dumps({"run_dir": str(folder / "run")}))
    words = [f"--config.{word}" for word in (*MODEL, *settings)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moejax", "train", "--config", str(config), *words]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def page(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    runs = result["losses"]
    alone = runs["one device"]
    lines = ["# Loss of shared sequences", "", *(__doc__ or "").strip().splitlines(), ""]
    lines += ["| devices | first | tenth | last | largest difference to one device |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for name, found in runs.items():
        off = max(abs(a - b) for a, b in zip(found, alone, strict=True))
        cells = [f"{found[at]:.5f}" for at in (0, 9, -1)]
        lines.append(f"| {name} | {' | '.join(cells)} | {off:.1e} |")
    text = f"{len(alone)} steps, nats a byte. JAX {result['jax']}, {result['date']}."
    return "\n".join([*lines, "", text, ""])


def main() -> None:
    """Trains all runs and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = {}
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = losses(Path(folder), settings)
        print(f"{name}: {found[name][-1]:.5f} nats a byte", flush=True)
    result = {"losses": found, **stamp()}
    (args.out / "context_loss.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "context_loss.md").write_text(page(result))


if __name__ == "__main__":
    main()
