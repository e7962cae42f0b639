"""What keeps XLA's CPU runtime from computing while a collective is under way?

No moejax in it but one call: a program of four chunks, each sent, computed and sent back, in which
sending and computing are waits of 50 ms that take no core. A wait keeps the thread that called it,
as gloo does, or frees it. Arrays that were sent are held until the end, by `hold`, or not. What is
sent goes one after the other, so no program takes less than 8 waits, and without overlap it takes
12. Writes overlap.json and overlap.md.

    python -m benchmarks.cpu.overlap --out benchmarks/results
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import RESULTS, stamp
from benchmarks.waits import register, wait
from moejax.comm.cpu import exchange

CHUNKS, SECONDS, ROUNDS = 4, 0.05, 9
KINDS = ("keeps", "frees")  # the thread


def program(wire: str, compute: str, held: bool) -> Callable:
    """The chunks: dispatch of all, compute of each, combine of each."""

    def run(x: jax.Array) -> jax.Array:
        token, moved, results = jnp.float32(0), [], []

        def send(x: jax.Array) -> jax.Array:
            nonlocal token
            arrived = wait(wire, x + token, SECONDS)
            token = arrived[0, 0] * 0
            moved.extend([x, arrived])
            return arrived

        arrived = [send(x + number) for number in range(CHUNKS)]
        computed = [wait(compute, jnp.sin(x) * 2, SECONDS) + 1 for x in arrived]
        results = [send(x) for x in computed]
        total = sum(results[1:], results[0])
        return exchange.hold(total, moved) if held else total

    return run


def measure() -> list[dict[str, Any]]:
    """Every form, in turns."""
    x = jnp.ones((640, 512))
    forms = list(itertools.product(KINDS, KINDS, (False, True)))
    programs = [jax.jit(program(*form)).lower(x).compile() for form in forms]
    seconds: list[list[float]] = [[] for _ in forms]
    for number in range(-1, ROUNDS):
        for run, taken in zip(programs, seconds, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(run(x))
            if number >= 0:
                taken.append(time.perf_counter() - began)
    names = ("wire", "compute", "held")
    return [
        dict(zip(names, form, strict=True)) | {"seconds": taken}
        for form, taken in zip(forms, seconds, strict=True)
    ]


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# What XLA's CPU runtime overlaps",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {record['machine']['cpu']}, JAX {record['jax']}, Python "
        f"{record['python']}. Median of {ROUNDS} rounds, in waits.",
        "",
        "| a wait for the wire | a wait for compute | what was sent | waits (range) |",
        "|---|---|---|---:|",
    ]
    for row in record["results"]:
        taken = sorted(seconds / SECONDS for seconds in row["seconds"])
        held = "is held" if row["held"] else "is not held"
        lines.append(
            f"| {row['wire']} the thread | {row['compute']} the thread | {held} | "
            f"{median(taken):.1f} ({taken[0]:.1f} to {taken[-1]:.1f}) |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    mesh = jax.make_mesh((1,), ("all",))
    if exchange.connected(mesh) is None:
        sys.exit("cannot measure: no exchange")
    register()
    record = {"results": measure()} | stamp()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "overlap.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "overlap.md").write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
