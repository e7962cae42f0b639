"""Long sequences on slow links: devices that share sequences, beside a tensor axis across hosts.

One sequence of 8,192 positions on an emulated cluster of two hosts with two devices each, so that
there are fewer sequences than devices. Matrices are cut over all devices; or inside a host, and the
hosts share the sequence; or all devices share it. Keys are gathered or pass along a ring. The
cluster is probed before, the variants run in turns, and the kernel counts what crosses. At 20
Mbit/s a packet is sent at a time, each with its header: 6 to 7 % of everything. Needs root, ip and
tc.

    python -m benchmarks.emulated.context --out benchmarks/results

Goes on where it was stopped.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.emulated.exchange import Case, Variants, run
from benchmarks.emulated.planner import probe
from benchmarks.emulated.setups import Setup
from benchmarks.emulated.weights import predicted
from benchmarks.machine import RESULTS, stamp
from moejax.plan.cluster.file import from_json

HOSTS, DEVICES = 2, 2
RATES = (20, 200)  # Mbit/s
MODEL: dict[str, Any] = {
    "model.vocab_size": 512,
    "model.width": 128,
    "model.num_layers": 2,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.head_width": 16,
    "model.remat": "attention",
    "moe.num_experts": 8,
    "moe.expert_hidden": 64,
    "moe.capacity_factor": 2.0,
    "train.batch_sequences": 1,
    "data.sequence_length": 8_192,
}
TENSOR = "tensor over all"
INSIDE = {"mesh.tensor": DEVICES, "mesh.fsdp": HOSTS, "mesh.context": HOSTS}
ALL = {"mesh.fsdp": HOSTS * DEVICES, "mesh.context": HOSTS * DEVICES}
VARIANTS: dict[str, dict[str, Any]] = {
    TENSOR: {"mesh.tensor": HOSTS * DEVICES},
    "tensor inside, hosts share, gather": INSIDE,
    "tensor inside, hosts share, ring": INSIDE | {"mesh.context_exchange": "ring"},
    "all share, gather": ALL,
    "all share, ring": ALL | {"mesh.context_exchange": "ring"},
}
BAR = 0.15  # of the measured seconds, by price


def measure(rate: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Probes a cluster and runs all variants in turns."""
    setup = Setup("", HOSTS, DEVICES, rate)
    facts, _ = probe(setup, folder / "topology.json", quick=False)
    topology = from_json(facts, setup.cluster)
    steps: Variants = {name: ("step", settings) for name, settings in VARIANTS.items()}
    config = MODEL | {"mesh.nodes": HOSTS, "plan.mode": "hand"}
    shape = (MODEL["train.batch_sequences"], MODEL["data.sequence_length"])
    found = run(Case("context", HOSTS, DEVICES, rate, config, shape, steps, rounds), folder)
    rows = {
        name: {
            "predicted": predicted(settings, topology, MODEL),
            **{key: found[name][key] for key in ("seconds", "sent", "counted")},
        }
        for name, settings in VARIANTS.items()
    }
    return {"topology": facts, "rows": rows, **stamp()}


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Long sequences across hosts", "", *(__doc__ or "").strip().splitlines(), ""]
    for name, one in record["results"].items():
        machine, rows = one["machine"], one["rows"]
        tensor = median(rows[TENSOR]["seconds"])
        errors = [row["predicted"] / median(row["seconds"]) - 1 for row in rows.values()]
        lines += [
            f"## {name}",
            "",
            f"{machine['cpu']}, {machine['cpus_used']} cores, JAX {one['jax']}, {one['date']}. "
            f"Prices are off by {min(errors):+.0%} to {max(errors):+.0%}, "
            f"{sum(abs(error) <= BAR for error in errors)} of {len(errors)} by {BAR:.0%} at most.",
            "",
            f"| devices | x {TENSOR} | seconds (range) | predicted | MB a host | sent / counted |",
            "|---|---:|---|---:|---:|---:|",
        ]
        for variant, row in rows.items():
            took, sent = row["seconds"], median(row["sent"])
            lines.append(
                f"| {variant} | {tensor / median(took):.2f} | {median(took):.2f} "
                f"({min(took):.2f} to {max(took):.2f}) | {row['predicted']:.2f} | "
                f"{sent / 1e6:.1f} | {sent / row['counted']:.3f} |"
            )
        lines.append("")
        if (before := one.get("mended")) is not None:
            lines += [f"{before}", ""]
    return "\n".join(lines)


def main() -> None:
    """Measures what is missing; writes the results after each cluster."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = args.out / "context.json"
    record = json.loads(path.read_text()) if path.exists() else {"results": {}}
    for rate in RATES:
        name = f"{HOSTS} x {DEVICES}, {rate} Mbit/s"
        if name in record["results"]:
            continue
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = measure(rate, args.rounds, Path(folder))
        record["results"][name] = found
        path.write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(record))
    path.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
