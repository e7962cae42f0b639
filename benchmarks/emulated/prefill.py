"""How much faster is prefill where each chunk of the exchange meets a few experts?

The engine of `moejax generate` on emulated hosts, the expert axis across them, all on two cores: a
call for pieces of prompts, 512 tokens a host. Buckets of rows sorted by expert travel whole, or in
2 and 4 chunks (`route_chunks`), so that one chunk is on the link while the experts of another work
(EPS-MoE). Experts that work, and experts with next to nothing to do, with links that are not shaped
and at rates where wire and experts take about as long. All variants of a case run in turns, and
give the same logits within 1e-5. Needs root, ip and tc.

    python -m benchmarks.emulated.prefill --out benchmarks/results
"""

from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.emulated.exchange import LAYER, Case, Variants
from benchmarks.emulated.record import record_cases
from moejax.serve.programs import CALL_TOKENS, LONG

SHAPES = ((2, 1), (2, 4))  # hosts, devices of each
RATES = (None, 200, 250, 400)  # Mbit/s; None: not shaped
CHUNKS = (1, 2, 4)
EXPERTS = {"working": 1536, "idle": 8}  # hidden width
EXPERTS_A_HOST = 8
LAYERS = 2
BAR = 1.2  # times plain prefill
SHARE = 0.35  # the bar holds where wire and experts each have so much of a call
MODEL = {
    "model.num_layers": LAYERS,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_width": 16,
    "model.vocab_size": 128,
}


def case(hosts: int, devices: int, rate: int | None) -> Case:
    """All variants of one cluster at one rate."""
    variants: Variants = {
        name_of(work, chunks): (
            "gathered",
            {"route_chunks": chunks, "moe.expert_hidden": hidden},
        )
        for work, hidden in EXPERTS.items()
        for chunks in CHUNKS
    }
    mesh = {"mesh.expert": hosts, "mesh.tensor": devices, "mesh.nodes": hosts, "route": "split"}
    config = LAYER | MODEL | mesh | {"moe.num_experts": EXPERTS_A_HOST * hosts}
    rows = CALL_TOKENS // LONG * hosts
    return Case("prefill", hosts, devices, rate, config, (rows, LONG), variants, rounds=7)


def name_of(work: str, chunks: int) -> str:
    """The name of a variant."""
    return f"{work}, {chunks}"


class Parts(NamedTuple):
    """Seconds of a plain call, and of what in it could run side by side."""

    plain: float
    wire: float  # of the exchange: counted bytes over the rate
    experts: float  # working less idle, links not shaped

    @property
    def shares(self) -> tuple[float, float]:
        """Wire and experts as parts of the call."""
        return self.wire / self.plain, self.experts / self.plain

    @property
    def bound(self) -> float:
        """The most that a call can be faster: the smaller of both parts hidden."""
        rest = max(0.0, self.plain - self.wire - self.experts)
        return self.plain / (max(self.wire, self.experts) + rest)


def parts(results: list[dict[str, Any]], rate: int | None) -> Parts:
    """What a plain call is made of, by the results of one cluster."""
    found = {result["case"]["rate"]: result["found"] for result in results}
    plain = found[rate][name_of("working", 1)]
    working, idle = (median(found[None][name_of(work, 1)]["seconds"]) for work in EXPERTS)
    wire = plain["exchanged"] * 8 / (rate * 1e6) if rate else 0.0
    return Parts(median(plain["seconds"]), wire, working - idle)


def faster(found: dict[str, Any], chunks: int) -> list[float]:
    """How many times as fast as plain a call in chunks is, round by round, in order."""
    times = (found[name_of("working", number)]["seconds"] for number in (1, chunks))
    return sorted(plain / cut for plain, cut in zip(*times, strict=True))


