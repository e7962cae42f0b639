"""What do order and size of gradient reductions do to all-to-alls that share their link?

Two emulated hosts of one device each. The backward pass of some layers, in four orders:

    whole     each gradient is reduced whole as soon as it is ready: first in, first out
    pieces    the same in pieces
    planned   in pieces, as many into each gap of compute as it has time for, none in front of an
              all-to-all; the rest rolls on (workers/gaps.py)
    deferred  all reductions after the last all-to-all

An all-to-all waits from the time its rows are ready to the time they have arrived. Needs root, ip
and tc. Writes reduction.json and reduction.md.

    python -m benchmarks.emulated.reduction --out benchmarks/results
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.emulated.cluster import run_case
from benchmarks.machine import RESULTS, stamp

HERE = Path(__file__).parent
ORDERS = ("whole", "pieces", "planned", "deferred")
LAYERS = 3
MIB = 2**18  # float32 values in a mebibyte


def cases() -> list[dict[str, Any]]:
    """Sizes of pieces, then of gradients, then other rates."""
    base = {
        "hosts": 2,
        "devices": 1,
        "layers": LAYERS,
        "orders": ORDERS,
        "rate": 200,
        "tokens": 4 * MIB,
        "gradient": 12 * MIB,
        "products": 20,
        "pieces": 48,
        "rounds": 5,
    }
    sweep = [base | {"pieces": pieces} for pieces in (3, 12, 48, 192)]
    sweep += [base | {"gradient": 4 * size * MIB, "pieces": 16 * size} for size in (1, 2, 6)]
    return sweep + [base | {"rate": rate} for rate in (100, 400)]


def main() -> None:
    """Runs the cases and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            size = case["gradient"] / MIB
            print(f"== {case['rate']} Mbit/s, {size:g} MiB, {case['pieces']} pieces", flush=True)
            hosts = run_case(case, HERE / "workers" / "reduction.py", Path(folder))
            results.append({"case": case, "found": summarize(hosts)})
            for line in rows(results[-1]):
                print(line, flush=True)
            write(results, args.out)


def write(results: list[dict[str, Any]], out: Path) -> None:
    """The record and the page of what is there so far."""
    record = {"results": results} | stamp()
    out.mkdir(parents=True, exist_ok=True)
    (out / "reduction.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "reduction.md").write_text(page(record))


def summarize(hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """The slower host's times of each round."""
    found = {}
    for order in ORDERS:
        sides = [host["orders"][order] for host in hosts]
        # Of the layers after the first: before its all-to-all there is nothing to reduce.
        waits = [[sum(layers[1:]) for layers in side["waits"]] for side in sides]
        found[order] = {
            "seconds": list(map(max, zip(*(side["seconds"] for side in sides), strict=True))),
            "waits": list(map(max, zip(*waits, strict=True))),
            "sent": list(map(max, zip(*(side["sent"] for side in sides), strict=True))),
        }
    return found | {"plan": hosts[0]["plan"]}


def rows(result: dict[str, Any]) -> list[str]:
    """A table of the orders; speeds are beside `whole`, by round."""
    case, found = result["case"], result["found"]
    lines = ["| order | all-to-all waits (s) | sooner | step (s, range) | speed | MB sent |"]
    lines.append("|---" * 6 + "|")
    for order in case["orders"]:
        one, base = found[order], found["whole"]
        sooner = _ratio(base["waits"], one["waits"])
        speed = _ratio(base["seconds"], one["seconds"])
        seconds = one["seconds"]
        lines.append(
            f"| {order} | {median(one['waits']):.3f} | {sooner:.2f} | {median(seconds):.3f} "
            f"({min(seconds):.3f} to {max(seconds):.3f}) | {speed:.2f} | "
            f"{median(one['sent']) / 1e6:.1f} |"
        )
    return lines


def _ratio(base: list[float], other: list[float]) -> float:
    return median(b / o for b, o in zip(base, other, strict=True))


def shares(result: dict[str, Any]) -> str:
    """How much of the step both kinds of traffic are, where neither waits for the other."""
    case, one = result["case"], result["found"]["deferred"]
    seconds = median(one["seconds"])
    exchanges = median(one["waits"]) * LAYERS / (LAYERS - 1) / seconds
    crossing = median(one["sent"]) - LAYERS * case["tokens"] * 4 / 2  # half of the rows leave
    reductions = crossing * 8 / (case["rate"] * 1e6) / seconds
    return (
        f"All-to-alls take {exchanges:.0%} of the step with `deferred`; the wire time of "
        f"reductions is {reductions:.0%} of it."
    )


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Order and size of gradient reductions",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for both hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. Waits are summed over the "
        f"{LAYERS - 1} layers that have a reduction before their all-to-all. Sooner and speed are "
        "beside `whole`, medians over rounds in turns.",
        "",
        "Exchanges use both ways of a link at once (docs/decisions/0022), whole gradients too. The "
        "gain of order alone is `planned` beside `pieces`.",
    ]
    for result in record["results"]:
        case = result["case"]
        lines += [
            "",
            f"## {case['rate']} Mbit/s, gradients of {case['gradient'] / MIB:g} MiB, "
            f"{case['pieces']} pieces",
            "",
            f"Each device sends all-to-alls of {case['tokens'] / MIB:g} MiB and a gradient of "
            f"{case['gradient'] / MIB:g} MiB a layer. Pieces in the gaps "
            f"{result['found']['plan']}. {shares(result)}",
            "",
            *rows(result),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
