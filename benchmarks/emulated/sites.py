"""What is an outer loop across sites worth, beside data parallel, codecs and pipeline stages?

Each emulated host is a site: one process, so that only what crosses sites crosses processes. Data
parallel training sums gradients over sites in every step, in float32 and in int4 with feedback;
stages pass hidden states on, with the codecs of `strong`; the outer loop averages weights, all at
once after a period of steps, or a part in each step beside its computation, in int4 with feedback.
All run in turns, beside sites that train alone and send nothing: theirs is the rate that a network
without limits would allow. Each cluster is probed before, and each way priced by what was probed.
In one case a process carries all frames between sites 100 ms late, as kernels may lack what delays
them. A probe meets too often there (after five minutes it had measured no link), so nothing is
priced. Needs root, ip and tc. Writes sites.json and sites.md.

    python -m benchmarks.emulated.sites --out benchmarks/results
    BENCH_SMALL=1 python -m benchmarks.emulated.sites --out /tmp/sites
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.emulated.compression import CONFIG
from benchmarks.emulated.exchange import Case, Variants
from benchmarks.emulated.pipeline import differing
from benchmarks.emulated.planner import probe
from benchmarks.emulated.record import record_cases
from moejax.config.checks.planned import pinned
from moejax.config.load import from_dict
from moejax.plan.cluster.file import from_json
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.price.terms import terms
from moejax.plan.report.tables import plan_text, remarks
from moejax.plan.search.sites import search_all
from moejax.plan.search.space import Limits

SMALL = bool(os.environ.get("BENCH_SMALL"))  # one case of a small model: does it run?
HOSTS = ((2, 2),) if SMALL else ((2, 4), (4, 2))  # sites, devices of each
RATES = (50,) if SMALL else (50, 20, 10, 200)  # Mbit/s
DELAY, LATE = "100ms", 20  # from a site to another, and the rate of that case
PERIOD = 4 if SMALL else 16  # steps in which all of the model is averaged
STEPS = 2 if SMALL else 8  # of a run, where all are short: one step varies by a third
ALONE = "each site alone"
LAYERS = "outer by layers"
PLANNED = "planned"
TRACES = 2
PREDICTED = 0.15  # wanted: of a step's time
RIVALS = ("int4 with feedback", "stages")
MODEL = {
    **CONFIG,
    "mesh.nodes": None,
    "data.sequence_length": 256,
    "moe.capacity_factor": 1.25,
    "optimizer.warmup_steps": 0,
}
if SMALL:
    MODEL |= {"model.width": 128, "moe.expert_hidden": 256, "data.sequence_length": 64}


def case(hosts: int, devices: int, rate: int, delay: str | None = None) -> Case:
    """All ways to train on these sites, at one rate."""
    config = MODEL | {"mesh.replica": hosts, "mesh.expert": devices, "mesh.nodes": hosts}
    gradients = ("compression.dense_gradient", "compression.expert_gradient")
    stages = {"mesh.replica": 1, "mesh.stage": hosts, "train.micro_batches": hosts}
    stages["steps"] = STEPS if delay is None else 1
    own = {"mesh.replica": 1, "mesh.nodes": 1, "alone": True, "steps": STEPS}
    own["train.batch_sequences"] = config["train.batch_sequences"] // hosts
    variants: Variants = {
        ALONE: ("step", own),
        "data parallel": ("step", {}),
        "int4 with feedback": ("step", dict.fromkeys(gradients, "int4+feedback")),
        "stages": ("step", {**stages, "compression.preset": "strong"}),
        # A run has all steps of a period: one of them waits for the others' bytes.
        "outer at once": ("step", {"outer.every": PERIOD, "outer.order": "all", "steps": PERIOD}),
        LAYERS: ("step", {"outer.every": PERIOD, "steps": STEPS}),
    }
    length = config["data.sequence_length"]
    about = (hosts, devices, rate, config, (8, length), variants)
    seldom = ("data parallel",) if rate <= LATE else ()
    return Case("sites", *about, rounds=3, seldom=seldom, delay=delay)


def cases() -> Iterator[Case]:
    """The cases, those of two sites first."""
    for hosts, devices in HOSTS:
        for rate in RATES:
            yield case(hosts, devices, rate)
            if rate == LATE:
                yield case(hosts, devices, rate, DELAY)


def prepare(case: Case, folder: Path) -> tuple[Case, dict[str, Any]]:
    """Probes the cluster. Returns the case with the planner's choice, and the price of each way."""
    if case.delay is not None:
        return case, {}
    facts, _ = probe(case, folder / "topology.json", quick=SMALL)
    topology = from_json(facts, "probe")
    load = read_expert_load("balanced", case.config["moe.num_experts"])
    free = {name: value for name, value in case.config.items() if not name.startswith("mesh.")}
    cfg = from_dict({**free, "plan.mode": "auto", "plan.sites": True})
    limits = Limits(topology.devices, topology.nodes, "cpu", "strong", pinned(cfg))
    found = search_all(cfg, topology, limits, load, traces=TRACES, progress=print)
    best = found.ranked[0].cfg
    whole = {"steps": best.outer.every if best.outer.order == "all" else STEPS}
    plan = dict.fromkeys(("mesh.replica", "mesh.expert"), 1) | differing(best)
    variants: Variants = {**case.variants, PLANNED: ("step", plan | whole)}
    priced = {
        name: predicted(case, settings, topology)
        for name, (_, settings) in variants.items()
        if name != ALONE
    }
    about = {"topology": facts, "predicted": priced, "remarks": remarks(found, topology, load)}
    return replace(case, variants=variants), about | {"plan": plan_text(best)}