def rows(results: list[dict[str, Any]]) -> list[str]:
    """The table of one cluster, all rates."""
    lines = [
        "| Mbit/s | wire, experts, s | shares of a call | 1, 2, 4 chunks, s | fastest | "
        "idle experts | 2 chunks beside 1 | 4 chunks beside 1 | at best | other programs |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        rate, found = result["case"]["rate"], result["found"]
        whole = parts(results, rate)
        seconds = {
            work: [median(found[name_of(work, chunks)]["seconds"]) for chunks in CHUNKS]
            for work in EXPERTS
        }
        fastest = [min(found[name_of("working", chunks)]["seconds"]) for chunks in CHUNKS]
        ratios = [faster(found, chunks) for chunks in CHUNKS[1:]]
        texts = [
            str(rate or "not shaped"),
            f"{whole.wire:.3f}, {whole.experts:.3f}",
            ", ".join(f"{share:.0%}" for share in whole.shares),
            *(
                ", ".join(f"{x:.3f}" for x in times)
                for times in (seconds["working"], fastest, seconds["idle"])
            ),
            *(f"{median(r):.2f} x ({r[0]:.2f} to {r[-1]:.2f})" for r in ratios),
            f"{whole.bound:.2f} x" if rate else "-",
            f"{result['others']:.0%}",
        ]
        lines.append(f"| {' | '.join(texts)} |")
    return lines


def verdict(results: list[dict[str, Any]]) -> str:
    """Where the bar holds, whether it is met; and what chunks cost where links are not shaped."""
    texts = []
    for result in results:
        rate, found = result["case"]["rate"], result["found"]
        medians = {chunks: median(faster(found, chunks)) for chunks in CHUNKS[1:]}
        best = max(medians, key=lambda chunks: medians[chunks])
        if rate is None:
            each = ", ".join(f"{n} chunks {x:.2f} x as fast" for n, x in medians.items())
            texts.append(f"Links not shaped: {each}.")
        elif min(parts(results, rate).shares) > SHARE:
            met = "met" if medians[best] >= BAR else "missed"
            texts.append(
                f"At {rate} Mbit/s the bar is {met}: {medians[best]:.2f} x in {best} chunks."
            )
    return " ".join(texts)


def experts_met(sources: int, chunks: int, draws: int = 50) -> float:
    """How often a host's experts are met by a call's chunks, on average, for even random choices.

    An expert whose rows lie on both sides of a cut is met by both chunks, which read its weights.

    Args:
      sources: devices, each of which fills a bucket, a quarter larger than an even share.
    """
    random, met = np.random.default_rng(0), 0
    share = 1024 // sources  # rows for a host from each, top 2 of 512 tokens a host
    size = -(-share * 5 // 4 // chunks)
    for _ in range(draws):
        counts = [random.binomial(2 * share, 0.5) for _ in range(sources)]
        buckets = [np.sort(random.integers(0, EXPERTS_A_HOST, count)) for count in counts]
        for start in range(0, chunks * size, size):
            met += len(np.unique(np.concatenate([b[start : start + size] for b in buckets])))
    return met / draws


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Prefill in chunks of few experts",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. {LAYERS} layers of width 512, "
        f"{EXPERTS_A_HOST} experts a host of hidden width {EXPERTS['working']}, top 2; two rows of "
        "256 tokens a host in a call; median and range of 7 rounds. Wire: counted bytes of the "
        "exchange over the rate. Experts: working less idle, one chunk, links not shaped. At best: "
        "a plain call over one in which the shorter of both is hidden, and nothing else changes. "
        "No call gathers weights. Other programs: their share of the CPUs while a case ran. "
        f"Wanted: {BAR} x plain prefill where wire and experts each take more than {SHARE:.0%} of "
        "a call.",
        "",
    ]
    for hosts, devices in SHAPES:
        here = [
            r
            for r in record["results"]
            if (r["case"]["hosts"], r["case"]["devices"]) == (hosts, devices)
        ]
        if here:
            met = ", ".join(f"{experts_met(hosts * devices, chunks):.1f}" for chunks in CHUNKS)
            lines += [f"## {hosts} hosts of {devices}", "", *rows(here), "", verdict(here), ""]
            lines += [
                f"In 1, 2 and 4 chunks a layer's chunks meet {met} experts of a host's "
                f"{EXPERTS_A_HOST}, for even choices: one with rows on both sides of a cut is read "
                "twice.",
                "",
            ]
    return "\n".join(lines)


def main() -> None:
    """Runs the cases and writes the results."""
    cases = (case(*shape, rate) for shape in SHAPES for rate in RATES)
    record_cases("prefill", cases, page, __doc__ or "", worker="prefill")


if __name__ == "__main__":
    main()
