"""What do copies of hot experts gain where tokens fall unevenly?

Train steps on two emulated hosts of four devices, 100 Mbit/s, experts over all, with recorded and
with constructed choices of experts (`data.source=routing`), and 0, 1 and 2 slots a device for
copies (`moe.slots`); experts get copies by each micro-batch's choices (now) or by the step before
(last). Recorded (benchmarks/recorded): two layers of a model that was trained without a way to
balance, on text like its own and on another, and the load of one with a balance loss. Constructed:
a hot set of experts, a hot device, a hot set that moves from step to step, a burst after an even
step, an expert without tokens, and an even load. All variants of a case run in turns; the timed
step follows another, by which `last` chooses. Beside them what the planner's price says, on the
links as `moejax plan probe` measured them. Needs root, ip and tc.

    python -m benchmarks.emulated.copies --out benchmarks/results
"""

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.emulated.choices import CASES, DEVICES, HOSTS, B, E, K, L, T, loads
from benchmarks.emulated.exchange import LAYER, Case, Variants
from benchmarks.emulated.planner import probe
from benchmarks.emulated.record import record_cases
from benchmarks.emulated.setups import Setup
from moejax.config.checks import resolve_mesh
from moejax.config.load import from_dict
from moejax.plan.cluster.file import from_json
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import ExpertLoad, busiest_device

RATE = 100  # Mbit/s
SLOTS = {
    "no slots": {},
    "1, now": {"moe.slots": 1},
    "2, now": {"moe.slots": 2},
    "1, last": {"moe.slots": 1, "moe.slots_from": "last"},
    "2, last": {"moe.slots": 2, "moe.slots_from": "last"},
}
BARS = {"gain": 1.2, "price": 0.15, "even": 1.01}
CONFIG: dict[str, Any] = LAYER | {
    "mesh.expert": HOSTS * DEVICES,
    "mesh.nodes": HOSTS,
    "model.width": 256,
    "model.num_layers": L,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_width": 32,
    "model.vocab_size": 512,
    "moe.num_experts": E,
    "moe.experts_per_token": K,
    "moe.expert_hidden": 256,
    "train.batch_sequences": B,
    "data.sequence_length": T,
    "data.source": "routing",
}


def case(name: str) -> Case:
    """All variants for one spread of tokens."""
    variants: Variants = {
        slots: ("step", {**settings, "choices": name}) for slots, settings in SLOTS.items()
    }
    return Case(name, HOSTS, DEVICES, RATE, CONFIG, (B, T), variants, rounds=3)


def priced(topology: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds of a step by price, for every case and variant."""
    cluster, found = from_json(topology, "emulated"), {}
    for name in CASES:
        share_LE = loads(name) / loads(name).sum(1, keepdims=True)
        load, found[name] = ExpertLoad(name, tuple(map(tuple, share_LE.tolist()))), {}
        for slots, settings in SLOTS.items():
            cfg = from_dict({**CONFIG, **settings, "plan.mode": "hand"})
            cfg = resolve_mesh(cfg, HOSTS * DEVICES, "cpu", processes=HOSTS)
            seconds = price(trace_config(cfg, "cpu", load), cluster, load).seconds
            found[name][slots] = {"seconds": seconds, "busiest": busiest_device(load, cfg)}
    return found


def rows(record: dict[str, Any]) -> list[str]:
    """The table: a line for each case."""
    lines = [
        "| tokens | busiest device over mean: 0, 1, 2 slots | rounds a step: none; now; last | "
        f"no slots, s | {' | '.join(f'{s}: times as fast (price)' for s in list(SLOTS)[1:])} |",
        "|---|---:|---:|---:|" + "---:|" * (len(SLOTS) - 1),
    ]
    for result in record["results"]:
        name, found = result["case"]["name"], result["found"]
        price = record["prices"][name]
        busiest = [price[slots]["busiest"] for slots in list(SLOTS)[:3]]
        plain = found["no slots"]["seconds"]
        texts = [
            name,
            ", ".join(f"{x:.2f}" for x in busiest),
            ", ".join(f"{found[slots]['rounds']:.0f}" for slots in SLOTS),
            f"{median(plain):.2f}",
        ]
        for slots in list(SLOTS)[1:]:
            ratios = sorted(a / b for a, b in zip(plain, found[slots]["seconds"], strict=True))
            said = price["no slots"]["seconds"] / price[slots]["seconds"]
            texts.append(
                f"{median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f}; {said:.2f} x)"
            )
        lines.append(f"| {' | '.join(texts)} |")
    return lines


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Copies of hot experts in training",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; "
        f"JAX {record['jax']}, Python {record['python']}. {L} layers of width "
        f"{CONFIG['model.width']}, {E} experts of hidden width {CONFIG['moe.expert_hidden']}, top "
        f"{K}; {B * T:,} tokens a step; median and range of 3 rounds, and in brackets the price's "
        "ratio. Busiest device: by the plan for the timed step's own load, mean over layers.",
        "",
        *rows(record),
        "",
        f"Wanted: no rounds with slots; {BARS['gain']} x where the price says so, within "
        f"{BARS['price']:.0%} of it; even tokens at most {BARS['even'] - 1:.0%} slower.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Probes the cluster, prices the variants, runs the cases, and writes the results."""
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup("copies", HOSTS, DEVICES, RATE)
        topology, _ = probe(setup, Path(folder) / "topology.json", quick=True)
    facts = {"topology": topology, "prices": priced(topology)}
    record_cases("copies", map(case, CASES), page, __doc__ or "", more=facts)


if __name__ == "__main__":
    main()
