"""Tokens a second of moejax's engine beside transformers, taken in turns.

A random Mixtral is imported, and exported again: moejax reads the checkpoint, transformers the
export. Each side is a process of its own that loads its weights, continues the same prompts
greedily with a cache, and then waits; the two never run at the same time, and the order is swapped
every round. Starting, loading and compiling are on neither side. Only the ratio is claimed.

Run in moejax's environment; the side of transformers has its own (see README.md). Writes
generate.json and generate.md.

    python -m benchmarks.cpu.generate --torch-python .venv-parity/bin/python
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cpu.mixtral import config_of, write_mixtral
from benchmarks.cpu.step import ALLOCATOR, MAX_IDLE_SHARE, Worker, pin, start_worker
from benchmarks.machine import RESULTS, ROOT, Clock, spread, stamp
from moejax.errors import InputError

CONFIG = config_of(layers=8, width=512, heads=8, experts=16, hidden=1024, vocabulary=32_000)
EQUAL = ("1", "8", "32")  # requests of one length
PROMPT, TOKENS = 64, 32
SLOTS = 64
SIDES = {"moejax": "moejax_generate.py", "transformers": "torch_generate.py"}
# The variants that take turns, by workload. transformers has two implementations of experts:
# grouped_mm is its default, eager a loop over experts, which is faster on some CPUs.
VARIANTS = {
    **{name: ("together", "grouped_mm", "eager") for name in EQUAL},
    "mixed": ("together", "grouped_mm", "batches of 8", "continuous"),
    "mixed64": ("together", "alone"),
}
OURS = ("together", "alone")


def workloads() -> dict[str, list[dict[str, Any]]]:
    """Returns by name requests of uniform token ids: prompts, and how many tokens continue each.

    In those of seed 0 two experts are tied: a router's second and third logit are 3e-6 apart.
    """
    rng = np.random.default_rng(1)

    def request(prompt: int, tokens: int) -> dict[str, Any]:
        return {"ids": rng.integers(0, CONFIG["vocab_size"], prompt).tolist(), "tokens": tokens}

    found = {name: [request(PROMPT, TOKENS) for _ in range(int(name))] for name in EQUAL}
    lengths = np.exp(rng.uniform(np.log(8), np.log([256, 128]), (64, 2))).astype(int).tolist()
    mixed = [request(*pair) for pair in lengths]
    return found | {"mixed": mixed[:32], "mixed64": mixed}


def write_weights(place: Path) -> dict[str, str]:
    """Writes a folder of weights, imports it and exports it; returns what each side reads."""
    write_mixtral(place / "model", CONFIG, "F32")
    moejax = [sys.executable, "-m", "moejax", "hf"]
    for words in (
        ["import", str(place / "model"), "--out", str(place / "imported")],
        ["export", str(place / "imported"), "--out", str(place / "exported"), "--dtype", "float32"],
    ):
        subprocess.run([*moejax, *words], cwd=ROOT, check=True)
    return {"run": str(place / "imported"), "folder": str(place / "exported")}


def start_sides(args: argparse.Namespace, place: Path, threads: int) -> list[Worker]:
    """Starts both processes and waits until they have their weights."""
    request = {"workloads": workloads(), "slots": SLOTS, "threads": threads}
    request |= write_weights(place) | {"overrides": args.set}
    environment = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": str(threads)}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # so that compiling is measured
    pythons = {"moejax": sys.executable, "transformers": args.torch_python}
    started: list[Worker] = []
    try:
        for name, script in SIDES.items():
            started.append(start_worker(name, pythons[name], script, request, environment))
    except BaseException:
        stop(started)
        raise
    return started


def stop(sides: list[Worker]) -> None:
    """Ends both processes."""
    for side in sides:
        side.process.kill()


def turns(sides: list[Worker]) -> list[tuple[str, str, Worker]]:
    """Returns what takes turns: workload, variant and process."""
    ours, theirs = sides
    return [
        (workload, variant, ours if variant in OURS else theirs)
        for workload, variants in VARIANTS.items()
        for variant in variants
    ]


def check_alike(sides: list[Worker]) -> dict[str, Any]:
    """Compiles and warms up. Returns the share of tokens that are equal, and the first seconds.

    Raises:
      RuntimeError: if a side continues prompts of one length by other tokens.
    """
    found: dict[str, Any] = {}
    for workload, variant, side in turns(sides):
        answer = side.ask(f"run {workload} {variant}")
        ids = [token for own in answer["ids"] for token in own]
        of_workload = found.setdefault(workload, {})
        reference = of_workload.setdefault("ids", ids)
        same = sum(a == b for a, b in zip(ids, reference, strict=True)) / len(ids)
        if same < 1 and workload in EQUAL:
            raise RuntimeError(f"{variant}, {workload}: {same:.0%} of the tokens are equal.")
        of_workload[variant] = {"equal": same, "first_run_seconds": answer["seconds"]}
    for of_workload in found.values():
        del of_workload["ids"]
    return found


def measure(sides: list[Worker], rounds: int, cpus: list[int]) -> dict[str, Any]:
    """Takes turns; returns what each said, by workload, variant and round."""
    said: dict[str, dict[str, list]] = {}
    clock, own, idle = Clock(cpus), 0.0, {side.name: [0.0, 0.0] for side in sides}
    for number in range(rounds):
        order = turns(sides)
        for workload, variant, side in order if number % 2 == 0 else order[::-1]:
            answer = side.ask(f"run {workload} {variant}")
            firsts = answer.pop("first_seconds")
            turn = {"first": median(firsts), "prompts": max(firsts)}
            turn |= {"whole": answer["seconds"], "cpu": answer["cpu_seconds"]}
            said.setdefault(workload, {}).setdefault(variant, []).append(turn)
            own += answer["cpu_seconds"]
            if number:  # the first wait began before the rounds did
                idle[side.name][0] += answer["idle_cpu_seconds"]
                idle[side.name][1] += answer["idle_seconds"]
        print(f"round {number + 1} of {rounds}", flush=True)
    return {
        "seconds": said,
        "others_cpu_share": clock.others_share(own),
        "waiting_cpu_share": {name: cpu / max(wall, 1e-9) for name, (cpu, wall) in idle.items()},
    }


def speeds(workload: str, rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """Returns tokens a second of each round: of the whole workload, and of a second of CPU.

    For requests of one length also those after the first, and of the prompts, which end with the
    last first token.
    """
    requests = workloads()[workload]
    tokens = sum(r["tokens"] for r in requests)
    found = {
        "whole": [tokens / turn["whole"] for turn in rounds],
        "cpu": [tokens / turn["cpu"] for turn in rounds],
        "first": [1 / turn["first"] for turn in rounds],
    }
    if workload in EQUAL:
        prompts, rest = sum(len(r["ids"]) for r in requests), tokens - len(requests)
        found["decoding"] = [rest / (turn["whole"] - turn["prompts"]) for turn in rounds]
        found["prompt"] = [prompts / turn["prompts"] for turn in rounds]
    return found


def compare(seconds: dict[str, Any]) -> dict[str, Any]:
    """Returns, by workload and part: speeds, and those of `together` over the others'."""
    found: dict[str, Any] = {}
    for workload, variants in seconds.items():
        by_name = {name: speeds(workload, turns) for name, turns in variants.items()}
        ours = by_name["together"]
        found[workload] = {
            part: {
                "speed": {name: spread(parts[part]) for name, parts in by_name.items()},
                "ratio": {
                    name: spread([a / b for a, b in zip(ours[part], parts[part], strict=True)])
                    for name, parts in by_name.items()
                    if name != "together"
                },
            }
            for part in ours
        }
    return found


