"""How much faster is a step whose weights cross hosts first, or seldom, and is its price right?

A model whose weights are sharded over all devices, on emulated clusters: gathered flat, or across
hosts first and then inside a host, at each use, once for both passes or once a step
(`mesh.gather_across`); with weights in int8; and experts inside a host. Two micro-batches, all
recomputed, so flat gathers cross four times a step. Each cluster is probed before, the variants run
in turns, and the kernel counts what crosses. Needs root, ip and tc.

    python -m benchmarks.emulated.weights --out benchmarks/results

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
from benchmarks.machine import RESULTS, stamp
from moejax.config.fields import change
from moejax.config.schema import Config
from moejax.plan.cluster.file import from_json
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.search.space import Limits, resolve

MODEL: dict[str, Any] = {
    "model.vocab_size": 512,
    "model.width": 256,
    "model.num_layers": 4,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_width": 32,
    "model.remat": "full",
    "moe.num_experts": 16,
    "moe.expert_hidden": 256,
    "moe.capacity_factor": 1.25,
    "train.batch_sequences": 32,
    "train.micro_batches": 2,
    "data.sequence_length": 64,
}
CLUSTERS = ((2, 4, 200), (4, 2, 200), (2, 4, 50))  # hosts, devices of each, Mbit/s
FLAT = "flat"
BAR = 0.08  # of the measured seconds, by price


def variants(hosts: int, devices: int) -> dict[str, dict[str, Any]]:
    """Name -> settings."""
    over_all = {"mesh.replica": 1, "mesh.fsdp": hosts * devices}
    inside = {"mesh.replica": 1, "mesh.fsdp": hosts, "mesh.expert": devices}
    across = {
        "across hosts first, at each use": {"mesh.gather_across": "use"},
        "across hosts first, once for both passes": {"mesh.gather_across": "passes"},
        "across hosts first, once a step": {"mesh.gather_across": "step"},
    }
    coded = {"compression.weights": "int8"}
    return {
        FLAT: over_all,
        **{name: over_all | one for name, one in across.items()},
        "flat, int8": over_all | coded,
        "across hosts first, at each use, int8": over_all | coded | {"mesh.gather_across": "use"},
        "across hosts first, once a step, int8": over_all | coded | {"mesh.gather_across": "step"},
        "experts inside a host": inside,
        "experts inside a host, once a step": inside | {"mesh.gather_across": "step"},
    }


def predicted(settings: dict[str, Any], topology: Topology, model: dict[str, Any] = MODEL) -> float:
    """Seconds of a step by price."""
    limits = Limits(topology.devices, topology.nodes, "cpu")
    cfg = resolve(change(Config(), model | settings), limits)
    assert cfg is not None, settings
    load = read_expert_load("balanced", cfg.moe.num_experts)
    return price(trace_config(cfg, "cpu", load), topology, load).seconds


def measure(
    about: str, setup: Setup, model: dict[str, Any], wanted: dict[str, dict[str, Any]], rounds: int
) -> dict[str, Any]:
    """Probes a cluster and runs all variants of a model in turns.

    Args:
      wanted: name -> settings.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        facts, _ = probe(setup, folder / "topology.json", quick=False)
        steps: Variants = {name: ("step", settings) for name, settings in wanted.items()}
        config = model | {"mesh.nodes": setup.hosts, "plan.mode": "hand"}
        shape = (model["train.batch_sequences"], model["data.sequence_length"])
        where = setup.hosts, setup.devices, setup.rate
        found = run(Case(about, *where, config, shape, steps, rounds), folder)
    topology = from_json(facts, setup.cluster)
    rows = {
        name: {
            "predicted": predicted(settings, topology, model),
            **{key: found[name][key] for key in ("seconds", "sent", "counted")},
        }
        for name, settings in wanted.items()
    }
    return {"topology": facts, "rows": rows, **stamp()}


def section(name: str, one: dict[str, Any], what: str, bar: float) -> list[str]:
    """The results of a cluster: seconds beside those of the first variant, prices, bytes.

    Args:
      what: the head of the column of variants, and the name of the first.
      bar: share by which a price may be off.
    """
    machine, rows = one["machine"], one["rows"]
    first = median(next(iter(rows.values()))["seconds"])
    errors = [row["predicted"] / median(row["seconds"]) - 1 for row in rows.values()]
    lines = [
        f"## {name}",
        "",
        f"{machine['cpu']}, {machine['cpus_used']} cores, JAX {one['jax']}, {one['date']}. "
        f"Prices are off by {min(errors):+.0%} to {max(errors):+.0%}, "
        f"{sum(abs(error) <= bar for error in errors)} of {len(errors)} by {bar:.0%} at most.",
        "",
        f"| {what} | seconds (range) | predicted | MB sent a host | sent / counted |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for variant, row in rows.items():
        took, sent = row["seconds"], median(row["sent"])
        lines.append(
            f"| {variant} | {first / median(took):.2f} | {median(took):.2f} "
            f"({min(took):.2f} to {max(took):.2f}) | {row['predicted']:.2f} | "
            f"{sent / 1e6:.1f} | {sent / row['counted']:.3f} |"
        )
    return [*lines, ""]


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Weights across hosts", "", *(__doc__ or "").strip().splitlines(), ""]
    for name, one in record["results"].items():
        lines += section(name, one, "weights | x flat", BAR)
    return "\n".join(lines)


def main() -> None:
    """Measures what is missing; writes the results after each cluster."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = args.out / "weights.json"
    record = json.loads(path.read_text()) if path.exists() else {"results": {}}
    for hosts, devices, rate in CLUSTERS:
        name = f"{hosts} x {devices}, {rate} Mbit/s"
        if name in record["results"]:
            continue
        print(f"== {name}", flush=True)
        setup = Setup("", hosts, devices, rate)
        found = measure("weights", setup, MODEL, variants(hosts, devices), args.rounds)
        record["results"][name] = found
        path.write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(record))
    path.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
