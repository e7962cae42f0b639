"""What do rows cost that no bucket holds?

Dropless steps and layers beside those with a capacity of 1.25, which drop such rows: on four
emulated hosts of two devices, 200 Mbit/s, experts over all, with one micro-batch and two, and
buckets of several sizes; one layer whose buckets hold all rows beside the same layer with buckets
one row smaller; and the first run of a new user, `make train`, from step 40 on. All in turns. Needs
root, ip and tc, but for `--only train`.

    python -m benchmarks.emulated.overflow --out benchmarks/results

Goes on where it was stopped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.emulated.exchange import LAYER, Case, Variants, run
from benchmarks.machine import RESULTS, ROOT, stamp

HOSTS, DEVICES, RATE = 4, 2, 200
CAPACITY = "capacity 1.25"
BUCKETS: dict[str, dict[str, Any]] = {
    CAPACITY: {"moe.capacity_factor": 1.25},
    "dropless": {},
    "dropless, buckets of 2": {"moe.headroom": 2.0},
    "dropless, buckets of 3": {"moe.headroom": 3.0},
}
MODEL: dict[str, Any] = {
    "model.vocab_size": 512,
    "model.width": 256,
    "model.num_layers": 2,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_width": 32,
    "moe.num_experts": 8,
    "moe.expert_hidden": 512,
    "train.batch_sequences": 16,
    "data.sequence_length": 64,
    "mesh.replica": 1,
    "mesh.expert": HOSTS * DEVICES,
    "mesh.nodes": HOSTS,
}
BARS = {1: 1.15, 2: 1.3, "one row": 1.25, "train": 1.2}
FROM, STEPS, RUNS = 40, 120, 5  # of `make train`


def steps(micro_batches: int) -> Case:
    """Train steps of 1,024 tokens."""
    variants: Variants = {name: ("step", settings) for name, settings in BUCKETS.items()}
    config = MODEL | {"train.micro_batches": micro_batches}
    name = f"steps, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return Case(name, HOSTS, DEVICES, RATE, config, (16, 64), variants, rounds=9)


def one_row() -> Case:
    """A layer whose buckets hold all rows, and one in which the fullest bucket lacks a row."""
    shape, experts, top = (16, 256), 8, 2
    every = HOSTS * DEVICES
    # As the worker makes them: a token's first channels are its logits.
    tokens = np.random.default_rng(0).standard_normal((*shape, 512), dtype=np.float32)
    chosen = np.argsort(-tokens[..., :experts])[..., :top].reshape(every, -1)
    rows = [np.bincount(own, minlength=experts).max() for own in chosen]
    mean = chosen.shape[1] / every
    variants: Variants = {
        "all rows fit": ("both", {"moe.headroom": max(rows) / mean}),
        "one row over": ("both", {"moe.headroom": (max(rows) - 1) / mean}),
    }
    config = LAYER | {"mesh.expert": every, "mesh.nodes": HOSTS, "moe.num_experts": experts}
    return Case("a layer", HOSTS, DEVICES, RATE, config, shape, variants, rounds=15)


def train() -> dict[str, Any]:
    """Tokens a second of `make train` from step FROM on, in turns."""
    found: dict[str, list[float]] = {name: [] for name in (CAPACITY, "dropless")}
    for number in range(RUNS):
        for name in list(found) if number % 2 else reversed(list(found)):
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(speed(Path(folder), name == CAPACITY))
            print(f"make train, {name}: {found[name][-1]:,.0f} tokens/s", flush=True)
    return {name: {"seconds": [1 / rate for rate in rates]} for name, rates in found.items()}


def speed(folder: Path, capacity: bool) -> float:
    """Tokens a second of one run, by its own metrics."""
    command = [sys.executable, "-m", "moejax.train", "--config", "configs/tiny.py"]
    command += [f"--config.run_dir={folder}", f"--config.train.num_steps={STEPS}"]
    command += ["--config.train.eval_every=none", "--config.train.sample_tokens=0"]
    command += ["--config.moe.capacity_factor=1.25"] if capacity else []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    times = {line["step"]: line["time"] for line in lines if line["event"] == "step"}
    return (max(times) - FROM) * 16 * 128 / (times[max(times)] - times[FROM])


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Rows that no bucket holds", "", *(__doc__ or "").strip().splitlines(), ""]
    titles = {
        "steps, 1 micro-batch": BARS[1],
        "steps, 2 micro-batches": BARS[2],
        "a layer": BARS["one row"],
        "make train": BARS["train"],
    }
    for name, one in record["results"].items():
        found, machine = one["found"], one["machine"]
        base = median(next(iter(found.values()))["seconds"])
        lines += [
            f"## {name.capitalize()}",
            "",
            f"{machine['cpu']}, {machine['cpus_used']} cores, JAX {one['jax']}, {one['date']}. "
            f"Bar: {titles[name]} x.",
            "",
            "| | x the first | range | MB sent a host |",
            "|---|---:|---|---:|",
        ]
        for variant, row in found.items():
            took = [seconds / base for seconds in row["seconds"]]
            sent = f"{median(row['sent']) / 1e6:.1f}" if "sent" in row else "-"
            lines.append(
                f"| {variant} | {median(took):.2f} | {min(took):.2f} to {max(took):.2f} | {sent} |"
            )
        lines.append("")
    return "\n".join(lines)


def emulated(case: Case) -> dict[str, Any]:
    """What a case on emulated hosts comes to."""
    with tempfile.TemporaryDirectory() as folder:
        return run(case, Path(folder))


def main() -> None:
    """Measures what is missing; writes the results after each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="parts whose name begins so")
    args = parser.parse_args()
    path = args.out / "overflow.json"
    record = json.loads(path.read_text()) if path.exists() else {"results": {}}
    cases = (steps(1), steps(2), one_row())
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        case.name: (lambda case=case: emulated(case)) for case in cases
    }
    parts["make train"] = train
    for name, measure in parts.items():
        if name in record["results"] or not name.startswith(args.only):
            continue
        print(f"== {name}", flush=True)
        record["results"][name] = {"found": measure(), **stamp()}
        path.write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(record))
    path.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