def bounds(facts: dict[str, float], compared: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns, of requests of one length, the seconds of a decoding step and what they cannot pass.

    That is the time to read the weights that a step needs, or of its products if that is longer.
    Uniform routing meets E (1 - (1 - K / E)^n) experts of a layer with n tokens.
    """
    E, K = CONFIG["num_local_experts"], CONFIG["num_experts_per_tok"]
    found = {}
    for workload in EQUAL:
        n = int(workload)
        met = E * (1 - (1 - K / E) ** n)
        read = facts["bytes_of_all"] + met * facts["bytes_of_an_expert"]
        flops = 2 * n * (facts["bytes_of_all"] + K * facts["bytes_of_an_expert"]) / 4
        reading, multiplying = (
            read / facts["read_bytes_per_second"],
            flops / facts["flops_per_second"],
        )
        step = n / compared[workload]["decoding"]["speed"]["together"]["median"]
        bound = max(reading, multiplying)
        found[workload] = {
            "bytes": read,
            "flops": flops,
            "bound_seconds": bound,
            "step_seconds": step,
            "over_bound": step / bound,
        }
    return found


def run(args: argparse.Namespace, cpus: list[int]) -> dict[str, Any]:
    """Runs everything and returns the result."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as place:
        sides = start_sides(args, Path(place), len(cpus))
        try:
            warm = check_alike(sides)
            measured = measure(sides, args.rounds, cpus)
        finally:
            stop(sides)
    compared = compare(measured["seconds"])
    return {
        "question": "tokens a second of moejax's engine beside transformers",
        "model": CONFIG,
        "rounds": args.rounds,
        "slots": SLOTS,
        "sides": {side.name: side.facts for side in sides},
        "environment": ALLOCATOR,
        "first_runs": warm,
        "speeds": compared,
        "bounds": bounds(sides[0].facts["bound"], compared),
        **measured,
        **stamp(),
    }


LABELS = {
    "whole": "prompts and all tokens",
    "decoding": "tokens after the first",
    "prompt": "prompts (their tokens a second)",
    "first": "median seconds to the first token",
    "cpu": "all, a second of CPU",
}
TITLES = {name: f"{name} request{'s' * (name != '1')}" for name in EQUAL} | {
    "mixed": "32 mixed requests",
    "mixed64": "64 mixed requests",
}


def tables(result: dict[str, Any]) -> list[str]:
    """Returns a table for each workload."""
    lines: list[str] = []
    for workload, parts in result["speeds"].items():
        others = list(parts["whole"]["ratio"])
        lines += [
            f"## {TITLES[workload]}",
            "",
            f"| {' | '.join(['', 'moejax', *others, *(f'over {one}' for one in others)])} |",
            "|---|" + "---:|" * (1 + 2 * len(others)),
        ]
        for part in [name for name in LABELS if name in parts]:
            speed, ratio = parts[part]["speed"], parts[part]["ratio"]
            medians = [one["median"] for one in speed.values()]
            shown = [f"{1 / x:.2f} s" if part == "first" else f"{x:.1f}" for x in medians]
            cells = [LABELS[part], *shown]
            cells += [
                f"**{r['median']:.2f}** ({r['minimum']:.2f} to {r['maximum']:.2f})"
                for r in ratio.values()
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def bound_lines(result: dict[str, Any]) -> list[str]:
    """Returns the table of decoding steps beside their bound."""
    facts = result["sides"]["moejax"]["bound"]
    lines = [
        "## A decoding step beside its bound",
        "",
        f"This machine reads {facts['read_bytes_per_second'] / 1e9:.1f} GB/s from memory with all "
        f"its threads and multiplies {facts['flops_per_second'] / 1e9:.0f} GFLOP/s (float32, 2048 "
        "x 2048), measured by moejax's side. A step reads the weights of attention, routers and "
        "vocabulary, and of the experts that its tokens meet (uniform routing).",
        "",
        "| requests | weights (MB) | GFLOP | bound (ms) | step (ms) | step / bound |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for workload, b in result["bounds"].items():
        lines.append(
            f"| {workload} | {b['bytes'] / 1e6:.0f} | {b['flops'] / 1e9:.2f} "
            f"| {1e3 * b['bound_seconds']:.1f} | {1e3 * b['step_seconds']:.1f} "
            f"| **{b['over_bound']:.2f}** |"
        )
    return [*lines, ""]


def doubts(result: dict[str, Any]) -> list[str]:
    """Returns what makes the result doubtful."""
    found = []
    others = result["others_cpu_share"]
    if others is None or others > MAX_IDLE_SHARE:
        share = "an unknown share" if others is None else f"{100 * others:.0f} %"
        found.append(f"Other processes used {share} of the CPUs meanwhile: repeat on an idle one.")
    for name, share in result["waiting_cpu_share"].items():
        if share > MAX_IDLE_SHARE:
            found.append(f"{name} used {100 * share:.0f} % of a CPU while it should have waited.")
    return found


def page(result: dict[str, Any]) -> str:
    """Returns the page."""
    sides, model = result["sides"], result["model"]
    mixed = workloads()["mixed64"]
    prompts, tokens = [len(r["ids"]) for r in mixed], [r["tokens"] for r in mixed]
    compiled = {
        workload: of["together"]["first_run_seconds"]
        for workload, of in result["first_runs"].items()
    }
    steady = {w: median(t["whole"] for t in v["together"]) for w, v in result["seconds"].items()}
    compiling = ", ".join(f"{TITLES[w]} {compiled[w] - steady[w]:.1f} s" for w in compiled)
    equal = result["first_runs"]["mixed"]
    lines = [
        "# Tokens a second, beside transformers",
        "",
        "`python -m benchmarks.cpu.generate --torch-python .venv-parity/bin/python "
        f"--rounds {result['rounds']}`",
        "",
        "Tokens a second, and moejax's over those of the others: above 1 moejax is faster. "
        f"Median and range of {result['rounds']} rounds, in turns.",
        "",
        *tables(result),
        *bound_lines(result),
        "## How",
        "",
        f"A Mixtral of {sides['transformers']['parameters'] / 1e6:.0f} million random parameters "
        f"({model['num_hidden_layers']} blocks, width {model['hidden_size']}, "
        f"{model['num_local_experts']} experts, top {model['num_experts_per_tok']}), float32, from "
        f"one export. 1, 8 and 32 requests have prompts of {PROMPT} tokens and {TOKENS} that "
        "continue them, and all tokens are equal on all sides. Mixed requests have prompts of "
        f"{min(prompts)} to {max(prompts)} tokens and {min(tokens)} to {max(tokens)} that continue "
        "them, logarithms uniform; all arrive at once. Tokens that equal moejax's there: "
        + ", ".join(
            f"{name} {100 * one['equal']:.1f} %"
            for name, one in equal.items()
            if name != "together"
        )
        + ".",
        "",
        f'moejax: the engine of `moejax generate` with at most {result["slots"]} slots; "alone" is '
        "one request after the other. transformers: eager, sdpa attention, a cache that grows; "
        "grouped_mm (its default) and eager are implementations of experts, in one batch, padded "
        'to the longest and until the longest ends; "batches of 8" are of the requests in order; '
        '"continuous" is its `ContinuousBatchingManager`, ready and warm.',
        "",
        "Loading and compiling are on neither side. moejax compiles, without a cache, before: "
        f"{compiling}.",
        "Profile: [docs/log.md](../../docs/log.md).",
        "",
        *(f"* {name}: {versions(side)}" for name, side in sides.items()),
        *(f"* doubtful: {doubt}" for doubt in doubts(result)),
        f"* {result['date']}, machine: {json.dumps(result['machine'])}",
    ]
    return "\n".join(lines) + "\n"


def versions(side: dict[str, Any]) -> str:
    """Returns the versions of a side's packages as text."""
    return ", ".join(f"{package} {version}" for package, version in side["versions"].items())


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--torch-python", required=True, help="Python with transformers, see README.md")
    add("--rounds", type=int, default=7, help="turns of each side")
    add("--threads", type=int, default=2, help="CPUs that both sides may use")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="a setting of moejax")
    add("--scratch", type=Path, help="directory with 5 GB free (default: /tmp)")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name} is {getattr(args, name)}. It must be at least 1. Raise it.")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    try:
        args = parse(argv)
        result = run(args, pin(args.threads))
    except InputError as error:
        print(f"generate: error: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "generate.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "generate.md").write_text(page(result))
    print(page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
