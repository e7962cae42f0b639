"""What does the planner do on the papers' models and clusters, and what does it predict?

Nothing runs: train steps are traced and priced on described clusters (`moejax plan --clusters`).
A paper's figure stands beside a prediction with what differs between the two. Writes plans.json,
and to docs/ papers.md and clusters.md: one model planned for every known cluster.

    python -m benchmarks.papers.plans --out benchmarks/results
"""

import argparse
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax

from benchmarks.machine import RESULTS, ROOT, stamp
from benchmarks.papers.models import (
    FEW_TOKENS,
    LINA,
    LINA_EXCHANGES,
    LINA_SEQUENCES,
    LINA_STEP,
    NEOX_20B,
    OLMOE,
    TWO_70B,
)
from benchmarks.papers.plans_page import clusters_page, page
from moejax.config.checks.planned import CHOSEN
from moejax.config.fields import change, fields, get_value
from moejax.config.load import load_config
from moejax.config.schema import Config, MoEConfig, PlanConfig
from moejax.errors import InputError
from moejax.plan.cluster.file import known_clusters, load_topology
from moejax.plan.cluster.topology import Link, Topology, same_links
from moejax.plan.price.candidate import PricedPlan, price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.price.terms import terms, tokens_per_second
from moejax.plan.report.tables import plan_text, sentence
from moejax.plan.search.search import SearchResult, search
from moejax.plan.search.space import Limits, resolve

MODEL = ("model.", "moe.")  # settings of a config that are the model
NEOX_STAGES = {"mesh.stage": 4, "mesh.tensor": 4, "mesh.fsdp": 12, "train.micro_batches": 32}
NEOX_STAGES |= {"model.remat": "full", "mesh.stage_keeps": "input"}
PUBLISHED_HOURS = 180_000  # of an H800 for 10^12 tokens: DeepSeek-AI 2024, table 1
PATIENCE = 45  # traces of a search, where it is not itself what is shown
SKEWS = ("balanced", "zipf:0.4", "zipf:0.8", "zipf:1.2")
SKEWED = ("h200:2", "a800:2")


@dataclass(frozen=True)
class Question:
    """A paper's claim, and what is asked of the planner.

    Attributes:
      cluster: a known cluster, or a cluster.
      model: settings; those that a planner may choose are pinned.
      claim: what the paper says, on its hardware.
      differs: why a prediction need not agree.
      hours: published hours of a device for 10^12 tokens, beside which those predicted stand.
      codecs: presets that are compared with no codec, on the same plan.
      exact: whether `model` has the whole plan, so that nothing is searched; it need not fit.
      baseline: settings of what the paper compares with; None: the best rule of thumb.
    """

    name: str
    cluster: str | Topology
    model: dict[str, Any]
    claim: str
    differs: str
    codecs: tuple[str, ...] = ()
    hours: float | None = None
    exact: bool = False
    baseline: dict[str, Any] | None = None


def lina_cluster(nodes: int) -> Topology:
    """Lina's, as fast as its Table 1 shows it: the paper says neither links in a node nor dtype."""
    topology = load_topology(f"lina_a100:{nodes}")
    # Three of four buckets of float32, top-2.
    sent = 3 / 4 * MoEConfig().headroom * LINA_SEQUENCES * 512 * 2 * 512 * 4
    inside = same_links(Link(0.0, sent / (LINA_EXCHANGES / (4 * 12))))
    tiers = (replace(topology.tiers[0], links=inside), *topology.tiers[1:])
    return replace(
        topology, tiers=tiers, device=replace(topology.device, program_overhead=lina_program())
    )


@cache
def lina_program() -> float:
    """How many times the computing that is priced for 4 experts was what Table 1 leaves for it."""
    topology = load_topology("lina_a100:1")
    spread = plan(lina_model(4), topology).rules["EP+FSDP"]  # all in one node: nothing is sharded
    return (LINA_STEP - LINA_EXCHANGES) / sum(spread.main.totals.computed.values())


def lina_model(experts: int) -> dict[str, Any]:
    """One of Lina's: as many devices as experts."""
    batch = {"train.batch_sequences": LINA_SEQUENCES * experts}
    return LINA | batch | {"moe.num_experts": experts}


