"""Where does an exchange of tokens pay, and where is it better to gather the experts' weights?

Prices steps of the shipped models on nodes of eight H200s with and without an expert axis, at
growing numbers of tokens a device in a micro-batch, over 8 x 400 Gbit/s a node and over an eighth
of that. Nothing runs, and memory is left aside: what fits is the planner's to find. Then each model
is planned at its own batch.

    python -m benchmarks.papers.crossover --out benchmarks/results

It took 22 minutes beside other work, on two cores. Goes on where it was stopped. Draws
docs/pictures/crossover.svg, which needs matplotlib (`pip install '.[plots]'`).
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from benchmarks.machine import RESULTS, ROOT, stamp
from moejax.config.checks.planned import CHOSEN
from moejax.config.fields import change, fields
from moejax.config.load import load_config
from moejax.config.schema import Config, PlanConfig
from moejax.plan.cluster.file import load_topology
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.report.tables import plan_text
from moejax.plan.search.search import search
from moejax.plan.search.space import Limits, resolve, rules

# Nodes on which each model is planned: what it is trained on, or the fewest that hold its state.
MODELS = {
    "olmoe_1b_7b": 8,
    "qwen3_30b_a3b": 8,
    "mixtral_8x7b": 8,
    "gpt_oss_120b": 8,
    "qwen3_235b_a22b": 16,
    "deepseek_v3": 32,
}
TOKENS = (2048, 8192, 32_768, 131_072)  # a device, between two gathers of a weight
LINKS = {"8 x 400 Gbit/s": 1.0, "8 x 50 Gbit/s": 0.125}
PICTURE = ROOT / "docs" / "pictures" / "crossover.svg"


def model_of(name: str) -> Config:
    """A shipped config, free of what it holds for a cluster."""
    cfg = load_config(str(ROOT / "configs" / f"{name}.py"), [])
    free = {setting: fields()[setting].default for setting in CHOSEN}
    return change(replace(cfg, plan=PlanConfig(mode="auto")), free)


def cluster(nodes: int, share: float) -> Topology:
    """Nodes of eight H200s; `share` of their links between nodes."""
    topology = load_topology(f"h200:{nodes}")
    far = topology.tiers[-1]
    slower = {
        k: replace(link, bytes_per_s=link.bytes_per_s * share) for k, link in far.links.items()
    }
    return replace(topology, tiers=(*topology.tiers[:-1], replace(far, links=slower)))


def candidates(cfg: Config, limits: Limits) -> Iterator[tuple[bool, Config]]:
    """Yields (whether it exchanges, plan): rules of thumb, and ways to make each better."""
    for name, one in rules(cfg, limits).items():
        exchanges = name.startswith("EP")
        changes: list[dict[str, Any]] = [{}]
        if exchanges:
            routes = ("split", "two_level_merge") if name == "EP" else ("split",)
            changes = [{"route": route, "route_chunks": n} for route in routes for n in (1, 4)]
        elif name == "FSDP":
            changes += [{"mesh.gather_across": "use"}]
        for values in changes:
            plan = resolve(change(one, values), limits)
            if plan is not None:
                yield exchanges, plan


def ratios(name: str) -> dict[str, dict[str, float]]:
    """Link -> tokens a device -> the fastest step without an exchange over the fastest with one."""
    nodes, cfg = MODELS[name], model_of(name)
    load = read_expert_load("balanced", cfg.moe.num_experts)
    clusters = {link: cluster(nodes, share) for link, share in LINKS.items()}
    found: dict[str, dict[str, float]] = {link: {} for link in LINKS}
    for tokens in TOKENS:
        length = min(tokens, cfg.data.sequence_length)
        batch = {"train.batch_sequences": 8 * nodes * tokens // length}
        sized = change(cfg, batch | {"data.sequence_length": length, "train.micro_batches": 1})
        limits = Limits(8 * nodes, nodes, "gpu")
        best = {link: {False: math.inf, True: math.inf} for link in LINKS}
        for exchanges, plan in candidates(sized, limits):
            traced = trace_config(plan, "gpu", load)
            for link, topology in clusters.items():
                seconds = price(traced, topology, load).seconds
                best[link][exchanges] = min(best[link][exchanges], seconds)
        for link in LINKS:
            found[link][str(tokens)] = best[link][False] / best[link][True]
        print(name, tokens, {link: found[link][str(tokens)] for link in LINKS}, flush=True)
    return found


def planned(name: str) -> dict[str, Any]:
    """The planner's answer for a model at its own batch."""
    nodes, cfg = MODELS[name], model_of(name)
    topology = load_topology(f"h200:{nodes}")
    load = read_expert_load("balanced", cfg.moe.num_experts)
    best = search(cfg, topology, Limits(8 * nodes, nodes, "gpu"), load).ranked[0]
    train, mesh = best.cfg.train, best.cfg.mesh
    shares = topology.devices // mesh.stage * train.micro_batches
    owners = mesh.expert * (mesh.tensor if mesh.expert_weights == "folded" else 1)
    return {
        "plan": plan_text(best.cfg),
        "owners": owners,
        "tokens": train.batch_sequences * cfg.data.sequence_length // shares,
    }


