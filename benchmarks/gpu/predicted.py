"""Does the planner know how long a step takes on a GPU, and how much memory?

    python -m benchmarks.gpu.predicted --out DIR

Measures the device as a user would (`moejax plan probe`), then prices and runs steps of the trainer
on one device: sizes, shapes of experts, what backward keeps, micro-batches, chunks. Each is priced
twice, by the rates that were probed and by those of the data sheet (`--known`). Writes
predicted.json and predicted.md anew after every case; one that fails has its error there. With
--first and --topology a later call goes on where an earlier one was out of time.

With --small everything is tiny and runs anywhere: a test.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.case import first_lines
from benchmarks.gpu.layers import CONFIG, SMALL, one_device_step, timed_steps
from benchmarks.gpu.page import table
from benchmarks.machine import ROOT, stamp
from moejax.config.load import load_config
from moejax.plan.cluster.file import load_topology, read_topology
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import price, trace_step
from moejax.plan.price.routing import read_expert_load

MANY_EXPERTS = ["moe.num_experts=64", "moe.experts_per_token=8", "moe.expert_hidden=1024"]
CASES = (
    [],
    [*MANY_EXPERTS, "train.batch_sequences=8"],
    ["model.remat=full"],
    ["train.micro_batches=4", "train.batch_sequences=8"],
    ["route_chunks=4", "train.batch_sequences=8"],
    ["train.batch_sequences=2"],
    ["model.remat=experts", "train.batch_sequences=8"],
)
SMALL_CASES = ([], ["train.micro_batches=2", "model.remat=full"])
STEPS = 8  # timed, after two that are not


def probe(out: Path, *, quick: bool) -> Topology:
    """Measures the devices here, in a process of its own, and writes topology.json."""
    path = out / "topology.json"
    command = [sys.executable, "-m", "moejax", "plan", "probe", "--out", str(path)]
    command += ["--quick"] if quick else []
    # Its progress is for people; standard output is the page's.
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, timeout=180)
    return read_topology(path)


def run_case(settings: list[str], topologies: dict[str, Topology]) -> dict[str, Any]:
    """Prices a step on each cluster, then runs it."""
    cfg = load_config(CONFIG, settings)
    train_step = one_device_step(cfg, jax.devices())
    began = time.perf_counter()
    traced = trace_step(train_step)
    load = read_expert_load("balanced", cfg.moe.num_experts)
    priced = {name: price(traced, topology, load) for name, topology in topologies.items()}
    row = {
        "predicted": {name: plan.seconds for name, plan in priced.items()},
        "predicted_bytes": next(iter(priced.values())).steps.bytes,
        "priced_in_s": time.perf_counter() - began,
        "tokens": cfg.train.batch_sequences * cfg.data.sequence_length,
    }
    return row | timed_steps(train_step, STEPS)


def to_markdown(result: dict[str, Any]) -> str:
    """The page."""
    names = list(result["clusters"])
    lines = [
        f"# Predicted and measured steps on {result['device']}",
        "",
        f"`python -m benchmarks.gpu.predicted`, {result['date']}, JAX {result['jax']}. Settings "
        "are of benchmarks/gpu/config.yaml. Times are medians of "
        f"{STEPS} steps; predicted: over measured, by the rates that `moejax plan probe` measured "
        f"and by those of {result['known']} (docs/rates.md). Memory: predicted over what the "
        "compiler takes at most.",
        "",
        *(line for note in result.get("notes", []) for line in (note, "")),
    ]
    rows = []
    for row in result["rows"]:
        case = ", ".join(f"`{word}`" for word in row["settings"]) or "as it is"
        if "error" in row:
            rows.append([case, row["error"].splitlines()[0], *[""] * (len(names) + 2)])
            continue
        measured = float(np.median(row["seconds"]))
        ratios = [f"{row['predicted'][name] / measured:.2f}" for name in names]
        peak = row["peak_bytes"]
        memory = f"{row['predicted_bytes'] / peak:.2f}" if peak else ""
        speed = f"{row['tokens'] / measured:,.0f}"
        rows.append([case, f"{measured * 1e3:.1f} ms", speed, *ratios, memory])
    heads = ["changed", "step", "tokens/s", *(f"predicted, {name}" for name in names), "memory"]
    return "\n".join([*lines, *table(heads, rows)])


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for predicted.json, .md")
    parser.add_argument("--known", default="h200:1", help="the described cluster")
    parser.add_argument("--topology", type=Path, help="what was probed before, on such a device")
    parser.add_argument("--seconds", type=float, default=300, help="no case begins after so many")
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any machine")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    probed = read_topology(args.topology) if args.topology else probe(args.out, quick=args.small)
    described = dataclasses.replace(probed, device=load_topology(args.known).device)
    topologies = {"probed": probed, "described": described}
    about = stamp() | {"device": jax.devices()[0].device_kind, "known": args.known}
    result = about | {"clusters": list(topologies), "rows": []}
    for case in (SMALL_CASES if args.small else CASES)[args.first :]:
        if time.monotonic() - began > args.seconds:
            found: dict[str, Any] = {"error": "there was no time left"}
        else:
            try:
                found = run_case([*SMALL, *case] if args.small else case, topologies)
            except Exception as error:
                found = {"error": first_lines(error)}
        result["rows"].append({"settings": case} | found)
        (args.out / "predicted.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / "predicted.md").write_text(to_markdown(result))
    print(to_markdown(result))
    return int(any("error" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
