"""What do rows cost that no bucket holds?

Dropless steps and layers beside those with a capacity of 1.25, which drop such rows: on four
emulated hosts of two devices, 200 Mbit/s, experts over all, with one micro-batch and two, and
buckets of several sizes; one layer whose buckets hold all rows beside the same layer with buckets
one row smaller; and the first run of a new user, `make train`, from step 40 on. All in turns. Then
what the rows of a step need at least, by their counts. Needs root, ip and tc, but for
`--only "make train"` and `--only bound`.

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
from statistics import mean, median
from typing import Any

import jax
import numpy as np

from benchmarks.emulated.exchange import LAYER, Case, Variants, run
from benchmarks.machine import RESULTS, ROOT, stamp
from moejax.config.load import from_dict
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.moe.dispatch import ROUND_SHARE
from moejax.moe.sizes import expert_capacity, usual_sizes
from moejax.step.state import Batch
from moejax.step.train_step import TrainStep, build_step

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
# Exchanges of a layer and step: rows and results, in both passes. Backward repeats a round's.
PASSES, PASSES_OF_ROUND = 4, 6


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


def bound() -> dict[str, Any]:
    """What the rows of the second step need, which is the timed one, for each expert layer."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", HOSTS * DEVICES)
    cfg = from_dict({**MODEL, "mesh.nodes": 1, "train.micro_batches": 1, "plan.mode": "hand"})
    train_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), jax.devices()), "cpu")
    tokens = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (16, 64), np.int32)
    return {
        f"layer {layer + 1}": needs(counts, train_step)
        for layer, counts in enumerate(rows_by_device(train_step, tokens))
    }


def rows_by_device(train_step: TrainStep, token_BT: np.ndarray) -> np.ndarray:
    """Rows [L, devices, E] from each device to each expert in the second step.

    A device's rows depend on its own sequences alone, so each device's are counted in a step in
    which all devices have them.
    """

    def step(token_BT: np.ndarray, state: Any) -> tuple[Any, Any]:
        arrays = token_BT, np.roll(token_BT, -1, axis=1), np.zeros_like(token_BT)
        return train_step.step(
            state, Batch(*(jax.device_put(x, train_step.batch_sharding) for x in arrays))
        )

    loads = []
    for own in np.split(token_BT, HOSTS * DEVICES):
        state, _ = step(token_BT, train_step.init())
        _, metrics = step(np.tile(own, (HOSTS * DEVICES, 1)), state)
        loads.append(np.asarray(metrics.load_LE) // (HOSTS * DEVICES))
    return np.stack(loads, axis=1)


def needs(rows_DE: np.ndarray, train_step: TrainStep) -> dict[str, float]:
    """Compares what crosses the busiest host's link, as parts of what capacity's buckets send.

    Args:
      rows_DE: rows from each device to each expert; a device owns one expert.
    """
    cfg, devices = train_step.cfg, HOSTS * DEVICES
    tokens = rows_DE[0].sum() // cfg.moe.experts_per_token
    settings = train_step.spec.route, train_step.layout, cfg.moe
    bucket, small = (
        usual_sizes(*settings, tokens=n).rows[0] for n in (tokens, -(-tokens // ROUND_SHARE))
    )
    over_DE = np.maximum(rows_DE - bucket, 0)
    rounds = -(-over_DE.max() // small)
    by_host = rows_DE.reshape(HOSTS, DEVICES, HOSTS, DEVICES).sum(axis=(1, 3))
    capacity = expert_capacity(from_dict({**MODEL, **BUCKETS[CAPACITY]}).moe, tokens=tokens)
    assert capacity is not None
    outside = DEVICES * (devices - DEVICES)  # pairs of a host's device and one elsewhere
    base = PASSES * outside * capacity
    usual = PASSES * outside * bucket
    # Every device pads to the fullest sender; a ring over all devices passes a host once.
    gathered = PASSES_OF_ROUND * (devices - 1) * over_DE.sum(axis=1).max()
    return {
        "busiest": float(by_host.sum(axis=0).max() / by_host.sum(axis=0).mean()),
        "over": int(over_DE.sum()),
        "rounds": int(rounds),
        "filled": float(over_DE.sum() / max(1, rounds * devices**2 * small)),
        "least": float(PASSES * (by_host - np.diag(np.diag(by_host))).sum(axis=0).max() / base),
        "sent": float((usual + PASSES_OF_ROUND * outside * small * rounds) / base),
        "gathered": float((usual + gathered) / base),
        "capacity_bytes": int(base * cfg.model.width * 4),
    }


def bound_section(one: dict[str, Any]) -> list[str]:
    """The bound as Markdown."""
    found = one["found"]
    both = {key: mean(row[key] for row in found.values()) for key in ("least", "sent", "gathered")}
    size = next(iter(found.values()))["capacity_bytes"]
    return [
        "## Bound",
        "",
        "Where the rows of a step above go, with one micro-batch, and what crosses the busiest "
        "host's link, in parts of what buckets of capacity 1.25 send there, "
        f"{size / 1e6:.2f} MB a layer. Least: its rows and nothing else. Sent: buckets and rounds. "
        "Gathered: rows that overflow go to every device in place of rounds, and results return "
        "as a reduce-scatter; computed, not built.",
        "",
        "| | busiest host / mean | rows over | rounds | places filled | least | sent | gathered |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {name} | {row['busiest']:.2f} | {row['over']} | {row['rounds']} "
            f"| {row['filled']:.0%} | {row['least']:.2f} | {row['sent']:.2f} "
            f"| {row['gathered']:.2f} |"
            for name, row in found.items()
        ),
        "",
        f"Why bars are missed: no order of sends moves less than {both['least']:.2f} of capacity's "
        "rows, which drops what is over, so bars leave little for padding; and the fullest "
        "of 64 pairs sets the rounds of all, most of whose places are empty: "
        f"{both['sent']:.2f} x. Gathered it would be {both['gathered']:.2f} x.",
        "",
    ]


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
        if name == "bound":
            lines += bound_section(one)
            continue
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
    parts |= {"make train": train, "bound": bound}
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
