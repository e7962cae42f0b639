"""Does the planner choose well? Its plans and others, measured on emulated clusters.

Each cluster is probed before its set-ups. For each set-up the planner searches by what was probed,
and a dozen of its plans, good and bad, run in turns beside the default of people who do not plan
(experts over all devices, flat, no codecs). The planner may take codecs as far as `strong`, whose
mean held-out loss is inside the band of uncompressed seeds, one seed of three just above it
(convergence.md); its best plan without any is measured too.

Needs root, ip and tc. Writes planner.json and planner.md, and goes on where it was stopped; a
set-up is measured by one run on one machine, which its record names.

    python -m benchmarks.emulated.planner --out benchmarks/results

When prices have changed, the recorded plans can be priced and judged again without root, in
minutes; what the planner would now choose must then be what was measured as its choice.

    python -m benchmarks.emulated.planner --out benchmarks/results --reprice
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import jax

from benchmarks.emulated.exchange import Case, Variants, run
from benchmarks.machine import RESULTS, ROOT, stamp
from moejax.config.checks.planned import pinned
from moejax.config.compression import NO_COMPRESSION, build_compression
from moejax.config.fields import change, fields
from moejax.config.schema import Config, PlanConfig
from moejax.plan.cluster.file import from_json
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan, price, trace_config
from moejax.plan.price.routing import ExpertLoad, read_routing
from moejax.plan.price.terms import terms
from moejax.plan.report.tables import plan_text
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.search import SearchResult, search
from moejax.plan.search.space import Limits, meshes, plan_of

PLANS = 12  # measured of each set-up, the default beside them
OFTEN = 0.1  # of the rounds: less is chance
UNSEEN = 3  # of them at least, meshes that the search did not trace
CODECS = "strong"  # that may be chosen
SAME = 0.005  # of a step: less is no difference
SLOW = 3.0  # over the chosen plan's seconds, by price: such a plan runs in every third round
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
MODELS: dict[str, dict[str, Any]] = {
    "balanced": {
        "model.width": 256,
        "model.num_layers": 2,
        "model.num_heads": 8,
        "model.num_kv_heads": 8,
        "moe.num_experts": 8,
        "moe.expert_hidden": 512,
        "train.batch_sequences": 16,
        "data.sequence_length": 128,
    },
    "attention": {
        "model.width": 256,
        "model.num_layers": 2,
        "model.num_heads": 16,
        "model.num_kv_heads": 16,
        "moe.num_experts": 8,
        "moe.expert_hidden": 64,
        "train.batch_sequences": 8,
        "data.sequence_length": 512,
    },
    "exchange": {
        "model.width": 256,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "moe.num_experts": 16,
        "moe.experts_per_token": 4,
        "moe.expert_hidden": 1024,
        "train.batch_sequences": 16,
        "data.sequence_length": 64,
    },
}
EVERY = {"model.vocab_size": 512, "model.head_width": 32, "moe.capacity_factor": 1.25}


@dataclass(frozen=True)
class Setup:
    """A cluster and a model."""

    model: str
    hosts: int
    devices: int  # of each host
    rate: int  # Mbit/s

    def __str__(self) -> str:
        return f"{self.model}, {self.cluster}"

    @property
    def cluster(self) -> str:
        """Its name; set-ups on one cluster share what was probed."""
        return f"{self.hosts} x {self.devices}, {self.rate} Mbit/s"


SETUPS = (
    *(Setup("balanced", 2, 4, rate) for rate in (50, 100, 200, 400)),
    *(Setup("exchange", 2, 4, rate) for rate in (100, 400)),
    *(Setup("attention", 2, 4, rate) for rate in (100, 400)),
    *(Setup(model, 4, 2, 100) for model in MODELS),
)


def config_of(setup: Setup) -> Config:
    """The model, with everything else free."""
    return change(Config(plan=PlanConfig(mode="auto")), EVERY | MODELS[setup.model])


def probe(setup: Setup, path: Path) -> tuple[dict[str, Any], float]:
    """Measures the emulated cluster as a user would; the topology, and seconds of the command."""
    command = [ROOT / "launch/emulate", "--hosts", setup.hosts]
    command += ["--devices-per-host", setup.devices, "--link", f"{setup.rate}mbit", "--"]
    command += [sys.executable, "-m", "moejax.plan", "probe", "--out", path]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    subprocess.run(list(map(str, command)), env=environment, check=True)
    return json.loads(path.read_text()), time.perf_counter() - began


def plan(setup: Setup, topology: Topology, seconds: float | None) -> SearchResult:
    """All that the planner finds in some time."""
    limits, routing = ask(setup, topology)
    return search(config_of(setup), topology, limits, routing, seconds=seconds, progress=print)


def ask(setup: Setup, topology: Topology) -> tuple[Limits, ExpertLoad]:
    """What may be chosen, and how tokens fall."""
    cfg = config_of(setup)
    limits = Limits(topology.devices, topology.nodes, "cpu", CODECS, pinned(cfg))
    return limits, read_routing("balanced", cfg.moe.num_experts)


def chosen(setup: Setup, topology: Topology, found: SearchResult) -> list[PricedPlan]:
    """What is measured: the best by price, others that the search looked at, and some it did not.

    Of plans that cost the same by price, one: most are one program under two names.
    """
    distinct = found.ranked[:1]
    for one in found.ranked[1:]:
        if one.seconds > (1 + SAME) * distinct[-1].seconds:
            distinct.append(one)
    plans = [*distinct[:4], *spread(distinct[4:], PLANS - 4 - UNSEEN)]
    plans += unseen(setup, topology, found, PLANS - len(plans))
    for one in (plain(found), found.baseline):
        if one is not None and all(one.cfg != other.cfg for other in plans):
            plans.append(one)
    return plans


def plain(found: SearchResult) -> PricedPlan | None:
    """The best by price of those without codecs."""
    return next((one for one in found.ranked if not _codecs(one.cfg)), None)


def _codecs(cfg: Config) -> bool:
    return build_compression(cfg.compression) != NO_COMPRESSION


def unseen(setup: Setup, topology: Topology, found: SearchResult, count: int) -> list[PricedPlan]:
    """Meshes that a estimate was enough to leave aside, from the best of them to the worst."""
    cfg = config_of(setup)
    limits, routing = ask(setup, topology)
    estimates = sorted(
        (Estimate(one, topology) for one in meshes(cfg, limits)), key=Estimate.seconds
    )
    seen = {one.cfg.mesh for one in found.ranked}
    left = [estimate.cfg for estimate in estimates if estimate.cfg.mesh not in seen]
    return [price(trace_config(one, "cpu"), topology, routing) for one in spread(left, count)]


def spread(items: list[Any], count: int) -> list[Any]:
    """So many, evenly from the first to the last; all, if there are no more."""
    if len(items) <= count:
        return items
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]


def measure(
    setup: Setup, plans: list[PricedPlan], rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """Runs the plans in turns; returns what each was predicted and measured to take."""
    variants: Variants = {}
    for number, one in enumerate(plans):
        values = {name: value for name, value in plan_of(one.cfg).items() if _differs(name, value)}
        variants[str(number)] = ("step", values)
    model = EVERY | MODELS[setup.model] | {"mesh.nodes": setup.hosts, "plan.mode": "hand"}
    shape = (model["train.batch_sequences"], model["data.sequence_length"])
    seldom = tuple(str(n) for n, one in enumerate(plans) if one.seconds > SLOW * plans[0].seconds)
    case = Case(
        "planner", setup.hosts, setup.devices, setup.rate, model, shape, variants, rounds, seldom
    )
    found = run(case, folder)
    return [
        {
            "settings": variants[str(number)][1],
            "predicted": one.seconds,
            "terms": terms(one),
            "seconds": found[str(number)]["seconds"],
        }
        for number, one in enumerate(plans)
    ]


def reprice(record: dict[str, Any], seconds: float | None) -> None:
    """Prices what was measured with today's code, which must choose the plans that it chose then.

    Raises:
      SystemExit: if it does not: that choice was not measured.
    """
    for name, one in record["results"].items():
        setup = Setup(**one["setup"])
        topology = from_json(record["clusters"][setup.cluster]["topology"], setup.cluster)
        found = plan(setup, topology, seconds)
        rows = one["rows"]
        best = found.ranked[0].cfg
        if plan_of(best) != plan_of(config_of_row(setup, rows[0])):
            raise SystemExit(f"{name}: now {plan_text(best)}; measure it again")
        routing = ask(setup, topology)[1]
        for row in rows:
            priced = price(trace_config(config_of_row(setup, row), "cpu"), topology, routing)
            row |= {"predicted": priced.seconds, "terms": terms(priced)}
        one["search_seconds"] = found.seconds


def config_of_row(setup: Setup, row: dict[str, Any]) -> Config:
    """A plan that was measured."""
    return change(config_of(setup), {"mesh.nodes": setup.hosts} | row["settings"])


def _differs(name: str, value: Any) -> bool:
    return value != fields()[name].default


def judge(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Regret, rank correlation, errors; the default over the chosen plan and over the plain one."""
    measured = [median(row["seconds"]) for row in rows]
    predicted = [row["predicted"] for row in rows]
    ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
    left_out = [
        abs(predicted[i] * median(ratios[:i] + ratios[i + 1 :]) / measured[i] - 1)
        for i in range(len(rows))
    ]
    pairs = list(combinations(range(len(rows)), 2))
    apart = [(a, b) for a, b in pairs if _apart(rows[a]["seconds"], rows[b]["seconds"])]

    def agreement(pairs: list[tuple[int, int]]) -> float:
        return mean(
            math.copysign(1, (measured[a] - measured[b]) * (predicted[a] - predicted[b]))
            for a, b in pairs
        )

    took = {}
    for name in ("default", "plain"):
        place = next((i for i, row in enumerate(rows) if row[name]), None)
        took[name] = math.nan if place is None else measured[place]
    return {
        "plans": len(rows),
        "regret": measured[0] / min(measured) - 1,
        "kendall": agreement(pairs),
        "kendall_apart": agreement(apart),
        "apart": len(apart) / len(pairs),
        "left_out": median(left_out),
        "raw": median(abs(1 / ratio - 1) for ratio in ratios),
        "default_over_chosen": took["default"] / measured[0],
        "default_over_plain": took["default"] / took["plain"],
        "best": min(range(len(rows)), key=measured.__getitem__),
    }


