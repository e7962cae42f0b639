"""What does a device execute in a step of OLMoE on two nodes of eight H200s?

Compiles the trainer's own step for the described cluster and counts, in the compiled program, what
a device computes, launches, moves and sends. Needs moejax[aot] and no GPU; nothing runs. Writes
executed.json and executed.md.

    .venv-aot/bin/python -m benchmarks.executed --out benchmarks/results
"""

import json
from collections.abc import Callable
from typing import Any

from benchmarks.aot import write_cases

TWO_NODES = ["route_chunks=4", "mesh.fsdp=2"]
# Settings of olmoe_1b_7b on two nodes.
CASES = (TWO_NODES, [*TWO_NODES, "model.remat=full"])
CLASSES = ("experts", "attention", "projections", "logits", "rest")


def to_markdown(result: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# What a device executes in a step: OLMoE-1B-7B on two nodes of eight H200s",
        "",
        "`.venv-aot/bin/python -m benchmarks.executed`",
        "",
        "A device, a step of 1024 sequences of 4096 tokens in 32 micro-batches, mesh fsdp=2 x",
        "expert=8. FLOPs: executed, over the model's (three times forward, attention as far as",
        "causality lets it look); experts at balanced load, in brackets at whole buffers.",
        "Launches: kernels, library calls and collectives; a loop's body counts once a trip, and",
        "of a conditional the branch of buckets that do not overflow. Traffic: what kernels that",
        "are no products read and write, each operand and result once, of what is sliced, gathered",
        "or updated in place the part that is touched; no caches. Memory: arguments, temporaries.",
        "Nothing ran, so nothing is timed.",
        "",
        *tables(result["cases"], lambda case: ", ".join(f"`{one}`" for one in case["settings"])),
    ]
    lines += ["", f"Machine: {json.dumps(result['machine'])}, JAX {result['jax']}"]
    return "\n".join(lines) + "\n"


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
    cases = [("olmoe_1b_7b", 2, settings) for settings in CASES]
    write_cases("executed", cases, to_markdown, __doc__ or "")
