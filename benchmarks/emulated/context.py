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
from pathlib import Path
from typing import Any

import jax

from benchmarks.emulated.setups import Setup
from benchmarks.emulated.weights import measure, section
from benchmarks.machine import RESULTS

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


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Long sequences across hosts", "", *(__doc__ or "").strip().splitlines(), ""]
    for name, one in record["results"].items():
        lines += section(name, one, f"devices | x {TENSOR}", BAR)
        lines += [one["mended"], ""] if "mended" in one else []
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
        setup = Setup("", HOSTS, DEVICES, rate)
        record["results"][name] = measure("context", setup, MODEL, VARIANTS, args.rounds)
        path.write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(record))
    path.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
