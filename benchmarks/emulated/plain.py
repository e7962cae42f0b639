"""What can chunks gain on these clusters at all?

The layer of chunks.py once more as a small program of numpy, sockets and threads, with no JAX and
nothing of moejax: the same bytes on the wire and the same products, one thread for each device's
products and threads of their own for each way of dispatch and of combine, so that no transfer waits
for another. It routes, sorts, copies and adds up no rows, so it has less to do than a real layer.
Its products take numpy's time, so only its ratios can be compared with chunks.md. Needs root, ip
and tc. Writes plain.json and plain.md; takes about three minutes.

    python -m benchmarks.emulated.plain --out benchmarks/results
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.emulated.chunks import CHUNKS, SHAPES
from benchmarks.emulated.cluster import run_case
from benchmarks.machine import RESULTS, ROOT, stamp

WORKER = ROOT / "benchmarks/emulated/workers/plain.py"
RATES = (None, 200)  # Mbit/s; None: not shaped
PASSES = {1: "forward", 2: "forward and backward"}
ROUNDS = 7


def measure(hosts: int, devices: int, rate: int | None) -> dict[str, Any]:
    """A cluster's seconds by variant, of the slowest host in each round."""
    case = {"hosts": hosts, "devices": devices, "rate": rate, "hidden": 2048}
    case |= {"chunks": list(CHUNKS), "rounds": ROUNDS}
    with tempfile.TemporaryDirectory() as folder:
        found = run_case(case, WORKER, Path(folder))
    slowest = {name: list(map(max, *(one[name] for one in found))) for name in found[0]}
    return {"case": case, "found": slowest}


def rows(shaped: dict[str, Any], free: dict[str, Any]) -> list[str]:
    """The lines of one cluster: `shaped` at a rate, `free` without one."""
    lines = []
    for number, kind in PASSES.items():
        alone, taken = (
            [median(one["found"][f"{number}, working, {n}"]) for n in CHUNKS]
            for one in (free, shaped)
        )
        experts = alone[0] - median(free["found"][f"{number}, idle, 1"])
        wire = median(shaped["found"][f"{number}, idle, 1"])
        one, four = (shaped["found"][f"{number}, working, {n}"] for n in (1, 4))
        faster = sorted(a / b for a, b in zip(one, four, strict=True))
        texts = [
            f"{shaped['case']['hosts']} x {shaped['case']['devices']}",
            kind,
            ", ".join(f"{x:.3f}" for x in alone),
            f"{alone[-1] / alone[0]:.2f}",
            f"{wire:.3f}, {experts:.3f}",
            ", ".join(f"{x:.3f}" for x in taken),
            f"{taken[-1] / max(wire, experts):.2f}",
            f"{median(faster):.2f} x ({faster[0]:.2f} to {faster[-1]:.2f})",
        ]
        lines.append(f"| {' | '.join(texts)} |")
    return lines


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Chunks in a plain program",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; "
        f"Python {record['python']}, one thread of OpenBLAS a device; median of {ROUNDS} rounds, "
        "variants in turns. Wire: one chunk with idle experts, at 200 Mbit/s. Experts: working "
        "less idle, one chunk, links not shaped.",
        "",
        "| hosts x devices | passes | links not shaped: 1, 2, 4 chunks, s | 4 over 1 | wire, "
        "experts, s | 200 Mbit/s: 1, 2, 4 chunks, s | 4 chunks over the larger | beside 1 |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    results = record["results"]
    for free, shaped in zip(results[::2], results[1::2], strict=True):
        lines += rows(shaped, free)
    return "\n".join([*lines, ""])


def main() -> None:
    """Runs the clusters and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the hosts
    results = [measure(*shape, rate) for shape in SHAPES for rate in RATES]
    record = {"results": results} | stamp()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "plain.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "plain.md").write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