def lassen(nodes: int) -> Topology:
    """V100 multiplies float16; what it is to multiply here is bfloat16."""
    topology = load_topology(f"lassen:{nodes}")
    products = topology.device.products | {"bfloat16": topology.device.products["float16"]}
    return replace(topology, device=replace(topology.device, products=products))


MONTA_MESH = {"mesh.replica": 1, "mesh.fsdp": 1, "mesh.expert": 2, "mesh.tensor": 8}
# Experts across nodes, tensors inside; each tensor rank sends every token of its group.
MONTA_BASELINE = MONTA_MESH | {
    "mesh.activations": "replicated",
    "mesh.expert_weights": "hidden",
    "route": "duplicate",
    "route_chunks": 1,
    "train.reduction_bytes": None,
}


def questions() -> list[Question]:
    """What is asked."""
    found = [
        Question(
            f"MoNTA: 2 x 70 B on 16 A800, 8K positions, {name}",
            "a800:2",
            TWO_70B | mesh,
            "13 % better latency over its baseline",
            "the paper's tables were not readable; its set-up trains all 80 layers, which 16 "
            "devices cannot hold with float32 masters; top-1 and the batch are assumed",
            baseline=MONTA_BASELINE,
        )
        for name, mesh in (("tensor 8 and expert 2", MONTA_MESH), ("any mesh", {}))
    ]
    found += [
        Question(
            f"Lina: {experts} experts on {experts} A100",
            lina_cluster(nodes),
            lina_model(experts),
            f"{claim} x over DeepSpeed",
            "a Transformer-XL without its memory; a device's batch is set by the all-to-alls of 16 "
            "experts in the paper's Table 1, links inside a node and the rate of computing by its "
            "step of 4; in the paper's baseline all-to-alls and reductions share the link, here "
            "they never do",
        )
        for experts, nodes, claim in ((4, 1, 1.37), (8, 2, 1.73), (16, 4, 1.47))
    ]
    found += [
        Question(
            f"Hybrid compression: GPT-NeoX-20B on 192 V100, {name}",
            lassen(48),
            NEOX_20B | mesh,
            "+22.5 % TFLOP/s with everything compressed, +17.3 % at baseline loss",
            "its rates by collective and the depth of its pipeline were not readable; between "
            "tensor ranks, inside a node, nothing is compressed here; V100 multiplies float16, "
            "priced here as bfloat16",
            codecs=("hybrid", "strong"),
        )
        for name, mesh in (
            ("any mesh", {}),
            ("tensor 4", {"mesh.tensor": 4, "mesh.stage": 1}),
        )
    ]
    found.append(
        replace(
            found[-1],
            name="Hybrid compression: GPT-NeoX-20B on 192 V100, tensor 4, 4 stages and data",
            model=NEOX_20B | NEOX_STAGES,
            exact=True,
        )
    )
    found.append(
        Question(
            "DeepSeek-V3 on 2,048 H800: its own mesh, as far as it can be had",
            h800(256),
            deepseek_v3(),
            f"{PUBLISHED_HOURS:,} H800 hours a trillion tokens",
            "it has 64 expert ranks, here 32, because stages x expert ranks must divide its "
            "latents of 512; its products are in 8 bits, here in 16; its stages hold 61 layers "
            "unevenly, here 48 evenly and 10 more as data; it overlaps forward with backward "
            "(DualPipe), here one follows the other, and everything is recomputed; it would need "
            "more memory than an H800 has; 16,384 sequences a step in place of 15,360; no "
            "multi-token prediction",
            hours=PUBLISHED_HOURS,
            exact=True,
        )
    )
    return found


def h800(nodes: int) -> Topology:
    """An H100 whose NVLink is cut to 400 GB/s both ways together, as DeepSeek's report says."""
    topology = load_topology(f"dgx_h100:{nodes}")
    link = topology.tiers[0].links
    cut = {k: replace(one, bytes_per_s=one.bytes_per_s * 400 / 900) for k, one in link.items()}
    tiers = (replace(topology.tiers[0], links=cut), *topology.tiers[1:])
    return replace(topology, name="h800", tiers=tiers)


def deepseek_v3() -> dict[str, Any]:
    """The shipped config's model on the published mesh, one sequence a micro-batch."""
    cfg = load_config(str(ROOT / "configs" / "deepseek_v3.py"), [])
    model = {n: get_value(cfg, n) for n, one in fields().items() if n.startswith(MODEL)}
    model = {n: value for n, value in model.items() if value != fields()[n].default}
    mesh = {"mesh.stage": 16, "mesh.expert": 32, "mesh.replica": 4, "train.micro_batches": 128}
    mesh |= {"route": "two_level_merge", "model.remat": "full"}
    data = {"train.batch_sequences": 16_384, "data.sequence_length": 4096}
    return model | mesh | data | {"model.layers_before_stages": 10}