def predicted(case: Case, settings: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Seconds of a step by price, the mean over a period, and the terms of it."""
    own = {name: value for name, value in settings.items() if name != "steps"}
    cfg = from_dict({**case.config, **own})
    load = read_expert_load("balanced", cfg.moe.num_experts)
    plan = price(trace_config(cfg, "cpu", load), topology, load)
    return {"seconds": plan.seconds, "terms": terms(plan)}


def main() -> None:
    """Runs the cases and writes the results."""
    jax.config.update("jax_platforms", "cpu")
    record_cases("sites", cases(), page, __doc__ or "", prepare=prepare)


def speed(one: dict[str, Any]) -> float:
    """Tokens a second of all sites together: the median over rounds."""
    return median(one["tokens"] / seconds for seconds in one["seconds"])


def rows(result: dict[str, Any]) -> list[str]:
    """A rate's table."""
    found, priced = result["found"], result.get("predicted", {})
    best = max(speed(found[name]) for name in RIVALS)
    lines = [
        "| way | tokens / s | beside the best of codecs and stages | of sites alone | "
        "predicted, s | seconds (range) | error | MB sent a step |",
        "|---" * 8 + "|",
    ]
    for name, one in found.items():
        share = f"{speed(one) / speed(found[ALONE]):.2f}"
        steps = result["case"]["variants"][name][1].get("steps", 1)
        own = [t / steps for t in one["seconds"]]
        middle, by_price, error = median(own), "", ""
        if name in priced:
            seconds = priced[name]["seconds"]
            by_price, error = f"{seconds:.3f}", f"{seconds / middle - 1:+.0%}"
        lines.append(
            f"| {name} | {speed(one):,.0f} | {speed(one) / best:.2f} | {share} | {by_price} | "
            f"{middle:.3f} ({min(own):.3f} to {max(own):.3f}) | {error} | "
            f"{median(one['sent']) / steps / 1e6:.2f} |"
        )
    if "plan" in result:
        lines += ["", f"- The planner: {result['plan']}."]
    return lines + [f"- It says: {text}" for text in result.get("remarks", ())]


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine = record["machine"]
    lines = [
        "# Several sites",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{record['date']}; {machine['cpu']}, {machine['cpus_used']} CPUs for all sites together; "
        f"JAX {record['jax']}, Python {record['python']}. A period has {PERIOD} steps but where "
        f"the planner chooses. Times are wanted within {PREDICTED:.0%} of their prices. Speed says "
        "nothing about the loss at equal tokens.",
    ]
    for result in record["results"]:
        hosts, devices, rate = (result["case"][name] for name in ("hosts", "devices", "rate"))
        late = result["case"]["delay"]
        link = f"{rate} Mbit/s" + ("" if late is None else f", each way {late}")
        lines += ["", f"## {hosts} sites of {devices} devices, {link}", ""]
        lines += rows(result)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
