"""What does a device execute in a step of the shipped models on nodes of eight H200s?

Compiles the trainer's own step for described clusters, each case in a process of its own, and
counts, in the compiled program, what a device computes, launches, moves and sends. Needs
moejax[aot] and no GPU; nothing runs. Writes executed.json and executed.md after each case.

    .venv-aot/bin/python -m benchmarks.executed --out benchmarks/results
"""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.aot import write_cases

TWO_NODES = ["route_chunks=4", "mesh.fsdp=2"]
ONCE = "mesh.gather_dense=step"
REPLICAS = ["route_chunks=4", "mesh.replica=4", "train.micro_batches=1"]
# Config, nodes, settings.
CASES = (
    ("olmoe_1b_7b", 2, TWO_NODES),
    ("olmoe_1b_7b", 2, [*TWO_NODES, "model.remat=full"]),
    ("olmoe_1b_7b", 2, [*TWO_NODES, "model.remat=experts"]),
    ("mixtral_8x7b", 2, [*TWO_NODES, "train.micro_batches=16"]),
    ("qwen3_30b_a3b", 2, [*TWO_NODES, "train.micro_batches=16"]),
    ("olmoe_1b_7b", 32, ["route_chunks=4", "mesh.fsdp=32", "train.micro_batches=1"]),
    ("olmoe_1b_7b", 2, [*TWO_NODES, "model.remat=experts", ONCE]),
    ("olmoe_1b_7b", 2, [*TWO_NODES, "model.remat=experts", ONCE, "model.scan_layers=false"]),
    ("mixtral_8x7b", 2, [*TWO_NODES, "train.micro_batches=16", ONCE]),
    ("qwen3_30b_a3b", 2, [*TWO_NODES, "train.micro_batches=16", ONCE]),
    ("mixtral_8x7b", 32, REPLICAS),
    ("qwen3_30b_a3b", 32, REPLICAS),
)
CLASSES = ("experts", "attention", "projections", "logits", "rest")


def to_markdown(result: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# What a device executes in a step, compiled for nodes of eight H200s",
        "",
        "`.venv-aot/bin/python -m benchmarks.executed`",
        "",
        "A device, a step of the shipped config with the settings named, sequences of 4096 tokens.",
        "FLOPs: executed, over the model's (three times forward, attention as far as",
        "causality lets it look); experts at balanced load, in brackets at whole buffers.",
        "Launches: kernels, library calls and collectives; a loop's body counts once a trip, and",
        "of a conditional the branch of buckets that do not overflow. Traffic: what kernels that",
        "are no products read and write, each operand and result once, of what is sliced, gathered",
        "or updated in place the part that is touched; no caches. Memory: arguments, temporaries.",
        "Nothing ran, so nothing is timed.",
        "",
        *tables(result["cases"], name_of),
        "",
        *shares(result["cases"], name_of),
    ]
    lines += ["", f"Machine: {json.dumps(result['machine'])}, JAX {result['jax']}"]
    return "\n".join(lines) + "\n"


def name_of(case: dict[str, Any]) -> str:
    """Names a case by its model, nodes and settings."""
    settings = ", ".join(f"`{one}`" for one in case["settings"])
    return f"{case['config']}, {case['nodes']} nodes: {settings}"


def shares(cases: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> list[str]:
    """The lines of what is hidden of weights and gradients, in cases that are named so."""
    lines = [
        "Shares of the bytes that enclose a product, of gradients that are reduced and of weights",
        "that are gathered, and seconds of one compilation on a machine with other work, for which",
        "the longest were stopped for minutes:",
        "",
        "| changed | reductions | gathers | compiled in |",
        "|---|---:|---:|---:|",
    ]
    for case in cases:
        hidden = [f"{case[kind]:.0%}" for kind in ("hidden_reductions", "hidden_gathers")]
        lines.append(f"| {name(case)} | {' | '.join(hidden)} | {case['seconds']:.0f} s |")
    return lines


def tables(cases: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> list[str]:
    """The lines of what devices execute, and of what they send, in cases that are named so."""
    lines = [
        "| changed | FLOPs | experts, attention, projections, logits, rest | launches | "
        "loops (iterations) | conditionals | traffic, TB | memory, GiB |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        work, shares = case["work"], case["executed"]
        cells = [name(case), f"{shares['all']:.2f} ({case['executed_most']['all']:.2f})"]
        cells += [", ".join(f"{shares.get(name, 0):.2f}" for name in CLASSES)]
        cells += [f"{work['launches']:,}", f"{work['loops']:,} ({work['iterations']:,})"]
        cells += [f"{work['conditionals']:,}", f"{work['other_bytes'] / 1e12:.2f}"]
        memory = case["argument_bytes"] + case["temporary_bytes"]
        lines.append("| " + " | ".join([*cells, f"{memory / 2**30:.1f}"]) + " |")
    lines += [
        "",
        "Sent by a device over rings, GB, and the share of it that encloses a product:",
        "",
    ]
    lines += ["| changed | collective | axes | GB | enclose a product |", "|---|---|---|---:|---:|"]
    for case in cases:
        for row in case["wire"]:
            if row["bytes"] >= 1e8:
                cells = [name(case), row["kind"], row["axes"], f"{row['bytes'] / 1e9:.1f}"]
                lines.append("| " + " | ".join([*cells, f"{row['hidden']:.0%}"]) + " |")
        total = sum(row["bytes"] for row in case["wire"]) / 1e9
        lines.append(f"| {name(case)} | all | | {total:.1f} | {case['hidden_wire']:.0%} |")
    return lines


if __name__ == "__main__":
    write_cases("executed", CASES, to_markdown, __doc__ or "")
