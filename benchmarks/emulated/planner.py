"""Does the planner choose well? Its plans and others, measured on emulated clusters.

Each cluster is probed before its set-ups. For each set-up the planner searches by what was probed,
and a dozen of its plans, good and bad, run in turns beside the rules of thumb of people who do not
plan (`moejax.plan.search.space.RULES`). The planner may take codecs as far as `strong`, whose mean
held-out loss is inside the band of uncompressed seeds, one seed of three just above it
(convergence.md); its best plan without any is measured too. The odd set-ups have models and numbers
of devices that no price was made with, and are judged as a group of their own.

Needs root, ip and tc. Writes planner.json and planner.md, and goes on where it was stopped; a
set-up is measured by one run on one machine, which its record names.

    python -m benchmarks.emulated.planner --group odd --plans 8 --rounds 10 --out benchmarks/results
    python -m benchmarks.emulated.planner --group like --plans 5 --rounds 5 --out benchmarks/results

A set-up takes about ten minutes. In two to four this shows only that all runs:

    python -m benchmarks.emulated.planner --only "top-1, 3 x 1" --quick --plans 4 --out /tmp

When prices have changed, the recorded plans can be priced and judged again without root, in
minutes; what the planner would now choose must then be among those that were measured.

    python -m benchmarks.emulated.planner --out benchmarks/results --reprice
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.emulated.exchange import Case, Variants, run
from benchmarks.emulated.planner_page import judge, page
from benchmarks.emulated.setups import GROUPS, SETUPS, Setup, config_of, config_of_row
from benchmarks.machine import RESULTS, ROOT, stamp
from moejax.config.checks.planned import pinned
from moejax.config.fields import fields
from moejax.plan.cluster.file import from_json
from moejax.plan.cluster.topology import Link, Topology
from moejax.plan.price.candidate import PricedPlan, price, trace_config
from moejax.plan.price.routing import ExpertLoad, read_expert_load
from moejax.plan.price.terms import terms
from moejax.plan.probe.fit import fit_link
from moejax.plan.report.tables import plan_text
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.search import SearchResult, search
from moejax.plan.search.space import Limits, meshes, plan_of

PLANS = 12  # measured of each set-up, the rules of thumb beside them
UNSEEN = 4  # one of so many, at least, is a mesh that the search did not trace
CODECS = "strong"  # that may be chosen
SAME = 0.005  # of a step: less is no difference
SLOW = 3.0  # over the chosen plan's seconds, by price: such a plan runs in every third round
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def probe(
    setup: Setup,
    path: Path,
    *,
    quick: bool,
    own_cores: bool = False,
) -> tuple[dict[str, Any], float]:
    """Measures the emulated cluster as a user would; the topology, and seconds of the command."""
    command = [ROOT / "launch/emulate", "--hosts", setup.hosts]
    command += ["--devices-per-host", setup.devices]
    command += ["--link", f"{setup.rate}mbit"] if setup.rate else []
    command += ["--own-cores"] if own_cores else []
    command += ["--", sys.executable, "-m", "moejax.plan", "probe", "--out", path]
    command += ["--quick"] if quick else []
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    subprocess.run(list(map(str, command)), env=environment, check=True)
    return json.loads(path.read_text()), time.perf_counter() - began


def probed(setup: Setup, record: dict[str, Any], folder: Path, *, quick: bool) -> Topology:
    """The cluster as the record has it; measured now, if that was on another machine or boot."""
    known = record["clusters"].get(setup.cluster, {})
    if known.get("boot") != BOOT:
        topology, took = probe(setup, folder / "topology.json", quick=quick)
        record["clusters"][setup.cluster] = {"seconds": took, "topology": topology, "boot": BOOT}
    return from_json(record["clusters"][setup.cluster]["topology"], setup.cluster)


def plan(setup: Setup, topology: Topology, traces: int | None) -> SearchResult:
    """All that the planner finds in a number of traces."""
    limits, load = ask(setup, topology)
    return search(config_of(setup), topology, limits, load, traces=traces, progress=print)


def ask(setup: Setup, topology: Topology) -> tuple[Limits, ExpertLoad]:
    """What may be chosen, and how tokens fall."""
    cfg = config_of(setup)
    limits = Limits(topology.devices, topology.nodes, "cpu", CODECS, pinned(cfg))
    return limits, read_expert_load("balanced", cfg.moe.num_experts)


def chosen(setup: Setup, topology: Topology, found: SearchResult, count: int) -> list[PricedPlan]:
    """What is measured: the best by price, others that the search looked at, and some it did not.

    Of plans that cost the same by price, one: most are one program under two names.
    """
    distinct = found.ranked[:1]
    for one in found.ranked[1:]:
        if one.seconds > (1 + SAME) * distinct[-1].seconds:
            distinct.append(one)
    first = count // 3
    plans = [*distinct[:first], *spread(distinct[first:], count - first - count // UNSEEN)]
    plans += unseen(setup, topology, found, count - len(plans))
    for one in (found.plain, *found.rules.values()):
        if one is not None and all(one.cfg != other.cfg for other in plans):
            plans.append(one)
    return plans


def unseen(setup: Setup, topology: Topology, found: SearchResult, count: int) -> list[PricedPlan]:
    """Meshes that a estimate was enough to leave aside, from the best of them to the worst."""
    cfg = config_of(setup)
    limits, load = ask(setup, topology)
    estimates = sorted(
        (Estimate(one, topology) for one in meshes(cfg, limits)), key=Estimate.seconds
    )
    seen = {one.cfg.mesh for one in found.ranked}
    left = [estimate.cfg for estimate in estimates if estimate.cfg.mesh not in seen]
    return [price(trace_config(one, "cpu"), topology, load) for one in spread(left, count)]


def spread(items: list[Any], count: int) -> list[Any]:
    """So many, evenly from the first to the last; all, if there are no more."""
    if len(items) <= count:
        return items
    if count == 1:
        return items[:1]
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]


def measure(
    setup: Setup, plans: list[PricedPlan], rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """Runs the plans in turns; returns what each was predicted and measured to take."""
    variants: Variants = {}
    for number, one in enumerate(plans):
        values = {name: value for name, value in plan_of(one.cfg).items() if _differs(name, value)}
        variants[str(number)] = ("step", values)
    model = setup.settings | {"mesh.nodes": setup.hosts, "plan.mode": "hand"}
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


def refitted(topology: Topology) -> Topology:
    """The cluster with its links fitted by today's code to what was measured of them."""

    def fitted(link: Link) -> Link:
        return fit_link(link.points) if len(link.points) > 1 else link

    tiers = [
        replace(tier, links={kind: fitted(link) for kind, link in tier.links.items()})
        for tier in topology.tiers
    ]
    return replace(topology, tiers=tuple(tiers))


