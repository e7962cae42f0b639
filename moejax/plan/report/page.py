"""Writes a page about a plan: one HTML file that contains everything it needs.

Python collects the data; `page.html` and `page.js` draw it. Names from users' files are
embedded as JSON in which no tag can end, and the page shows them as text, never as markup.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from moejax.errors import write_whole
from moejax.html import embed, filled
from moejax.layout import route
from moejax.model.count import count
from moejax.plan.cluster.topology import Topology
from moejax.plan.price import terms
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.cost import SimulatedStep
from moejax.plan.price.routing import ExpertLoad
from moejax.plan.price.sensitivity import ChangedSteps, sensitivity
from moejax.plan.report import tables
from moejax.plan.search.search import SearchResult
from moejax.plan.search.space import RULES
from moejax.plan.trace.reader import REST
from moejax.plan.trace.schedule import Op, Schedule

TEMPLATE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.html", "page.js"))
MAX_PLANS = 20  # plans to show
ASKED = 5  # plans with a sensitivity table
SEARCH = ("meshes", "traced", "too_large", "seconds", "cut")


def write_report(result: SearchResult, topology: Topology, load: ExpertLoad, path: Path) -> None:
    """Writes the page. Takes a second or two, because it simulates plans on changed clusters."""
    data = embed(report_data(result, topology, load))
    page = filled(TEMPLATE, SCRIPT=SCRIPT.read_text("utf-8"), DATA=data)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)


def report_data(result: SearchResult, topology: Topology, load: ExpertLoad) -> dict[str, Any]:
    """Returns the page's data. Seconds of a step, bytes of one device."""
    best, device = result.ranked[0], topology.device
    ranked = [(str(index + 1), plan) for index, plan in enumerate(result.ranked[:MAX_PLANS])]
    shown = tables.named_rows(ranked, result)
    rule = result.rules.get(result.best_rule or "")
    asked = [plan for _, plan in shown[1:] if plan in result.ranked[:ASKED] or plan is rule]
    steps = {id(plan): ChangedSteps(plan, topology, load) for plan in (best, *asked)}
    changes = {id(plan): sensitivity(steps[id(best)], steps[id(plan)]) for plan in asked}
    drawn = [(name, plan) for name, plan in shown if plan in result.ranked[:2] or plan is rule]
    return {
        "model": _model(best),
        "cluster": {
            "name": topology.name,
            "source": topology.source,
            "device": device.name,
            "devices": topology.devices,
            "nodes": topology.nodes,
            "memory_bytes": device.memory_bytes,
            "peak_flops_per_s": device.peak(best.cfg.model.dtype),
            "links": [tier.name for tier in topology.tiers],
        },
        "routing": {"name": load.name, "skew": load.skew},
        "search": {name: getattr(result, name) for name in SEARCH},
        "rules": {name: RULES[name] for name in result.rules},
        "rule": result.best_rule,
        "said": [tables.gain_text(result), *tables.remarks(result, topology, load)],
        "plans": [_plan(plan, name, topology, changes.get(id(plan))) for name, plan in shown],
        "timelines": [{"plan": name, **_timeline(plan)} for name, plan in drawn],
        "traffic": _traffic(best),
        "memory": _memory(best, steps[id(best)]),
    }


def _model(best: PricedPlan) -> dict[str, Any]:
    cfg, train_step = best.cfg, best.traced.train_step
    counts = count(cfg, train_step.parameter_sizes(), train_step.adapter_sizes())
    return {
        "parameters": counts.total,
        "active": counts.active,
        "flops_per_token": counts.flops_per_token,
        "layers": cfg.model.num_layers,
        "width": cfg.model.width,
        "experts": cfg.moe.num_experts if cfg.model.has_experts else 0,
        "experts_per_token": cfg.moe.experts_per_token,
        "expert_hidden": cfg.moe.expert_hidden,
        "sequences": cfg.train.batch_sequences,
        "sequence_length": cfg.data.sequence_length,
    }


