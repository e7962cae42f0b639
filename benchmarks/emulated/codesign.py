"""What are co-designs across strategy, collectives and network worth, alone and together?

The survey of communication optimization (arXiv 2403.07585) names three; each is one setting here:

    vertical      collectives know the program: the exchange goes in chunks beside the experts' work
    horizontal    dimensions that share a link take turns: gradients are summed in pieces
    intra-inter   links inside and across hosts are one hierarchy: a token crosses once to each host

Every combination of the three is a whole train step on two emulated hosts, run in turns. The
interaction is the speed of a combination over the product of its parts': 1 where they add nothing
to each other. Needs root, ip and tc. Writes codesign.json and codesign.md.

    python -m benchmarks.emulated.codesign --out benchmarks/results
"""

import math
from itertools import combinations
from statistics import median
from typing import Any

from benchmarks.emulated.exchange import Case, Variants
from benchmarks.emulated.record import record_cases

PARTS: dict[str, dict[str, Any]] = {
    "vertical": {"route_chunks": 2},
    "horizontal": {"train.reduction_bytes": 2**19},
    "intra-inter": {"route": "two_level_merge"},
}
RATES = (100, 400)  # Mbit/s
CONFIG = {
    "mesh.replica": 1,
    "mesh.expert": 8,
    "mesh.nodes": 2,
    "model.width": 256,
    "model.num_layers": 2,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_width": 32,
    "model.vocab_size": 512,
    "moe.num_experts": 16,
    "moe.experts_per_token": 4,
    "moe.expert_hidden": 256,
    "moe.capacity_factor": 1.25,
    "train.batch_sequences": 16,
    "data.sequence_length": 128,
    "plan.mode": "hand",
}


def case(rate: int) -> Case:
    """Every combination at one rate."""
    variants: Variants = {}
    for count in range(len(PARTS) + 1):
        for names in combinations(PARTS, count):
            settings = {key: value for name in names for key, value in PARTS[name].items()}
            variants[" + ".join(names) or "none"] = ("step", settings)
    shape = (CONFIG["train.batch_sequences"], CONFIG["data.sequence_length"])
    return Case("codesign", 2, 4, rate, CONFIG, shape, variants, rounds=7)  # type: ignore[arg-type]


def rows(found: dict[str, Any]) -> list[str]:
    """A rate's table."""
    base = found["none"]["seconds"]

    def speed(name: str) -> float:
        pairs = zip(base, found[name]["seconds"], strict=True)
        return median(plain / seconds for plain, seconds in pairs)

    lines = ["| together | speed | seconds (range) | interaction |", "|---|---:|---|---:|"]
    for name in found:
        took = found[name]["seconds"]
        parts = name.split(" + ")
        alone = math.prod(speed(part) for part in parts) if len(parts) > 1 else math.nan
        interaction = "" if math.isnan(alone) else f"{speed(name) / alone:.2f}"
        lines.append(
            f"| {name} | {speed(name):.2f} | {median(took):.3f} ({min(took):.3f} to "
            f"{max(took):.3f}) | {interaction} |"
        )
    return lines


def main() -> None:
    """Runs the cases and writes the results."""
    record_cases("codesign", map(case, RATES), page, __doc__ or "")


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Co-designs, alone and together", "", *(__doc__ or "").strip().splitlines(), ""]
    lines += [f"JAX {record['jax']}, {record['date']}. Speed: over none, median of rounds.", ""]
    for result in record["results"]:
        lines += [f"## {result['case']['rate']} Mbit/s", "", *rows(result["found"]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
