"""Do chunks hide the exchange of an expert layer behind its experts?

Emulated hosts, the expert axis across them, all on two cores. Experts that
work, and experts with next to nothing to do, in 1, 2 and 4 chunks, with links that are not shaped
and at rates where wire and experts take about as long. All variants of a case run in turns. Needs
root, ip and tc. Writes chunks.json and chunks.md.

    python -m benchmarks.emulated.chunks --out benchmarks/results
"""

from statistics import median
from typing import Any

from benchmarks.emulated.exchange import LAYER, Case, Variants
from benchmarks.emulated.record import record_cases

SHAPES = ((2, 1), (2, 4), (4, 2))  # hosts, devices of each
RATES = (None, 200, 400)  # Mbit/s; None: not shaped
CHUNKS = (1, 2, 4)
PASSES = {"forward": "forward", "forward and backward": "both"}
EXPERTS = {"working": 2048, "idle": 8}  # hidden width
BAR_COMPUTE = 1.05  # four chunks over one, links not shaped
BAR_LARGER = {"forward": 1.15, "forward and backward": 1.25}  # over the larger of wire and experts
BAR_FASTER = 1.3  # four chunks beside one
SHARE = 0.35  # the last two bars hold where wire and experts each have so much of the layer


def case(hosts: int, devices: int, rate: int | None) -> Case:
    """All variants of one cluster at one rate."""
    variants: Variants = {}
    for kind, measure in PASSES.items():
        for work, hidden in EXPERTS.items():
            for chunks in CHUNKS:
                settings = {"route_chunks": chunks, "moe.expert_hidden": hidden}
                variants[f"{kind}, {work}, {chunks}"] = (measure, settings)
    mesh = {"mesh.expert": hosts, "mesh.tensor": devices, "mesh.nodes": hosts, "route": "split"}
    config = LAYER | mesh | {"moe.num_experts": 4 * hosts}
    return Case("chunks", hosts, devices, rate, config, (hosts, 2048 // hosts), variants, rounds=7)


def rows(results: list[dict[str, Any]]) -> list[str]:
    """The table of one cluster, all rates."""
    seconds = {
        (result["case"]["rate"], name): median(found["seconds"])
        for result in results
        for name, found in result["found"].items()
    }
    lines = [
        "| passes | Mbit/s | wire, experts, s | shares of the layer | 1, 2, 4 chunks, s (of 4) | "
        "idle experts | 4 chunks over the larger | 4 chunks beside 1 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in PASSES:
        experts = seconds[None, f"{kind}, working, 1"] - seconds[None, f"{kind}, idle, 1"]
        for result in results:
            rate, found = result["case"]["rate"], result["found"]
            times = {
                work: [seconds[rate, f"{kind}, {work}, {n}"] for n in CHUNKS] for work in EXPERTS
            }
            four = found[f"{kind}, working, 4"]["seconds"]
            one = found[f"{kind}, working, 1"]
            wire = one["counted"] * 8 / (rate * 1e6) if rate else 0.0
            faster = sorted(a / b for a, b in zip(one["seconds"], four, strict=True))
            texts = [
                kind,
                str(rate or "not shaped"),
                f"{wire:.3f}, {experts:.3f}",
                f"{wire / median(one['seconds']):.0%}, {experts / median(one['seconds']):.0%}",
                f"{', '.join(f'{x:.3f}' for x in times['working'])} "
                f"({min(four):.3f} to {max(four):.3f})",
                ", ".join(f"{x:.3f}" for x in times["idle"]),
                f"{times['working'][-1] / max(wire, experts):.2f}",
                f"{median(faster):.2f} x ({faster[0]:.2f} to {faster[-1]:.2f})",
            ]
            lines.append(f"| {' | '.join(texts)} |")
    return lines


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    bars = " and ".join(f"{bar} ({kind})" for kind, bar in BAR_LARGER.items())
    lines = [
        "# Chunks of an expert layer",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. 2048 tokens of width 512, top 2, four "
        "experts a host; median of 7 rounds. Wire: counted bytes over the rate. Experts: working "
        "less idle, one chunk, links not shaped. Wanted: four chunks at most "
        f"{BAR_COMPUTE} times one where links are not shaped; where wire and experts each take "
        f"{SHARE:.0%} of the layer, at most {bars} times the larger, and {BAR_FASTER} x as fast as "
        "one chunk.",
        "",
    ]
    for hosts, devices in SHAPES:
        here = [
            r
            for r in record["results"]
            if (r["case"]["hosts"], r["case"]["devices"]) == (hosts, devices)
        ]
        if here:
            lines += [f"## {hosts} hosts of {devices}", "", *rows(here), ""]
    return "\n".join(lines)


def main() -> None:
    """Runs the cases and writes the results."""
    cases = (case(*shape, rate) for shape in SHAPES for rate in RATES)
    record_cases("chunks", cases, page, __doc__ or "")


if __name__ == "__main__":
    main()
