"""What do the shipped configs need on nodes of eight H200s, and how much of the exchange is hidden?

Compiles the trainer's own step for described clusters; needs moejax[aot] and no GPU. Nothing runs,
so nothing is timed but the compiler. Writes aot.json and aot.md.

    .venv-aot/bin/python -m benchmarks.aot --out benchmarks/results
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from benchmarks.machine import ROOT, describe

Case = tuple[str, int, list[str]]  # config, nodes, settings

# Nearly all of a device's memory is weights.
FEW_TOKENS = ["mesh.fsdp=8", "mesh.expert=1", "model.remat=full"]
FEW_TOKENS += ["train.batch_sequences=16", "data.sequence_length=512"]
# How often weights cross nodes, where all devices share them.
ACROSS = ("flat", "use", "passes", "step")


def over_all(nodes: int, gather_across: str) -> list[str]:
    """Weights sharded over all devices; two micro-batches of four sequences a device."""
    settings = [f"mesh.fsdp={8 * nodes}", "mesh.expert=1", "model.remat=full"]
    settings += ["train.micro_batches=2", f"train.batch_sequences={64 * nodes}"]
    return [*settings, f"mesh.gather_across={gather_across}"]


# Two stages on two nodes: what alternating layers of both passes hide, where buckets may overflow.
STAGES = ["mesh.stage=2", "mesh.fsdp=1", "mesh.expert=8", "model.remat=full"]
STAGES += ["train.micro_batches=8"]
COMBINED = [*STAGES, "mesh.schedule=combined_1f1b"]
# With copies of hot experts: overflow rounds in the program, and none.
ROUNDS = (["moe.slots=1"], ["moe.slots=1", "moe.capacity_factor=1.25"])
# Config, nodes, settings that fit it to so many devices.
CASES = (
    ("tiny", 1, []),
    ("olmoe_1b_7b", 1, []),
    ("olmoe_1b_7b", 1, ["route_chunks=4"]),
    ("olmoe_1b_7b", 1, [*FEW_TOKENS, "train.micro_batches=1"]),
    ("olmoe_1b_7b", 1, [*FEW_TOKENS, "train.micro_batches=2"]),
    ("olmoe_1b_7b", 2, ["route_chunks=4", "mesh.fsdp=2"]),
    ("mixtral_8x7b", 2, ["route_chunks=4", "mesh.fsdp=2", "train.micro_batches=16"]),
    ("qwen3_30b_a3b", 2, ["route_chunks=4", "mesh.fsdp=2", "train.micro_batches=16"]),
    ("olmoe_1b_7b", 32, ["route_chunks=4", "mesh.fsdp=32", "train.micro_batches=1"]),
    ("mixtral_8x7b", 32, ["route_chunks=4", "mesh.replica=4", "train.micro_batches=1"]),
    ("qwen3_30b_a3b", 32, ["route_chunks=4", "mesh.replica=4", "train.micro_batches=1"]),
    ("olmoe_1b_7b", 2, STAGES),
    ("olmoe_1b_7b", 2, COMBINED),
    ("olmoe_1b_7b", 2, [*COMBINED, "moe.capacity_factor=1.25"]),
    *(("olmoe_1b_7b", 2, [*COMBINED, *copies]) for copies in ROUNDS),
    *(("olmoe_1b_7b", 1, ["route_chunks=4", *copies]) for copies in ROUNDS),
    *(("olmoe_1b_7b", nodes, over_all(nodes, across)) for nodes in (2, 8) for across in ACROSS),
)


def compile_case(config: str, nodes: int, settings: list[str]) -> dict[str, Any]:
    """Runs the command on one case, and keeps what the page shows."""
    words = ["--config", f"configs/{config}.py", "--nodes", str(nodes), "--json"]
    command = [sys.executable, "-m", "moejax.aot", *words]
    command += [f"--config.{setting}" for setting in settings]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (step,) = json.loads(done.stdout).values()
    return {"config": config, "nodes": nodes, "settings": settings} | step


def to_markdown(result: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# The train step, compiled for nodes of eight H200s",
        "",
        "`.venv-aot/bin/python -m benchmarks.aot`",
        "",
        "Peak: of a device, which has 141 GiB. Hidden: of the all-to-alls that carry tokens, those",
        "that enclose a matrix product, both ways, and their number in a step for those of rows;",
        "with 4 chunks 75 % is all but the ends.",
        "Reductions and gathers: the same share, of the bytes of gradients that are summed in the",
        "backward pass and of weights that are gathered. Beside: reductions in flight with an",
        "all-to-all on a link that both use. Nothing ran: order, not time.",
        "",
        "| config | nodes | changed | peak, GiB | state, GiB | hidden | reductions | beside | "
        "gathers | compiled in |",
        "|---|---:|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for case in result["cases"]:
        changed = ", ".join(f"`{setting}`" for setting in case["settings"])
        sizes = [case[name] / 2**30 for name in ("peak_bytes", "argument_bytes")]
        cells = [case["config"], str(case["nodes"]), changed, *(f"{size:.1f}" for size in sizes)]
        hidden, sent = rows_hidden(case)
        cells += [f"{case['hidden_forward']:.0%}, {case['hidden_backward']:.0%}; {hidden}/{sent}"]
        cells += [f"{case['hidden_reductions']:.0%}", str(case["reductions_beside_exchanges"])]
        cells += [f"{case['hidden_gathers']:.0%}"]
        lines.append("| " + " | ".join([*cells, f"{case['seconds']:.0f} s"]) + " |")
    lines += ["", f"Machine: {json.dumps(result['machine'])}, JAX {result['jax']}"]
    return "\n".join(lines) + "\n"


def rows_hidden(case: dict[str, Any]) -> tuple[int, int]:
    """All-to-alls of rows that enclose a product, and all of them; rows have most bytes."""
    found: dict[str, list[int]] = {}
    for one in case["collectives"]:
        if one["kind"] == "all_to_all":
            sums = found.setdefault(one["dtype"], [0, 0, 0])
            for place, name in enumerate(("bytes", "enclose_a_product", "arrays")):
                sums[place] += one[name]
    _, hidden, sent = max(found.values(), default=[0, 0, 0])
    return hidden, sent


def write_cases(
    name: str,
    cases: Iterable[Case],
    to_markdown: Callable[[dict[str, Any]], str],
    about: str,
    compile_one: Callable[..., dict[str, Any]] = compile_case,
) -> None:
    """Compiles case after case, and writes name.json and name.md after each.

    With --only it compiles the cases that have a text, and keeps the others of the page before.

    Args:
      about: of the command, for its help.
      compile_one: returns what the page shows of a case.
    """
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", help="compile the cases that have this text, keep the others")
    args = parser.parse_args()
    machine = describe(sorted(os.sched_getaffinity(0)))
    result: dict[str, Any] = {"cases": [], "machine": machine, "jax": jax.__version__}
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{name}.json"
    before = json.loads(file.read_text())["cases"] if args.only else []
    cases = list(cases)
    every: dict[str, list] = {str(case): [] for case in cases}
    for one in before:
        every.get(str(tuple(one.values())[:3]), []).append(one)
    for case in cases:
        if not args.only or args.only in str(case):
            every[str(case)] = [compile_one(*case)]
        elif not every[str(case)]:
            print(f"left out, as the page before has it not: {case}")
        result["cases"] = [one for found in every.values() for one in found]
        file.write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".md").write_text(to_markdown(result))
    print(to_markdown(result))


if __name__ == "__main__":
    write_cases("aot", CASES, to_markdown, __doc__ or "")