def _plan(
    plan: PricedPlan, name: str, topology: Topology, changes: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Returns a plan, its prices, and `changes`: its sensitivity table, or None if not computed."""
    return {
        "name": name,
        "mesh": tables.mesh_text(plan.cfg),
        "route": tables.exchange_text(plan.cfg),
        "route_text": route.explain(plan.traced.train_step.spec.route),
        "rest": tables.rest_text(plan.cfg),
        "rest_parts": tables.rest_parts(plan.cfg),
        "codecs": tables.codec_text(plan.cfg),
        "fits": plan.peak.bytes <= topology.device.memory_bytes
        and (topology.host is None or plan.node_bytes <= topology.host.memory_bytes),
        "changes": changes,
        **terms.to_json(plan),
    }


def _traffic(plan: PricedPlan) -> list[dict[str, Any]]:
    """Returns bytes and seconds of each class of traffic on each link, over all layers."""
    size: dict[tuple[str, str], float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for share, simulated in plan.parts:
        for key, sent in simulated.totals.bytes_sent.items():
            size[key] += share * sent
            seconds[key] += share * simulated.totals.sent[key]
    return [
        {"link": link, "class": name, "bytes": size[link, name], "seconds": seconds[link, name]}
        for link, name in sorted(size, key=lambda key: (-seconds[key], -size[key]))
    ]


def _memory(plan: PricedPlan, steps: ChangedSteps) -> dict[str, Any]:
    """Returns the step's arguments by kind, and its temporaries at the peak by scope.

    Arrays stacked by loops have own names.
    """
    arguments = plan.traced.train_step.argument_bytes()
    arguments["counters"] = plan.steps.arguments - sum(arguments.values())
    peaks = [plan.traced.peak(_naming_loops(schedule)) for _, schedule, _ in steps.runs]
    fullest = max(peaks, key=lambda peak: peak.bytes)
    return {
        "arguments": arguments,
        "temporary": dict(sorted(fullest.by_scope.items(), key=lambda item: -item[1])),
        "bytes": plan.steps.bytes,
        "evaluation": plan.evaluation.bytes,
    }


def _naming_loops(schedule: Schedule) -> Schedule:
    """Returns the schedule with scopes for the loops over layers, named after their arrays."""
    later = {b for op in schedule.ops if op.backward for b in op.reads}
    ops = []
    for op in schedule.ops:
        if op.body is not None:
            saves = not op.backward and later.intersection(op.writes)
            name = ("kept for backward" if saves else "gradients") if op.scope == REST else op.scope
            op = replace(op, scope=name, body=_naming_loops(op.body))
        ops.append(op)
    return replace(schedule, ops=tuple(ops))


def _timeline(plan: PricedPlan) -> dict[str, Any]:
    """Returns the main step as a list of nodes: the whole step first, then trips of loops.

    A task is [lane, name, about, start, seconds, bytes, node of its trip or -1]; lane, name and
    about are indices into `text`. Tasks of zero seconds are left out.
    """
    share, simulated = max(plan.parts, key=lambda part: part[0])
    names: dict[str, int] = {}
    nodes: list[dict[str, Any]] = []
    _add_node(simulated, nodes, names, name="the whole step", trip_count=1, unrolled=1)
    return {"share": share, "nodes": nodes, "text": list(names)}


def _add_node(
    simulated: SimulatedStep, nodes: list[dict[str, Any]], names: dict[str, int], **about: Any
) -> int:
    """Adds a timeline and the timelines of its loops. Returns its index."""
    index = len(nodes)
    nodes.append({})

    def number(text: str) -> int:
        return names.setdefault(text, len(names))

    tasks = []
    line = simulated.timeline
    for lane, order in line.lanes().items():
        for task in order:
            start, end, op = line.start_s[task], line.end_s[task], simulated.ops[task]
            name, inner = line.tasks[task].name, -1
            if task in simulated.inside:
                trip, trip_count = simulated.inside[task]
                name = _loop_name(trip, op)
                inner = _add_node(
                    trip, nodes, names, name=name, trip_count=trip_count, unrolled=op.unrolled
                )
            if end > start:
                labels = (number(lane), number(name), number(_about(op)))
                figures = (_short(x) for x in (start, end - start, simulated.sizes[task]))
                tasks.append([*labels, *figures, inner])
    nodes[index] = {
        **about,
        "seconds": simulated.seconds,
        "computed": sum(simulated.totals.computed.values()),
        "sent": [
            [link, name, _short(seconds), _short(simulated.totals.bytes_sent[link, name])]
            for (link, name), seconds in simulated.totals.sent.items()
        ],
        "tasks": tasks,
    }
    return index


def _loop_name(trip: SimulatedStep, op: Op) -> str:
    """Returns a loop's label: its trip count and its largest term."""
    computed = trip.totals.computed
    fullest = " and ".join(sorted(computed, key=lambda name: -computed[name])[:2]) or "loop"
    return f"{op.trip_count:g} x {fullest}{', backward' if op.backward else ''}"


def _about(op: Op) -> str:
    if op.body is not None:
        return "loop"
    what, sent = f"{op.kind} {op.dtype}".strip(), op.collective
    if sent is not None:
        what = f"{sent.kind} of {sent.dtype} over {', '.join(sent.axes)}"
    return f"{what}{', backward' if op.backward else ''}"


def _short(value: float) -> float:
    """Rounds to seven digits, because a page holds thousands of numbers."""
    return float(f"{value:.7g}")