def equal_bytes(name: str) -> float:
    """Tokens a device at which both ways send as much over the same link, in bfloat16.

    Gathering sends the weights of all experts twice in bfloat16 and their gradients once in
    float32: 3 E D F x 8 bytes. An exchange sends K rows of D numbers four times: T x K D x 8.
    """
    cfg = model_of(name)
    return 3 * cfg.moe.num_experts * cfg.moe.expert_hidden / cfg.moe.experts_per_token


def crossover(row: dict[str, float]) -> float | None:
    """Tokens a device above which no exchange is faster; None: an exchange never or always is."""
    points = [(math.log(int(tokens)), math.log(value)) for tokens, value in row.items()]
    for (before, high), (after, low) in pairwise(points):
        if high > 0 >= low:
            return math.exp(before + (after - before) * high / (high - low))
    return None


def text(row: dict[str, float]) -> str:
    """The crossover in words."""
    found = crossover(row)
    if found is not None:
        return f"{found:,.0f}"
    first, last = next(iter(row.values())), list(row.values())[-1]
    return f"above {TOKENS[-1]:,}" if last > 1 else f"below {TOKENS[0]:,}" if first <= 1 else "-"


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Where an exchange pays", "", *(__doc__ or "").strip().splitlines(), ""]
    lines += [f"JAX {record['jax']}, {record['date']}.", ""]
    lines += [
        "Tokens a device in a micro-batch below which a step with an expert axis is faster than",
        "the best without, and those at which both send as many bytes.",
        "",
        f"| model | nodes | {' | '.join(LINKS)} | as many bytes |",
        f"|---|---:|{'---:|' * len(LINKS)}---:|",
    ]
    for name, one in record["results"].items():
        cells = " | ".join(text(one["ratios"][link]) for link in LINKS)
        lines.append(f"| {name} | {MODELS[name]} | {cells} | {equal_bytes(name):,.0f} |")
    lines += [
        "",
        "The fastest step without an exchange over the fastest with one, by tokens a device:",
        "",
        f"| model | link | {' | '.join(f'{tokens:,}' for tokens in TOKENS)} |",
        f"|---|---|{'---:|' * len(TOKENS)}",
    ]
    for name, one in record["results"].items():
        for link, row in one["ratios"].items():
            cells = " | ".join(f"{row[str(tokens)]:.2f}" for tokens in TOKENS)
            lines.append(f"| {name} | {link} | {cells} |")
    lines += [
        "",
        "Planned at the batch of its config, with what fits into memory:",
        "",
        "| model | tokens a device in a micro-batch | experts spread over | plan |",
        "|---|---:|---|---|",
    ]
    for name, one in record["results"].items():
        plan = one["planned"]
        spread = f"{plan['owners']} groups" if plan["owners"] > 1 else "nothing: no exchange"
        lines.append(f"| {name} | {plan['tokens']:,} | {spread} | {plan['plan']} |")
    return "\n".join(
        [*lines, "", "![The ratios by tokens a device](../../docs/pictures/crossover.svg)", ""]
    )


def draw(record: dict[str, Any], path: Path) -> None:
    """Ratios by tokens a device: a line for each model and link."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "moejax"
    import matplotlib.pyplot as plt

    figure, every = plt.subplots(1, len(LINKS), figsize=(9, 3.6), sharey=True)
    for axes, link in zip(every, LINKS, strict=True):
        for name, one in record["results"].items():
            axes.plot(TOKENS, [one["ratios"][link][str(t)] for t in TOKENS], "o-", label=name)
        axes.axhline(1, color="grey", linewidth=1)
        axes.set(xscale="log", yscale="log", title=f"{link} a node", xlabel="tokens a device")
        axes.set_xticks(TOKENS, [f"{tokens // 1024}k" for tokens in TOKENS])
        axes.set_yticks((0.7, 1, 2, 4, 8), ("0.7", "1", "2", "4", "8"))
        axes.minorticks_off()
    every[0].set_ylabel("step without / with an exchange")
    every[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Prices what is missing, writes the results and draws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = args.out / "crossover.json"
    record = json.loads(path.read_text()) if path.exists() else {"results": {}}
    for name in MODELS:
        if name not in record["results"]:
            record["results"][name] = {"ratios": ratios(name), "planned": planned(name)}
            record |= stamp()
            path.write_text(json.dumps(record, indent=1) + "\n")
            path.with_suffix(".md").write_text(page(record))
    draw(record, PICTURE)


if __name__ == "__main__":
    main()
