"""What do micro-batches cost a train step whose gradients cross slow links?

Two emulated hosts of four devices, a replica axis across them, shards and experts inside: gradients
are what crosses. A batch runs whole, in micro-batches, and as so many steps of a part each, which
send all gradients every time. All run in turns. Needs root, ip and tc. Writes micro_batches.json
and micro_batches.md.

    python -m benchmarks.emulated.micro_batches --out benchmarks/results
"""

from statistics import median
from typing import Any

from benchmarks.emulated.compression import CONFIG
from benchmarks.emulated.exchange import Case, Variants
from benchmarks.emulated.record import record_cases

RATES = (50, 200)  # Mbit/s
SEQUENCES, LENGTH = 32, 64
PARTS = (2, 4)
CODECS = {
    "float32": {},
    "int8, error feedback": {
        "compression.dense_gradient": "int8+feedback",
        "compression.expert_gradient": "int8+feedback",
    },
}
BAR = 2.0  # times as fast as so many steps, where gradients dominate: 4 parts at the slowest link


def case(rate: int) -> Case:
    """All variants at one rate."""
    mesh = {"mesh.replica": 2, "mesh.fsdp": 2, "mesh.expert": 2}
    config = CONFIG | mesh | {"data.sequence_length": LENGTH}
    variants: Variants = {}
    for codec, settings in CODECS.items():
        whole = settings | {"train.batch_sequences": SEQUENCES}
        variants[f"{codec}, whole"] = ("step", whole)
        for parts in PARTS:
            cut = whole | {"train.micro_batches": parts}
            variants[f"{codec}, {parts} micro-batches"] = ("step", cut)
            small = settings | {"train.batch_sequences": SEQUENCES // parts}
            variants[f"{codec}, {parts} steps"] = ("step", small)
    return Case("micro-batches", 2, 4, rate, config, (SEQUENCES, LENGTH), variants, rounds=5)


def rows(result: dict[str, Any]) -> list[str]:
    """A rate's table."""
    found = result["found"]
    lines = [
        "| gradients | parts | whole, s | micro-batches, s (range) | steps of a part, s | "
        "MB sent: whole, micro-batches, steps | micro-batches beside steps |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for codec in CODECS:
        whole = found[f"{codec}, whole"]
        for parts in PARTS:
            cut, steps = (found[f"{codec}, {parts} {kind}"] for kind in ("micro-batches", "steps"))
            pairs = zip(steps["seconds"], cut["seconds"], strict=True)
            ratios = sorted(parts * one / other for one, other in pairs)
            sent = [median(x["sent"]) / 1e6 for x in (whole, cut, steps)]
            sent[2] *= parts
            seconds = cut["seconds"]
            lines.append(
                f"| {codec} | {parts} | {median(whole['seconds']):.2f} | {median(seconds):.2f} "
                f"({min(seconds):.2f} to {max(seconds):.2f}) | "
                f"{parts * median(steps['seconds']):.2f} | "
                f"{sent[0]:.1f}, {sent[1]:.1f}, {sent[2]:.1f} | **{median(ratios):.2f} x** "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
            )
    return lines


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Micro-batches in the train step",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for both hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. {SEQUENCES} sequences of {LENGTH} tokens "
        "a step; median of 5 rounds. Steps of a part: their time, and bytes, as many times as "
        "there are parts; each updates the weights too, which micro-batches do once. They send "
        "what micro-batches would if each summed its gradients over copies. Wanted with 4 parts "
        f"at the slowest link: {BAR:.0f} x.",
        "",
    ]
    for result in record["results"]:
        lines += [f"## {result['case']['rate']} Mbit/s", "", *rows(result), ""]
    return "\n".join(lines)


def main() -> None:
    """Runs the cases and writes the results."""
    record_cases("micro_batches", map(case, RATES), page, __doc__ or "")


if __name__ == "__main__":
    main()
