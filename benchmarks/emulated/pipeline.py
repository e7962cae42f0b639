"""Do pipeline stages pay over a slow link, does the planner know, and does it leave them elsewhere?

Each host has cores of its own (of four hosts, two share a core), as real ones have: else a stage
would compute faster while another idles. Each cluster is probed, and the planner searches: as it
does, and with stages where it left them aside. Measured are the best by price without stages and
with them, without codecs and with those of `strong` where that is another plan, all in turns;
without stages and codecs the second best mesh too, in case the price has their order wrong. The
model has 60 million parameters and a step 16,384 tokens. Three set-ups show where stages must not
be chosen: a link that is not shaped, one node, and a small model of two layers, whose gradients are
fewer bytes than its hidden states; a small model of eight layers lies between. `bubble` is two
stages, with micro-batches of one size and more and more of them: what share of a step is idle, also
with two chunks of layers on each stage, and with four slices of the positions.

Needs root, ip and tc; with two rounds six to 24 minutes a set-up. Writes pipeline.json and
pipeline.md after each set-up, and leaves out those that it has. What the page does not show was not
measured yet. Where prices are off by more than is wanted, docs/log.md says what is known of why
(2026-11-27, all set-ups of stages). `strong` had int8 with feedback between stages when these rows
were measured; it has plain int8 since 2026-11-28, which sends the same bytes.

    python -m benchmarks.emulated.pipeline --out benchmarks/results
    python -m benchmarks.emulated.pipeline --only "2 x 4, 50 Mbit/s" --out benchmarks/results
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.emulated.exchange import Case, Variants, run
from benchmarks.emulated.planner import probe
from benchmarks.machine import RESULTS, stamp
from moejax.config.checks.planned import pinned
from moejax.config.fields import change, fields
from moejax.config.schema import Config, PlanConfig
from moejax.plan.cluster.file import from_json
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.routing import read_expert_load
from moejax.plan.price.terms import terms
from moejax.plan.report.tables import plan_text
from moejax.plan.search.search import search
from moejax.plan.search.space import Limits, plan_of

BAR = 1.5  # times as fast with stages as without, without codecs, at 50 Mbit/s
PREDICTED = 0.15  # a step's time, by price
BUBBLE = 0.1  # of the idle share
LARGE: dict[str, Any] = {  # 60 million parameters, 16,384 tokens
    "model.vocab_size": 512,
    "model.width": 512,
    "model.num_layers": 8,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_width": 64,
    "moe.num_experts": 16,
    "moe.experts_per_token": 2,
    "moe.expert_hidden": 256,
    "moe.capacity_factor": 1.25,
    "train.batch_sequences": 64,
    "data.sequence_length": 256,
}
# 3.7 million parameters: their gradients are as many bytes as the hidden states.
SMALL = LARGE | {"model.width": 128, "model.num_heads": 4, "model.num_kv_heads": 4}
SMALL |= {"model.head_width": 32, "moe.expert_hidden": 64}
MODELS = {
    "": LARGE,
    "small model": SMALL,
    "small model of two layers": SMALL | {"model.num_layers": 2},  # a quarter of the gradients
}


@dataclass(frozen=True)
class Setup:
    """A cluster, a model, and whether stages should be chosen there; None: it is open."""

    hosts: int
    devices: int  # of each host
    rate: int | None  # Mbit/s; None: not shaped
    model: str = ""
    stages: bool | None = None

    def __str__(self) -> str:
        rate = f"{self.rate} Mbit/s" if self.rate else "not shaped"
        return ", ".join(filter(None, (f"{self.hosts} x {self.devices}", rate, self.model)))

    @property
    def settings(self) -> dict[str, Any]:
        """The model's settings."""
        return MODELS[self.model]


SETUPS = (
    Setup(2, 4, 50, stages=True),
    Setup(2, 4, 20),
    Setup(2, 4, 200),
    Setup(4, 2, 50),
    Setup(4, 2, 200),
    Setup(2, 4, None, stages=False),
    Setup(1, 8, None, stages=False),
    Setup(2, 4, 50, "small model"),
    Setup(2, 4, 50, "small model of two layers", stages=False),
)
FEW = "of next to no tokens"
SECOND = "without stages, second"
TICKS = (2, 4, 8)  # micro-batches of `bubble`, on two stages
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # visits of a stage by a micro-batch, and settings
    "": (1, {}),
    "2 chunks": (2, {"model.stage_chunks": 2}),
    "4 slices": (4, {"mesh.stage_slices": 4}),
}


