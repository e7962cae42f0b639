"""Do chunks hide the exchange where computing takes no core?

The layer of chunks.py, its collectives and its links are real, but in place of the experts stand
calls that take a time in proportion to their rows, free the thread and take no core. So hosts and
devices do not compete for cores by computing, and what is measured is the order in which things
run. The least that n chunks can take is the larger of the wire's time and the experts' time plus
an n-th of the wire's: the first chunk's dispatch and the last one's combine stand alone. All
variants of a case run in turns. Needs root, ip, tc and g++. Writes schedule.json and schedule.md.

    python -m benchmarks.emulated.schedule --out benchmarks/results
"""

from statistics import median
from typing import Any

from benchmarks.emulated import chunks
from benchmarks.emulated.exchange import Case, Variants
from benchmarks.emulated.record import record_cases
from benchmarks.waits import BACKWARD

RATE = 200  # Mbit/s
CHUNKS = (1, 2, 4, 8)
TIMES = (0.7, 1.0, 1.4)  # the experts' forward pass over the wire's, about
WIRE = {2: 0.21, 4: 0.16}  # seconds of the wire, forward, by hosts; from chunks.md
TOKENS, TOP = 2048, 2


def case(hosts: int, devices: int) -> Case:
    """All variants of one cluster."""
    rows = TOKENS * TOP / hosts
    variants: Variants = {}
    for kind, measure in chunks.PASSES.items():
        for times in TIMES:
            for count in CHUNKS:
                settings = {
                    "route_chunks": count,
                    "moe.expert_hidden": chunks.EXPERTS["idle"],
                    "seconds_a_row": times * WIRE[hosts] / rows,
                }
                variants[f"{kind}, {times}, {count}"] = (measure, settings)
    base = chunks.case(hosts, devices, RATE)
    return Case("schedule", hosts, devices, RATE, base.config, base.tokens, variants, rounds=5)


def least(wire: float, experts: float, count: int, passes: str) -> float:
    """The least seconds of so many chunks: wire and experts of all passes together."""
    if passes == "forward":
        return max(wire, experts + wire / count)
    shares = (1 / (1 + BACKWARD), BACKWARD / (1 + BACKWARD))
    return sum(max(wire / 2, experts * share + wire / 2 / count) for share in shares)


def rows(result: dict[str, Any]) -> list[str]:
    """The table of one cluster."""
    lines = [
        "| passes | wire, experts, s | chunks | s (range) | the least, s | over the least | "
        "over the larger | beside 1 chunk |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    hosts, found = result["case"]["hosts"], result["found"]
    for passes in chunks.PASSES:
        for times in TIMES:
            experts = times * WIRE[hosts] * (1 if passes == "forward" else 1 + BACKWARD)
            one = found[f"{passes}, {times}, 1"]
            wire = one["counted"] * 8 / (RATE * 1e6)
            for count in CHUNKS:
                taken = found[f"{passes}, {times}, {count}"]["seconds"]
                bound = least(wire, experts, count, passes)
                faster = median(a / b for a, b in zip(one["seconds"], taken, strict=True))
                lines.append(
                    f"| {passes} | {wire:.3f}, {experts:.3f} | {count} | {median(taken):.3f} "
                    f"({min(taken):.3f} to {max(taken):.3f}) | {bound:.3f} | "
                    f"{median(taken) / bound:.2f} | {median(taken) / max(wire, experts):.2f} | "
                    f"{faster:.2f} x |"
                )
    return lines


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Chunks of an expert layer whose experts take no core",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. {TOKENS} tokens of width 512, top {TOP}, "
        f"{RATE} Mbit/s; median of {record['results'][0]['case']['rounds']} rounds. Wire: counted "
        "bytes over the rate. The layer's own work, with no experts and links that are not shaped, "
        "takes 0.02 to 0.05 s forward ([chunks.md](chunks.md)).",
        "",
    ]
    for result in record["results"]:
        one = result["case"]
        lines += [f"## {one['hosts']} hosts of {one['devices']}", "", *rows(result), ""]
    return "\n".join(lines)


def main() -> None:
    """Runs the cases and writes the results."""
    record_cases("schedule", (case(*shape) for shape in chunks.SHAPES), page, __doc__ or "")


if __name__ == "__main__":
    main()
