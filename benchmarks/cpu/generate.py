"""Tokens a second of `moejax generate`'s engine beside transformers' `generate`, taken in turns.

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
from typing import Any

import numpy as np

from benchmarks.cpu.mixtral import config_of, write_mixtral
from benchmarks.cpu.step import ALLOCATOR, MAX_IDLE_SHARE, Worker, pin, start_worker
from benchmarks.machine import RESULTS, ROOT, Clock, spread, stamp
from moejax.errors import InputError

CONFIG = config_of(layers=8, width=512, heads=8, experts=16, hidden=1024, vocabulary=32_000)
ROWS = (1, 8)
PROMPT, TOKENS = 64, 32
SIDES = {"moejax": "moejax_generate.py", "transformers": "torch_generate.py"}
# Implementations of transformers' experts: its default, and a loop over experts, which is faster on
# some CPUs.
EXPERTS = ("grouped_mm", "eager")


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


def prompts() -> list[list[int]]:
    """Returns uniform token ids, the same on both sides.

    In those of seed 0 two experts are tied: a router's second and third logit are 3e-6 apart.
    """
    shape = (max(ROWS), PROMPT)
    return np.random.default_rng(1).integers(0, CONFIG["vocab_size"], shape).tolist()


def start_sides(args: argparse.Namespace, place: Path, threads: int) -> list[Worker]:
    """Starts both processes and waits until they have their weights."""
    common = {"prompts": prompts(), "rows": ROWS, "tokens": TOKENS, "threads": threads}
    request = common | write_weights(place) | {"overrides": args.set}
    environment = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": str(threads)}
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


def variants(sides: list[Worker]) -> list[tuple[str, Worker, str | None]]:
    """Returns what takes turns: name, process, and the experts that are asked for."""
    ours, theirs = sides
    return [("moejax", ours, None), *((name, theirs, name) for name in EXPERTS)]


def take(side: Worker, experts: str | None, rows: int, tokens: int) -> dict[str, Any]:
    """Returns a side's answer to one request to generate, with its wait before that."""
    waited = dict.fromkeys(("idle_seconds", "idle_cpu_seconds"), 0.0)
    if experts is not None:
        waited = side.ask(f"experts {experts}")
    answer = side.ask(f"generate {rows} {tokens}")
    return answer | {name: answer[name] + waited[name] for name in waited}


def check_alike(sides: list[Worker]) -> None:
    """Compiles and warms up; raises unless all continue all prompts by the same tokens."""
    for rows in ROWS:
        found = {
            name: np.array(take(side, experts, rows, TOKENS)["ids"])
            for name, side, experts in variants(sides)
        }
        for name, ids in found.items():
            same = np.mean(ids == found["moejax"])
            if same < 1:
                raise RuntimeError(f"{name}, {rows} prompts: {same:.0%} of the tokens are equal.")


def measure(sides: list[Worker], rounds: int, cpus: list[int]) -> dict[str, Any]:
    """Takes turns; returns seconds by name, number of prompts and round."""
    seconds: dict[str, dict[str, list]] = {}
    clock, own, idle = Clock(cpus), 0.0, {side.name: [0.0, 0.0] for side in sides}
    for number in range(rounds):
        order = variants(sides)
        for name, side, experts in order if number % 2 == 0 else order[::-1]:
            for rows in ROWS:
                found = take(side, experts, rows, TOKENS)
                turn = {"prompt": found["first_seconds"], "whole": found["seconds"]}
                turn["cpu"] = found["cpu_seconds"]
                seconds.setdefault(name, {}).setdefault(str(rows), []).append(turn)
                own += found["cpu_seconds"]
                if number:  # the first wait began before the rounds did
                    idle[side.name][0] += found["idle_cpu_seconds"]
                    idle[side.name][1] += found["idle_seconds"]
        print(f"round {number + 1} of {rounds}", flush=True)
    return {
        "seconds": seconds,
        "others_cpu_share": clock.others_share(own),
        "waiting_cpu_share": {name: cpu / max(wall, 1e-9) for name, (cpu, wall) in idle.items()},
    }


