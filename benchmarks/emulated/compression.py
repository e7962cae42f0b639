"""What is compression worth to a train step whose gradients cross slow links?

Two emulated hosts of four devices, a replica axis across them and experts inside: gradients are
what crosses. Policies run in turns; what the codecs of gradients cost alone is timed in the same
processes. Ratios are against gradients in bfloat16. Needs root, ip and tc. Writes compression.json
and compression.md.

    python -m benchmarks.emulated.compression --out benchmarks/results
"""

from statistics import median
from typing import Any

from benchmarks.emulated.exchange import Case, Variants
from benchmarks.emulated.record import record_cases

# Mbit/s, and positions of each of the eight sequences of a step.
SETTINGS = ((100, 256), (100, 64), (50, 256), (200, 256), (400, 256), (1600, 256))
TOKENS = 8 * 256  # of the steps from which the break-even is read
PLAIN = "bfloat16"
POLICIES: dict[str, dict[str, Any]] = {
    "float32": {},
    PLAIN: {"train.gradient_dtype": "bfloat16"},
    "hybrid": {"compression.preset": "hybrid"},
    "strong": {"compression.preset": "strong"},
}
CONFIG = {
    "mesh.replica": 2,
    "mesh.expert": 4,
    "mesh.nodes": 2,
    "model.width": 256,
    "model.num_layers": 4,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_width": 32,
    "model.vocab_size": 512,
    "moe.num_experts": 8,
    "moe.experts_per_token": 2,
    "moe.expert_hidden": 512,
    "train.batch_sequences": 8,
}


def case(rate: int, length: int) -> Case:
    """All policies at one rate, and their codecs alone."""
    config = CONFIG | {"data.sequence_length": length}
    variants: Variants = {name: ("step", settings) for name, settings in POLICIES.items()}
    variants |= {f"codecs of {name}": ("codecs", POLICIES[name]) for name in ("hybrid", "strong")}
    return Case("compression", 2, 4, rate, config, (8, length), variants, rounds=5)


def main() -> None:
    """Runs the cases and writes the results."""
    cases = (case(rate, length) for rate, length in SETTINGS)
    record_cases("compression", cases, page, __doc__ or "")


def rows(result: dict[str, Any]) -> list[str]:
    """A rate's table. Predicted: the plain step, less the bytes saved, plus the codecs alone."""
    found, rate = result["found"], result["case"]["rate"] * 1e6 / 8
    lines = [
        "| policy | speed | predicted | seconds (range) | MB sent | fewer bytes | sent / counted | "
        "codecs alone (s) |",
        "|---" * 8 + "|",
    ]
    base = found[PLAIN]
    for name in POLICIES:
        one, codecs = found[name], found.get(f"codecs of {name}")
        alone = median(codecs["seconds"]) if codecs else 0.0
        saved = (base["counted"] - one["counted"]) / rate
        plain = median(base["seconds"])
        sent = median(one["sent"])
        lines.append(
            f"| {name} | {speed_of(found, name):.2f} | {plain / (plain - saved + alone):.2f} | "
            f"{median(one['seconds']):.3f} ({min(one['seconds']):.3f} to "
            f"{max(one['seconds']):.3f}) | {sent / 1e6:.2f} | "
            f"{base['counted'] / one['counted']:.2f} | {sent / one['counted']:.3f} | {alone:.3f} |"
        )
    return lines


def speed_of(found: dict[str, Any], name: str) -> float:
    """How many times as fast as the plain policy: the median over rounds."""
    pairs = zip(found[PLAIN]["seconds"], found[name]["seconds"], strict=True)
    return median(plain / seconds for plain, seconds in pairs)


def break_even(results: list[dict[str, Any]], name: str) -> str:
    """The rate at which the codecs cost what they save, predicted and as measured."""
    results = [r for r in results if r["found"][PLAIN]["tokens"] == TOKENS]
    base, one = results[0]["found"][PLAIN], results[0]["found"][name]
    alone = median(median(r["found"][f"codecs of {name}"]["seconds"]) for r in results)
    predicted = (base["counted"] - one["counted"]) * 8 / alone / 1e6
    speeds = sorted((r["case"]["rate"], speed_of(r["found"], name)) for r in results)
    first = next((n for n, (_, speed) in enumerate(speeds) if speed < 1), len(speeds))
    rates = [rate for rate, _ in speeds]
    if first == 0:
        measured = f"below {rates[0]} Mbit/s"
    elif first == len(rates):
        measured = f"above {rates[-1]} Mbit/s"
    else:
        measured = f"between {rates[first - 1]} and {rates[first]} Mbit/s"
    return f"{name} breaks even at {predicted:.0f} Mbit/s by the formula, measured {measured}"


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine, results = record["machine"], record["results"]
    lines = [
        "# Compression in the train step",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for both hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. Speed (of tokens a second too) and fewer "
        f"bytes, as the program counts them, are beside {PLAIN}; without a codec gradients travel "
        "in float32 unless train.gradient_dtype says otherwise.",
        "",
        *(f"- {break_even(results, name)}." for name in ("hybrid", "strong")),
    ]
    for result in results:
        tokens = result["found"][PLAIN]["tokens"]
        heading = f"## {result['case']['rate']} Mbit/s, {tokens:,.0f} tokens a step"
        lines += ["", heading, "", *rows(result)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