def config_of(setup: Setup) -> Config:
    """The model, with everything else free."""
    return change(Config(plan=PlanConfig(mode="auto")), setup.settings)


def plans(
    setup: Setup, topology: Topology, codecs: str, stages: int | None = None
) -> list[PricedPlan]:
    """What a search finds, the planner's choice first.

    Args:
      stages: number of stages; None: the planner chooses.
    """
    cfg = config_of(setup)
    if stages is not None:
        cfg = change(cfg, {"mesh.stage": stages})
    load = read_expert_load("balanced", cfg.moe.num_experts)
    limits = Limits(topology.devices, topology.nodes, "cpu", codecs, pinned(cfg))
    return search(cfg, topology, limits, load, progress=print).ranked


def chosen(setup: Setup, topology: Topology) -> tuple[dict[str, PricedPlan], dict[str, str]]:
    """The plans to measure, and what the planner chooses by itself."""
    wanted: dict[str, PricedPlan] = {}
    picks = {}
    for codecs in ("none", "strong") if setup.hosts > 1 else ("none",):
        coded = "" if codecs == "none" else ", codecs"
        found = plans(setup, topology, codecs)
        picks[codecs] = plan_text(found[0].cfg)
        alone = [one for one in found if one.cfg.mesh.stage == 1]
        wanted[f"without stages{coded}"] = alone[0]
        other = [one for one in alone if one.cfg.mesh != alone[0].cfg.mesh]
        if other and not coded:
            wanted[SECOND] = other[0]
        staged = [one for one in found if one.cfg.mesh.stage > 1]
        if not staged:
            staged = plans(setup, topology, codecs, max(2, setup.hosts))
        if not coded or plan_of(staged[0].cfg) != plan_of(wanted["stages"].cfg):
            wanted[f"stages{coded}"] = staged[0]
    return wanted, picks


def measure(
    setup: Setup, wanted: dict[str, PricedPlan], rounds: int, folder: Path
) -> dict[str, Any]:
    """Runs the plans in turns; returns by name what each was predicted and measured to take."""
    variants: Variants = {name: ("step", differing(one.cfg)) for name, one in wanted.items()}
    found = run(case_of(setup, variants, rounds), folder)
    return {
        name: {
            "plan": plan_text(one.cfg),
            "stage": one.cfg.mesh.stage,
            "predicted": one.seconds,
            "terms": terms(one),
            "seconds": found[name]["seconds"],
            "sent": found[name]["sent"],
        }
        for name, one in wanted.items()
    }


def case_of(setup: Setup, variants: Variants, rounds: int) -> Case:
    """Variants of one set-up."""
    model = setup.settings | {"mesh.nodes": setup.hosts, "plan.mode": "hand"}
    shape = (model["train.batch_sequences"], model["data.sequence_length"])
    about = (setup.hosts, setup.devices, setup.rate, model, shape, variants, rounds)
    return Case("pipeline", *about, own_cores=True)


def differing(cfg: Config) -> dict[str, Any]:
    """A plan's settings that are not at their defaults."""
    return {n: value for n, value in plan_of(cfg).items() if value != fields()[n].default}


