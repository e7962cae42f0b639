"""Does what crosses the links between hosts come to what is counted?

Plans are priced by counted bytes. Here collectives of every kind, over groups inside a host, across
hosts and both, and train steps in every layout of weights and tokens run on emulated clusters, and
the kernel's counters of each host's link are read before and after. Sent includes the headers of
packets, those of what arrives well, and a barrier: of a step 0.1 to 0.6 MB, whatever its layout,
which is most beside codecs. Needs root, ip and tc. Times play no part: links are not shaped.

    python -m benchmarks.emulated.sent --out benchmarks/results

Takes half an hour on two cores. Goes on where it was stopped.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.emulated.exchange import Case, Variants, run
from benchmarks.machine import RESULTS, stamp

SHAPES = ((2, 2), (2, 4), (3, 2), (4, 2))  # hosts, devices of each
AXES = {"inside": ["fsdp"], "across": ["replica"], "both": ["replica", "fsdp"]}
KINDS = {
    "all_to_all": ("float32", "bfloat16", "uint8"),
    "all_gather": ("float32", "bfloat16", "uint8"),
    "reduce_scatter": ("float32", "bfloat16"),
    "all_reduce": ("float32", "bfloat16"),
    "ppermute": ("float32", "bfloat16"),
}
MODEL = {
    "model.vocab_size": 528,
    "model.width": 192,
    "model.num_layers": 4,
    "model.num_heads": 24,
    "model.num_kv_heads": 24,
    "model.head_width": 8,
    "moe.num_experts": 24,
    "moe.expert_hidden": 192,
    "moe.capacity_factor": 1.25,
    "train.batch_sequences": 48,
    "data.sequence_length": 48,
}
BAR = 1.03


def collectives(hosts: int, devices: int) -> Case:
    """Every kind over every group."""
    variants: Variants = {
        f"{kind}, {where}, {dtype}": (
            "collective",
            {"kind": kind, "axes": axes, "dtype": dtype},
        )
        for kind, dtypes in KINDS.items()
        for where, axes in AXES.items()
        for dtype in dtypes
        if (kind, where) != ("ppermute", "both")  # stages lie across hosts, or inside one
    }
    mesh = {"mesh.replica": hosts, "mesh.fsdp": devices, "mesh.nodes": hosts}
    return Case("collectives", hosts, devices, None, MODEL | mesh, (1, 1), variants, rounds=2)


def steps(hosts: int, devices: int) -> Case:
    """Every layout of weights and tokens, with and without codecs."""
    every = hosts * devices
    over_all, inside = {"mesh.fsdp": every}, {"mesh.fsdp": hosts, "mesh.expert": devices}
    spread, parts = {"mesh.expert": every}, {"train.micro_batches": 2}
    layouts = {
        "weights over all": over_all,
        "weights over all, 2 micro-batches": over_all | parts,
        "weights over all, across hosts first": over_all | {"mesh.gather_across": "use"},
        "the same, once for both passes": over_all
        | {"mesh.gather_across": "passes", "model.remat": "full"},
        "the same, once a step": over_all | parts | {"mesh.gather_across": "step"},
        "weights inside, copies across": {"mesh.replica": hosts, "mesh.fsdp": devices},
        "copies over all": {"mesh.replica": every},
        "experts inside, weights across": inside,
        "experts inside, copies across": {"mesh.replica": hosts, "mesh.expert": devices},
        "experts over all": spread,
        "experts over all, dense weights once a step": spread
        | parts
        | {"mesh.gather_dense": "step"},
        "experts over all, in two levels": spread | {"route": "two_level_merge"},
        "experts over all, strong codecs": spread | {"compression.preset": "strong"},
        "weights over all, strong codecs": over_all | {"compression.preset": "strong"},
        "activations across": {"mesh.tensor": every},
    }
    return layouts_of("steps", hosts, devices, layouts)


def stages(hosts: int, devices: int) -> Case:
    """Layers across hosts."""
    across = {"mesh.stage": hosts, "mesh.fsdp": devices, "train.micro_batches": 2 * hosts}
    layouts = {
        "stages across": across,
        "stages across, strong codecs": across | {"compression.preset": "strong"},
    }
    return layouts_of("stages", hosts, devices, layouts)


def layouts_of(name: str, hosts: int, devices: int, layouts: dict[str, dict[str, Any]]) -> Case:
    """Train steps in some layouts."""
    variants: Variants = {layout: ("step", values) for layout, values in layouts.items()}
    config = MODEL | {"mesh.nodes": hosts, "model.num_layers": 2 * hosts}
    shape = (MODEL["train.batch_sequences"], MODEL["data.sequence_length"])
    return Case(name, hosts, devices, None, config, shape, variants, rounds=2)


def table(results: list[dict[str, Any]], name: str) -> list[str]:
    """Sent over counted: a row for each variant, a column for each cluster."""
    found = {
        (one["case"]["hosts"], one["case"]["devices"]): one["found"]
        for one in results
        if one["case"]["name"] == name
    }
    shapes = [shape for shape in SHAPES if shape in found]
    variants = list(dict.fromkeys(v for one in found.values() for v in one))
    heads = " | ".join(f"{hosts} x {devices}" for hosts, devices in shapes)
    lines = [f"| {name} | {heads} |", f"|---|{'---:|' * len(shapes)}"]
    for variant in variants:
        cells = " | ".join(cell(found[shape][variant]) for shape in shapes)
        lines.append(f"| {variant} | {cells} |")
    return lines


def cell(one: dict[str, Any]) -> str:
    """Sent over counted, and MB; where nothing is counted, what was sent."""
    sent = median(one["sent"])
    if not one["counted"]:
        return f"0 MB ({sent / 1e6:.2f} sent)"
    return f"{sent / one['counted']:.3f} ({one['counted'] / 1e6:.1f} MB)"


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    ratios = [
        median(one["sent"]) / one["counted"]
        for result in record["results"]
        for one in result["found"].values()
        if one["counted"]
    ]
    machine = record["machine"]
    lines = ["# Sent over counted", "", *(__doc__ or "").strip().splitlines(), ""]
    lines += [
        f"{machine['cpu']}, JAX {record['jax']}, {record['date']}. Bytes of the busiest host: sent "
        "over counted, and counted.",
        "",
        f"Of {len(ratios)} ratios the largest is {max(ratios):.3f}, the least {min(ratios):.3f}; "
        f"{sum(ratio <= BAR for ratio in ratios)} are at most {BAR}.",
        "",
    ]
    for name in dict.fromkeys(one["case"]["name"] for one in record["results"]):
        lines += [*table(record["results"], name), ""]
    return "\n".join(lines)


def main() -> None:
    """Runs what is missing, and writes the results after each cluster."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="collectives, steps or stages")
    args = parser.parse_args()
    path = args.out / "sent.json"
    record = json.loads(path.read_text()) if path.exists() else {"results": []}
    done = [
        (r["case"]["name"], r["case"]["hosts"], r["case"]["devices"]) for r in record["results"]
    ]
    with tempfile.TemporaryDirectory() as folder:
        for make in (collectives, steps, stages):
            for shape in SHAPES if make.__name__.startswith(args.only) else ():
                case = make(*shape)
                if (case.name, *shape) in done:
                    continue
                print(f"== {case.name}, {shape[0]} x {shape[1]}", flush=True)
                record["results"].append({"case": asdict(case), "found": run(case, Path(folder))})
                record |= stamp()
                path.write_text(json.dumps(record, indent=1) + "\n")
                path.with_suffix(".md").write_text(page(record))
    path.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
