"""A page about a plan: one file that any browser shows, with all it needs inside.

Python says what was found; `report.html` and `report.js` draw it. What users' files named stays
data: it is embedded as JSON in which no tag can end, and the page makes text of it, never markup.
"""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from moejax.errors import write_whole
from moejax.layout import route
from moejax.model.count import count
from moejax.plan.cluster.topology import Topology
from moejax.plan.price import terms
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.cost import SimulatedStep
from moejax.plan.price.routing import ExpertLoad
from moejax.plan.price.sensitivity import Steps, sensitivity
from moejax.plan.report import tables
from moejax.plan.search.search import SearchResult
from moejax.plan.trace.reader import REST
from moejax.plan.trace.schedule import Op, Schedule

TEMPLATE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.html", "page.js"))
MOST = 20  # plans shown
ASKED = 5  # of them, that are asked what would have to change


def write_report(found: SearchResult, topology: Topology, routing: ExpertLoad, path: Path) -> None:
    """Writes the page. Takes a second or two: some plans are played again on other clusters."""
    parts = {
        "SCRIPT": SCRIPT.read_text("utf-8"),
        "DATA": embed(report_data(found, topology, routing)),
    }
    page = re.sub(r"{{(SCRIPT|DATA)}}", lambda place: parts[place[1]], TEMPLATE.read_text("utf-8"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)


def embed(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it begins a tag or a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def report_data(found: SearchResult, topology: Topology, routing: ExpertLoad) -> dict[str, Any]:
    """What the page shows. Seconds are of a step, bytes of one device."""
    best, device = found.ranked[0], topology.device
    shown = {str(place + 1): one for place, one in enumerate(found.ranked[:MOST])}
    if found.baseline is not None:
        same = next((name for name, one in shown.items() if one.cfg == found.baseline.cfg), "")
        shown.pop(same, None)
        shown[f"{same} default".strip()] = found.baseline
    order = [best, *(one for one in shown.values() if one is not best)]
    asked = [one for one in order[1:] if one in found.ranked[:ASKED] or one is found.baseline]
    steps = {id(one): Steps(one, topology, routing) for one in (best, *asked)}
    changes = {id(one): sensitivity(steps[id(best)], steps[id(one)]) for one in asked}
    names = {id(one): name for name, one in shown.items()}
    drawn = [one for one in order if one in found.ranked[:2] or one is found.baseline]
    return {
        "model": _model(best),
        "cluster": {
            "name": topology.name,
            "source": topology.source,
            "device": device.name,
            "devices": topology.devices,
            "nodes": topology.nodes,
            "memory_bytes": device.memory_bytes,
            "links": [tier.name for tier in topology.tiers],
        },
        "routing": {"name": routing.name, "skew": routing.skew},
        "search": {
            name: getattr(found, name) for name in ("meshes", "traced", "too_large", "seconds")
        },
        "plans": [_plan(one, names[id(one)], topology, changes.get(id(one))) for one in order],
        "timelines": [{"plan": names[id(one)], **_timeline(one)} for one in drawn],
        "traffic": _traffic(best),
        "memory": _memory(best, steps[id(best)]),
    }


def _model(best: PricedPlan) -> dict[str, Any]:
    cfg, train_step = best.cfg, best.traced.train_step
    counts = count(cfg, train_step.parameter_sizes())
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
    one: PricedPlan, name: str, topology: Topology, changes: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """A plan and its prices.

    Args:
      changes: what would have to change for it to win; None where nobody asked.
    """
    return {
        "name": name,
        "mesh": tables.mesh_text(one.cfg),
        "route": tables.exchange_text(one.cfg),
        "route_text": route.explain(one.traced.train_step.spec.route),
        "rest": tables.rest_text(one.cfg),
        "fits": one.peak.bytes <= topology.device.memory_bytes,
        "changes": changes,
        **terms.to_json(one),
    }


def _traffic(one: PricedPlan) -> list[dict[str, Any]]:
    """Bytes and seconds of each class on each link, over layers of every kind."""
    size: dict[tuple[str, str], float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for share, simulated in one.parts:
        for key, (sent, took) in terms.traffic(simulated).items():
            size[key] += share * sent
            seconds[key] += share * took
    return [
        {"link": link, "class": name, "bytes": size[link, name], "seconds": seconds[link, name]}
        for link, name in sorted(size, key=lambda key: -seconds[key])
    ]


def _memory(one: PricedPlan, steps: Steps) -> dict[str, Any]:
    """What is given to the step by kind, and what else lives at its fullest moment by scope."""
    given = one.traced.train_step.argument_bytes()
    given["counters"] = one.steps.arguments - sum(given.values())
    found = {"given": given, "temporary": _fullest(one, steps), "bytes": one.steps.bytes}
    return found | {"evaluation": one.evaluation.bytes}


def _fullest(one: PricedPlan, steps: Steps) -> dict[str, int]:
    """The temporary bytes by scope; what loops over layers leave behind, by what it is for."""
    peaks = [one.traced.peak(_naming_loops(schedule)) for _, schedule, _ in steps.runs]
    fullest = max(peaks, key=lambda found: found.bytes)
    return dict(sorted(fullest.by_scope.items(), key=lambda item: -item[1]))


def _naming_loops(schedule: Schedule) -> Schedule:
    """The schedule with loops that stand in no scope of the program named by what they leave."""
    later = {b for op in schedule.ops if op.backward for b in op.reads}
    ops = []
    for op in schedule.ops:
        if op.body is not None:
            kept = not op.backward and later.intersection(op.writes)
            name = ("kept for backward" if kept else "gradients") if op.scope == REST else op.scope
            op = replace(op, scope=name, body=_naming_loops(op.body))
        ops.append(op)
    return replace(schedule, ops=tuple(ops))


def _timeline(one: PricedPlan) -> dict[str, Any]:
    """The step of most layers: a list of nodes, the whole step first, then turns of loops.

    A task is [lane, name, about, start, seconds, bytes, node of its turn or -1]; lane, name and
    about are places in `words`. Tasks that take no time are left out.
    """
    share, simulated = max(one.parts, key=lambda part: part[0])
    names: dict[str, int] = {}
    nodes: list[dict[str, Any]] = []
    _add_node(simulated, nodes, names, name="the whole step", trip_count=1, unrolled=1)
    return {"share": share, "nodes": nodes, "words": list(names)}


def _add_node(
    simulated: SimulatedStep, nodes: list[dict[str, Any]], names: dict[str, int], **about: Any
) -> int:
    """Adds a timeline and those of the loops in it; returns its place."""
    place = len(nodes)
    nodes.append({})

    def number(word: str) -> int:
        return names.setdefault(word, len(names))

    tasks = []
    line = simulated.timeline
    for lane, order in line.lanes().items():
        for task in order:
            start, end, op = line.start_s[task], line.end_s[task], simulated.ops[task]
            name, inner = line.tasks[task].name, -1
            if task in simulated.inside:
                turn, trip_count = simulated.inside[task]
                name = _loop_name(turn, op)
                inner = _add_node(
                    turn, nodes, names, name=name, trip_count=trip_count, unrolled=op.unrolled
                )
            if end > start:
                labels = (number(lane), number(name), number(_about(op)))
                figures = (_short(x) for x in (start, end - start, simulated.sizes[task]))
                tasks.append([*labels, *figures, inner])
    nodes[place] = {
        **about,
        "seconds": simulated.seconds,
        "computed": sum(simulated.totals.computed.values()),
        "sent": [
            [link, name, _short(seconds), _short(simulated.totals.bytes_sent[link, name])]
            for (link, name), seconds in simulated.totals.sent.items()
        ],
        "tasks": tasks,
    }
    return place


def _loop_name(turn: SimulatedStep, op: Op) -> str:
    """How often a loop turns, and what it does most."""
    computed = turn.totals.computed
    fullest = " and ".join(sorted(computed, key=lambda name: -computed[name])[:2]) or "loop"
    return f"{op.trip_count} x {fullest}{', backward' if op.backward else ''}"


def _about(op: Op) -> str:
    """What an operation is, in a few words."""
    if op.body is not None:
        return "loop"
    one = op.collective
    what = f"{op.kind} {op.dtype}".strip() if one is None else f"{one.kind} of {one.dtype}"
    over = f" over {', '.join(one.axes)}" if one is not None else ""
    return f"{what}{over}{', backward' if op.backward else ''}"


def _short(value: float) -> float:
    """Seven digits: a page holds thousands of them."""
    return float(f"{value:.7g}")