def plan(
    settings: dict[str, Any],
    topology: Topology,
    skew: str = "balanced",
    traces: int | None = PATIENCE,
) -> SearchResult:
    """The planner's answer; settings that it may choose are pinned."""
    cfg = change(Config(plan=PlanConfig(mode="auto")), settings)
    device, pins = topology.device.platform, frozenset(set(settings) & set(CHOSEN))
    limits = Limits(topology.devices, topology.nodes, device, pinned=pins)
    load = read_expert_load(skew, cfg.moe.num_experts)
    return search(cfg, topology, limits, load, traces=traces, progress=lambda _: None)


def with_codecs(one: PricedPlan, preset: str, topology: Topology) -> PricedPlan | None:
    """The same plan with a preset's codecs."""
    cfg = resolve(
        change(one.cfg, {"compression.preset": preset}),
        Limits(topology.devices, topology.nodes, topology.device.platform),
    )
    if cfg is None:
        return None
    step = trace_config(cfg, topology.device.platform)
    return price(step, topology, read_expert_load("balanced", cfg.moe.num_experts))


def answer(question: Question) -> dict[str, Any]:
    """One question's row."""
    given = question.cluster
    topology = load_topology(given) if isinstance(given, str) else given
    if question.exact:
        return exact_answer(question, topology)
    found = plan(question.model, topology)
    best, rule = found.ranked[0], found.best_rule
    baseline, name = (found.rules[rule] if rule else None), f"the best rule of thumb, {rule}"
    if question.baseline is not None:
        baseline = plan(question.model | question.baseline, topology).ranked[0]
        name = "the paper's baseline"
    rows = over_codecs(question, best, topology)
    if baseline is not None:
        rows[f"over {name}"] = baseline.seconds / best.seconds
    return {
        "question": question.name,
        "cluster": given if isinstance(given, str) else f"{given.name}:{given.nodes}",
        "claim": question.claim,
        "differs": question.differs,
        "plan": plan_text(best.cfg),
        "baseline": plan_text(baseline.cfg) if baseline is not None else "none",
        "baseline_name": name,
        "why": sentence(best, baseline, name) if baseline is not None else "",
        "seconds": best.seconds,
        "baseline_seconds": baseline.seconds if baseline is not None else None,
        "gib": best.peak.bytes / 2**30,
        "predicted": rows,
    }


def over_codecs(question: Question, one: PricedPlan, topology: Topology) -> dict[str, float]:
    """How many times as fast a plan is with each preset of codecs."""
    coded = {preset: with_codecs(one, preset, topology) for preset in question.codecs}
    return {
        f"{preset} codecs over none": one.seconds / other.seconds
        for preset, other in coded.items()
        if other is not None
    }


def exact_answer(question: Question, topology: Topology) -> dict[str, Any]:
    """The row of a question that names its whole plan."""
    platform = topology.device.platform
    cfg = resolve(
        change(Config(), question.model), Limits(topology.devices, topology.nodes, platform)
    )
    assert cfg is not None, f"{question.name} breaks a rule"
    load = read_expert_load("balanced", cfg.moe.num_experts)
    best = price(trace_config(cfg, platform, load), topology, load)
    rows = over_codecs(question, best, topology)
    if question.hours is not None:
        hours = 1e12 / tokens_per_second(best) * topology.devices / 3600
        rows[f"published hours over {hours:,.0f} predicted"] = question.hours / hours
    parts = list(terms(best).items())[:6]
    shares = ", ".join(f"{term} {seconds / best.seconds:.0%}" for term, seconds in parts)
    return {
        "question": question.name,
        "cluster": f"{topology.name}:{topology.nodes}",
        "claim": question.claim,
        "differs": question.differs,
        "plan": plan_text(cfg),
        "baseline": "none",
        "baseline_name": "",
        "why": f"of the step: {shares}",
        "seconds": best.seconds,
        "baseline_seconds": None,
        "gib": best.peak.bytes / 2**30,
        "predicted": rows,
    }


