"""How much faster do calls for a few tokens get where no call gathers weights?

The engine of `moejax generate` on emulated hosts, all on two cores: a call for one token in each of
some slots, and one for pieces of prompts. Weights lie as training shards them, and are gathered in
every call; or each device holds all that it would gather, as `Engine`, `moejax generate` and
`moejax serve` have it where memory has room. Experts are over all devices, or inside each host,
over fsdp shards (gathered: copies). All variants of a case run in turns, and give the same logits
within 1e-5. Needs root, ip and tc.

    python -m benchmarks.emulated.decode --out benchmarks/results
"""

from statistics import median
from typing import Any

from benchmarks.emulated.exchange import LAYER, Case, Variants
from benchmarks.emulated.prefill import MODEL
from benchmarks.emulated.record import record_cases
from moejax.serve.programs import LONG

HOSTS, DEVICES = 2, 4
RATES = (None, 1000, 100)  # Mbit/s; None: not shaped
CALLS = {(8, 1): "one token in 8 slots", (64, 1): "one token in 64", (16, LONG): "16 pieces of 256"}
MESHES = {
    "over hosts": {"mesh.expert": HOSTS * DEVICES},
    "inside": {"mesh.fsdp": HOSTS, "mesh.expert": DEVICES},
}
SIZES = {"moe.num_experts": 16, "moe.expert_hidden": 512, "mesh.nodes": HOSTS, "route": "split"}


def case(tokens: tuple[int, int], rate: int | None) -> Case:
    """All variants of one call at one rate."""
    variants: Variants = {
        name_of(mesh, kind): (kind, axes)
        for mesh, axes in MESHES.items()
        for kind in ("sharded", "gathered")
    }
    config = LAYER | MODEL | SIZES
    return Case("decode", HOSTS, DEVICES, rate, config, tokens, variants, rounds=5)


def name_of(mesh: str, kind: str) -> str:
    """The name of a variant."""
    return f"{mesh}, {kind}"


def rows(results: list[dict[str, Any]]) -> list[str]:
    """The table: a line for each call and rate."""
    lines = [
        "| call | Mbit/s | experts over hosts: sharded, gathered, s | gathered beside sharded | "
        "experts inside: sharded, gathered, s | gathered beside sharded | "
        "inside beside over hosts, both gathered | other programs |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        one, found = result["case"], result["found"]
        seconds = {name: found[name]["seconds"] for name in found}
        texts = [CALLS[tuple(one["tokens"])], str(one["rate"] or "not shaped")]
        for mesh in MESHES:
            sharded, gathered = (seconds[name_of(mesh, kind)] for kind in ("sharded", "gathered"))
            texts += [f"{median(sharded):.4f}, {median(gathered):.4f}", ratio(sharded, gathered)]
        texts.append(ratio(*(seconds[name_of(mesh, "gathered")] for mesh in MESHES)))
        lines.append(f"| {' | '.join([*texts, format(result['others'], '.0%')])} |")
    return lines


def ratio(slow: list[float], fast: list[float]) -> str:
    """How many times as fast, round by round: median and range."""
    found = sorted(a / b for a, b in zip(slow, fast, strict=True))
    return f"{median(found):.2f} x ({found[0]:.2f} to {found[-1]:.2f})"


def sent(results: list[dict[str, Any]]) -> list[str]:
    """Bytes that one call's gathers and sums put on a host's link."""
    lines = [
        "| call | over hosts: sharded, gathered | inside: sharded, gathered |",
        "|---|---:|---:|",
    ]
    for tokens, call in CALLS.items():
        found = next((r["found"] for r in results if tuple(r["case"]["tokens"]) == tokens), None)
        if found is None:
            continue
        texts = [
            ", ".join(
                f"{found[name_of(mesh, kind)]['counted'] / 1e3:,.0f}"
                for kind in ("sharded", "gathered")
            )
            for mesh in MESHES
        ]
        lines.append(f"| {call} | {' | '.join(texts)} |")
    return lines


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Calls that gather no weights",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. {HOSTS} hosts of {DEVICES} devices; "
        f"{MODEL['model.num_layers']} layers of width {LAYER['model.width']}, "
        f"{SIZES['moe.num_experts']} experts of hidden width {SIZES['moe.expert_hidden']}, top 2; "
        "median and range of 5 rounds. Other programs: their share of the CPUs while a case ran.",
        "",
        *rows(record["results"]),
        "",
        "Kilobytes that a call puts on a host's link, counted in the traced program. Of calls for "
        "one token the rows of the exchange are left out: how many travel is for the routing to "
        "say.",
        "",
        *sent(record["results"]),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs the cases and writes the results."""
    cases = (case(tokens, rate) for tokens in CALLS for rate in RATES)
    record_cases("decode", cases, page, __doc__ or "", worker="prefill")


if __name__ == "__main__":
    main()