def _apart(one: list[float], other: list[float]) -> bool:
    """Whether one plan was faster than another in more than nine of ten rounds."""
    if len(one) != len(other):
        return max(one) < min(other) or max(other) < min(one)
    faster = mean(a < b for a, b in zip(one, other, strict=True))
    return not OFTEN < faster < 1 - OFTEN


def main() -> None:
    """Runs the set-ups and writes the results after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="set-ups whose name starts with this")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, help="of a search")
    parser.add_argument("--reprice", action="store_true", help="measure nothing")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = args.out / "planner.json"
    record = json.loads(path.read_text()) if path.exists() else {"clusters": {}, "results": {}}
    if args.reprice:
        reprice(record, args.seconds)
        save(record, args.out)
        return
    for setup in (s for s in SETUPS if str(s).startswith(args.only)):
        if str(setup) in record["results"]:
            continue
        print(f"== {setup}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            known = record["clusters"].get(setup.cluster, {})
            if known.get("boot") != BOOT:  # another machine, or this one on another day
                topology, took = probe(setup, Path(folder) / "topology.json")
                known = {"seconds": took, "topology": topology, "boot": BOOT}
                record["clusters"][setup.cluster] = known
            topology = from_json(record["clusters"][setup.cluster]["topology"], setup.cluster)
            found = plan(setup, topology, args.seconds)
            plans = chosen(setup, topology, found)
            rows = measure(setup, plans, args.rounds, Path(folder))
        for row, one in zip(rows, plans, strict=True):
            for name, other in (("default", found.baseline), ("plain", plain(found))):
                row[name] = other is not None and one.cfg == other.cfg
        record["results"][str(setup)] = {
            "setup": asdict(setup),
            "search_seconds": found.seconds,
            "rows": rows,
            **stamp(),
        }
        print(json.dumps(judge(rows), indent=1), flush=True)
        save(record, args.out)
    save(record, args.out)


def save(record: dict[str, Any], folder: Path) -> None:
    """Writes the results and their page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planner.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "planner.md").write_text(page(record))


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    results = {
        name: one | {"judged": judge(one["rows"])} for name, one in record["results"].items()
    }
    lines = [
        "# Plans, predicted and measured",
        "",
        *(__doc__ or "").strip().splitlines(),
        "",
        f"{'; '.join(sorted({where(one) for one in results.values()}))}.",
        "",
        "Regret: the chosen plan's time over the best measured. Left out: the error of a "
        "prediction scaled by what the other plans of the set-up took over theirs; raw: not "
        "scaled. Times are medians over rounds in turns. Kendall: of all pairs of plans, and of "
        "those of which one was faster in more than nine of ten rounds (their share).",
        "",
        "| set-up | plans | regret | Kendall | of pairs apart | left out | raw | "
        "default / chosen | default / best without codecs | search (s) |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in results.items():
        j = one["judged"]
        lines.append(
            f"| {name} | {j['plans']} | {j['regret']:.1%} | {j['kendall']:.2f} | "
            f"{j['kendall_apart']:.2f} ({j['apart']:.0%}) | "
            f"{j['left_out']:.0%} | {j['raw']:.0%} | {j['default_over_chosen']:.2f} | "
            f"{j['default_over_plain']:.2f} | "
            f"{one['search_seconds']:.0f} |"
        )
    lines += ["", *summary(results), "", *by_rate(results), *probes(record["clusters"]), ""]
    for name, one in results.items():
        rows = one["rows"]
        best = rows[one["judged"]["best"]]
        lines += [
            f"## {name}",
            "",
            f"Chosen: {words(one, rows[0])}. Best measured: {words(one, best)}.",
            "",
            "| plan | predicted (s) | measured (s) | range |",
            "|---|---:|---:|---|",
        ]
        for row in rows:
            took = row["seconds"]
            note = " (default)" if row["default"] else ""
            lines.append(
                f"| {words(one, row)}{note} | {row['predicted']:.3f} | {median(took):.3f} | "
                f"{min(took):.3f} to {max(took):.3f} |"
            )
        lines.append("")
    return "\n".join(lines)


def words(one: dict[str, Any], row: dict[str, Any]) -> str:
    """A plan of a set-up."""
    return plan_text(config_of_row(Setup(**one["setup"]), row))


def where(one: dict[str, Any]) -> str:
    """On what a set-up was measured, and when."""
    machine = one["machine"]
    return f"{machine['cpu']}, {machine['cpus_used']} cores, JAX {one['jax']}, {one['date']}"


def summary(results: dict[str, Any]) -> list[str]:
    """What the set-ups say together."""
    judged = [one["judged"] for one in results.values()]
    over = [j["default_over_chosen"] for j in judged if not math.isnan(j["default_over_chosen"])]
    return [
        f"Over {len(judged)} set-ups: regret {median(j['regret'] for j in judged):.1%} median, "
        f"{max(j['regret'] for j in judged):.1%} worst; Kendall "
        f"{median(j['kendall'] for j in judged):.2f} median, "
        f"{min(j['kendall'] for j in judged):.2f} worst; left out "
        f"{median(j['left_out'] for j in judged):.0%} median, "
        f"{max(j['left_out'] for j in judged):.0%} worst. The chosen plan is at least 1.3 times as "
        f"fast as the default in {sum(x >= 1.3 for x in over)} of {len(over)}, least "
        f"{min(over, default=math.nan):.2f} times."
    ]


def by_rate(results: dict[str, Any]) -> list[str]:
    """What is chosen and what is best for one model and one number of devices, as links differ."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in results.values():
        model, hosts, devices, _ = one["setup"].values()
        groups.setdefault(f"{model}, {hosts} x {devices}", []).append(one)
    lines = []
    for name, group in groups.items():
        if len(group) < 2:
            continue
        lines += [
            f"{name}, as the links' rate changes:",
            "",
            "| Mbit/s | chosen | best measured |",
            "|---:|---|---|",
        ]
        for one in sorted(group, key=lambda one: one["setup"]["rate"]):
            chosen, best = one["rows"][0], one["rows"][one["judged"]["best"]]
            said = "the same" if best is chosen else words(one, best)
            lines.append(f"| {one['setup']['rate']} | {words(one, chosen)} | {said} |")
        lines.append("")
    return lines


def probes(clusters: dict[str, Any]) -> list[str]:
    """How long each cluster took to probe, and what was found."""
    lines = ["| cluster | probed in (s) | Mbit/s a host, all-to-all | float32 GFLOP/s a device |"]
    lines.append("|---|---:|---:|---:|")
    for name, one in clusters.items():
        topology = from_json(one["topology"], name)
        rate = 8e-6 * topology.tiers[-1].links["all_to_all"].bytes_per_s * topology.tiers[0].size
        largest = topology.device.products["float32"][-1][1] / 1e9
        lines.append(f"| {name} | {one['seconds']:.0f} | {rate:.0f} | {largest:.1f} |")
    return lines


if __name__ == "__main__":
    main()