def tensor_bound(topology: Topology, tensor: int) -> tuple[float, float, float]:
    """Split over duplicate: all-to-all alone; then the gather after it; then beside it.

    Priced for a dispatch of 256 MiB a rank across the nodes, tensor ranks inside them.
    """
    size, nodes = 2.0**28, topology.nodes
    group = topology.group(1, nodes)
    whole = max(topology.seconds("all_to_all", size, *group))
    part = max(topology.seconds("all_to_all", size / tensor, *group))
    gather = max(topology.seconds("all_gather", size, *topology.group(tensor, 1)))
    return whole / part, whole / (part + gather), whole / max(part, gather)


def for_every_cluster() -> list[dict[str, Any]]:
    """OLMoE planned for 64 devices, or the nearest number, of every known cluster."""
    rows = []
    for name in known_clusters():
        topology = load_topology(name)
        try:
            fitting = topology.of_nodes(max(1, 64 // topology.tiers[0].size))
        except ValueError:
            fitting = topology
        row: dict[str, Any] = {"cluster": name, "devices": fitting.devices, "nodes": fitting.nodes}
        try:
            batch = fitting.devices * round(OLMOE["train.batch_sequences"] / fitting.devices)
            found = plan(
                OLMOE | {"train.batch_sequences": batch},
                fitting,
                traces=None,
            )
            best = found.ranked[0]
            row |= {
                "plan": plan_text(best.cfg),
                "milliseconds": best.seconds * 1e3,
                "gib": best.peak.bytes / 2**30,
                "tokens_a_second": tokens_per_second(best),
                "rules": {
                    name: rule.seconds / best.seconds
                    for name, rule in found.rules.items()
                    if rule.peak.bytes <= found.memory_budget
                },
                "search_seconds": found.seconds,
            }
        except InputError as error:
            row["refused"] = str(error)
        print(row, flush=True)
        rows.append(row)
    return rows


def for_every_routing(cluster: str) -> list[dict[str, Any]]:
    """A small step of OLMoE planned for tokens that fall evenly and not; the even plan for all."""
    topology, rows, even = load_topology(cluster), [], None
    for skew in SKEWS:
        found = plan(FEW_TOKENS, topology, skew)
        best = found.ranked[0]
        even = even or best
        load = read_expert_load(skew, OLMOE["moe.num_experts"])
        # Traced anew: a step that is traced for even tokens has no overflow rounds.
        traced = trace_config(even.cfg, topology.device.platform, load)
        there = price(traced, topology, load)
        rows.append(
            {
                "cluster": cluster,
                "routing": skew,
                "busiest": load.skew,
                "plan": plan_text(best.cfg),
                "seconds": best.seconds,
                "even_plan_seconds": there.seconds,
                "even_plan_fits": there.peak.bytes <= found.memory_budget,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Answers and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="questions with this in their name, no others")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where its pages go")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for folder in (args.out, args.docs):
        folder.mkdir(parents=True, exist_ok=True)
    path = args.out / "plans.json"
    known = json.loads(path.read_text()) if args.only else {"questions": []}
    answers = {row["question"]: row for row in known["questions"]}
    for question in questions():
        if args.only in question.name:
            answers[question.name] = answer(question) | {"date": stamp()["date"]}
            print(json.dumps(answers[question.name], indent=1), flush=True)
    asked = [
        answers[one.name] | {"claim": one.claim, "differs": one.differs}
        for one in questions()
        if one.name in answers
    ]
    if args.only:
        known["questions"] = asked
        path.write_text(json.dumps(known, indent=1) + "\n")
        (args.docs / "papers.md").write_text(page(known, __doc__ or ""))
        return
    bounds = [
        {"cluster": name, "tensor": size, "ratios": tensor_bound(load_topology(name), size)}
        for name in ("a800:2", "dgx_a100:2", "h200:2")
        for size in (2, 4, 8)
    ]
    routings = [row for cluster in SKEWED for row in for_every_routing(cluster)]
    made = stamp()
    record = {"questions": asked, "bounds": bounds, "routings": routings} | made
    record["clusters"] = for_every_cluster()
    path.write_text(json.dumps(record, indent=1) + "\n")
    (args.docs / "papers.md").write_text(page(record, __doc__ or ""))
    (args.docs / "clusters.md").write_text(clusters_page(record["clusters"], made))


if __name__ == "__main__":
    main()