def reprice(record: dict[str, Any], traces: int | None) -> None:
    """Prices what was measured with today's code, which must choose a plan that was measured.

    Raises:
      SystemExit: if it does not.
    """
    for name, one in record["results"].items():
        setup = Setup(**one["setup"])
        facts = record["clusters"][setup.cluster]["topology"]
        topology = refitted(from_json(facts, setup.cluster))
        found = plan(setup, topology, traces)
        rows = one["rows"]
        best = found.ranked[0].cfg
        known = [plan_of(config_of_row(setup, row)) for row in rows]
        if plan_of(best) not in known:
            raise SystemExit(f"{name}: now {plan_text(best)}; measure it again")
        rows.insert(0, rows.pop(known.index(plan_of(best))))
        load = ask(setup, topology)[1]
        for row in rows:
            priced = price(trace_config(config_of_row(setup, row), "cpu"), topology, load)
            row |= {"predicted": priced.seconds, "terms": terms(priced)}
        one["search_seconds"] = found.seconds


def _differs(name: str, value: Any) -> bool:
    return value != fields()[name].default


def main() -> None:
    """Runs the set-ups and writes the results after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="set-ups whose name starts with this")
    parser.add_argument("--group", choices=GROUPS, help="set-ups of one group")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--plans", type=int, default=PLANS, help="measured of each set-up")
    parser.add_argument("--quick", action="store_true", help="probe quickly, to see that all runs")
    parser.add_argument("--traces", type=int, help="of a search")
    parser.add_argument("--reprice", action="store_true", help="measure nothing")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = args.out / "planner.json"
    record = json.loads(path.read_text()) if path.exists() else {"clusters": {}, "results": {}}
    if args.reprice:
        reprice(record, args.traces)
        save(record, args.out)
        return
    for setup in (s for s in SETUPS if str(s).startswith(args.only)):
        if str(setup) in record["results"] or args.group not in (None, setup.group):
            continue
        print(f"== {setup}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            topology = probed(setup, record, Path(folder), quick=args.quick)
            save(record, args.out)
            found = plan(setup, topology, args.traces)
            plans = chosen(setup, topology, found, args.plans)
            rows = measure(setup, plans, args.rounds, Path(folder))
        for row, one in zip(rows, plans, strict=True):
            names = [name for name, rule in found.rules.items() if rule.cfg == one.cfg]
            row["rule"] = names[0] if names else None
            row["plain"] = found.plain is not None and one.cfg == found.plain.cfg
        record["results"][str(setup)] = {
            "setup": asdict(setup),
            "search_seconds": found.seconds,
            "flops": topology.device.peak("float32"),
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
    (folder / "planner.md").write_text(page(record, __doc__ or ""))


if __name__ == "__main__":
    main()