def bubble(rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of steps of more and more micro-batches of one size, on two stages.

    And of steps of next to no tokens, for what a step does once, with weights and optimizer.
    """
    setup = Setup(2, 1, None)
    rows = 8  # sequences of a micro-batch
    mesh = {"mesh.stage": 2}
    variants: Variants = {}
    for name, (_, kind) in KINDS.items():
        for parts in TICKS:
            batch = {"train.micro_batches": parts, "train.batch_sequences": rows * parts}
            variants[f"{parts} {name}".strip()] = ("step", mesh | batch | kind)
    for parts in TICKS[:2]:
        few = {"data.sequence_length": 16, "train.micro_batches": parts}
        variants[f"{parts} {FEW}"] = ("step", mesh | few | {"train.batch_sequences": 2 * parts})
    found = run(case_of(setup, variants, rounds), folder)
    return {name: row["seconds"] for name, row in found.items()}


def bubble_rows(seconds: dict[str, list[float]]) -> list[str]:
    """The table of idle shares.

    A micro-batch's time is the least-squares slope over them, so that 1 % of a step's time is 8 %
    of an idle share of one ninth. A tick's time hangs less on it.
    """
    few, more = (median(seconds[f"{n} {FEW}"]) for n in TICKS[:2])
    once = few - (TICKS[0] + 1) * (more - few) / (TICKS[1] - TICKS[0])
    lines = [
        f"Steps of {TICKS[0]} and {TICKS[1]} micro-batches of next to no tokens take {few:.2f} and "
        f"{more:.2f} s, so that {once:.2f} s of a step do not depend on micro-batches: weights are "
        "gathered, gradients reduced and the optimizer run once. They are left out of the shares. "
        "A micro-batch visits a stage V times, for each chunk or slice, and a step has V M + P - 1 "
        "ticks: if all take the same time, the idle share is what the arithmetic says.",
        "",
        "| micro-batches | visits, V | step, s (range) | a tick, s | one more micro-batch, s | "
        "idle share measured | (P - 1) / (V M + P - 1) |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (visits, _) in KINDS.items():
        own = {n: seconds[f"{n} {name}".strip()] for n in TICKS}
        middle = {n: median(values) - once for n, values in own.items()}
        mean = sum(TICKS) / len(TICKS)
        slope = sum((n - mean) * s for n, s in middle.items())
        slope /= sum((n - mean) ** 2 for n in TICKS)
        for n, values in own.items():
            ticks = visits * n + 1
            lines.append(
                f"| {n}{f', {name}' * bool(name)} | {visits} | {median(values):.2f} "
                f"({min(values):.2f} to {max(values):.2f}) | {middle[n] / ticks:.3f} | {slope:.2f} "
                f"| {1 - n * slope / middle[n]:.3f} | {1 / ticks:.3f} |"
            )
    return lines


def rows_of(rows: dict[str, Any]) -> list[str]:
    """A set-up's table."""
    lines = [
        "| | plan | predicted, s | measured, s (range) | error | MB sent by a host | "
        "beside the best without stages or codecs |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    plain = min(
        median(r["seconds"])
        for n, r in rows.items()
        if n.startswith("without") and "codecs" not in n
    )
    for name, row in rows.items():
        own, middle = row["seconds"], median(row["seconds"])
        lines.append(
            f"| {name} | {row['plan']} | {row['predicted']:.2f} | {middle:.2f} "
            f"({min(own):.2f} to {max(own):.2f}) | {row['predicted'] / middle - 1:+.0%} | "
            f"{median(row['sent']) / 1e6:.0f} | {plain / middle:.2f} x |"
        )
    return lines


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Pipeline stages over slow links", "", *(__doc__ or "").strip().splitlines(), ""]
    lines += [
        f"Wanted: {BAR} x at 50 Mbit/s without codecs; time predicted within {PREDICTED:.0%}; "
        f"idle share within {BUBBLE:.0%}.",
        "",
    ]
    for name, one in record["results"].items():
        lines += [f"## {name}", "", stamp_text(one), *one.get("notes", []), ""]
        if name == "bubble":
            lines += [*bubble_rows(one["seconds"]), ""]
            continue
        lines += [*rows_of(one["rows"]), ""]
        for codecs, text in one["picks"].items():
            lines.append(f"- The planner, codecs {codecs}: {text}.")
        wanted = one["wanted"]
        if wanted is not None:
            lines.append(f"- Stages {'are' if wanted else 'are not'} to be chosen without codecs.")
        lines.append("")
    return "\n".join(lines)


def stamp_text(one: dict[str, Any]) -> str:
    """When and where a set-up was measured."""
    machine = one["machine"]
    return (
        f"{one['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all hosts together; JAX "
        f"{one['jax']}, Python {one['python']}; {one['rounds']} rounds."
    )


def main() -> None:
    """Runs the set-ups and writes the results after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", help="the set-up of this name alone")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "pipeline.json"
    record = json.loads(path.read_text()) if path.exists() else {"results": {}}
    for name in [*map(str, SETUPS), "bubble"]:
        if name in record["results"] or args.only not in (None, name):
            continue
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = set_up(name, args.rounds, Path(folder))
        record["results"][name] = found | stamp() | {"rounds": args.rounds}
        path.write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(record))
    print(page(record))


def set_up(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Runs one set-up."""
    if name == "bubble":
        return {"seconds": bubble(rounds, folder)}
    setup = next(one for one in SETUPS if str(one) == name)
    facts, _ = probe(setup, folder / "topology.json", quick=False, own_cores=True)
    wanted, picks = chosen(setup, from_json(facts, name))
    rows = measure(setup, wanted, rounds, folder)
    return {"topology": facts, "picks": picks, "wanted": setup.stages, "rows": rows}


if __name__ == "__main__":
    main()