def speeds(turns: list[dict[str, float]], rows: int) -> dict[str, list[float]]:
    """Returns tokens a second of each round: all of them, those after the first, the prompt's.

    The prompt ends with the first token. "cpu" is of a second of CPU, of all threads of the side.
    """
    return {
        "whole": [rows * TOKENS / turn["whole"] for turn in turns],
        "decoding": [rows * (TOKENS - 1) / (turn["whole"] - turn["prompt"]) for turn in turns],
        "prompt": [rows * PROMPT / turn["prompt"] for turn in turns],
        "cpu": [rows * TOKENS / turn["cpu"] for turn in turns],
    }


def compare(seconds: dict[str, Any]) -> dict[str, Any]:
    """Returns, by number of prompts and part: speeds, and moejax's over each of transformers'."""
    found: dict[str, Any] = {}
    for rows in map(str, ROWS):
        by_name = {name: speeds(turns[rows], int(rows)) for name, turns in seconds.items()}
        ours = by_name["moejax"]
        found[rows] = {
            part: {
                "speed": {name: spread(parts[part]) for name, parts in by_name.items()},
                "ratio": {
                    name: spread([a / b for a, b in zip(ours[part], parts[part], strict=True)])
                    for name, parts in by_name.items()
                    if name != "moejax"
                },
            }
            for part in ours
        }
    return found


def run(args: argparse.Namespace, cpus: list[int]) -> dict[str, Any]:
    """Runs everything and returns the result."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as place:
        sides = start_sides(args, Path(place), len(cpus))
        try:
            check_alike(sides)
            measured = measure(sides, args.rounds, cpus)
        finally:
            stop(sides)
    return {
        "question": "tokens a second of moejax generate beside transformers' generate",
        "model": CONFIG,
        "rounds": args.rounds,
        "prompt_tokens": PROMPT,
        "generated_tokens": TOKENS,
        "sides": {side.name: side.facts for side in sides},
        "environment": ALLOCATOR,
        "speeds": compare(measured["seconds"]),
        **measured,
        **stamp(),
    }


def rows_of(result: dict[str, Any]) -> list[str]:
    """Returns the lines of the table."""
    labels = {"whole": "prompt and all tokens", "decoding": "tokens after the first"}
    labels |= {"prompt": "prompt (its tokens a second)", "cpu": "all, a second of CPU"}
    lines = []
    for rows, parts in result["speeds"].items():
        for part, label in labels.items():
            speed, ratio = parts[part]["speed"], parts[part]["ratio"]
            cells = [rows, label, *(f"{speed[name]['median']:.1f}" for name in speed)]
            cells += [
                f"**{r['median']:.2f}** ({r['minimum']:.2f} to {r['maximum']:.2f})"
                for r in ratio.values()
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


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
    lines = [
        "# Tokens a second, beside transformers",
        "",
        "`python -m benchmarks.cpu.generate --torch-python .venv-parity/bin/python`",
        "",
        "Tokens a second, and moejax's over those of transformers: above 1 moejax is faster. "
        f"Median and range of {result['rounds']} rounds, in turns.",
        "",
        "| prompts | part | moejax | grouped_mm | eager | over grouped_mm | over eager |",
        "|---:|---|---:|---:|---:|---:|---:|",
        *rows_of(result),
        "",
        f"A Mixtral of {sides['transformers']['parameters'] / 1e6:.0f} million random parameters "
        f"({model['num_hidden_layers']} blocks, width {model['hidden_size']}, "
        f"{model['num_local_experts']} experts, top {model['num_experts_per_tok']}), float32, from "
        "one export. Prompts of "
        f"{result['prompt_tokens']} tokens, {result['generated_tokens']} generated greedily, with "
        "a cache of keys and values on both sides; all tokens are equal on both. Loading, and what "
        "the first call compiles, are on neither side. transformers is eager, with sdpa attention "
        "and a cache that grows, its defaults, and with each of two implementations of experts: "
        "grouped_mm is its default, eager a loop over experts. Profile: "
        "[docs/log.md](../../docs/log.md).",
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
