"""Plans with an outer loop: which nodes form a site, the period, the codec and the order.

An outer loop changes what training learns, so it is looked for only where `plan.sites` asks for it.
A price knows seconds and no loss. So of periods that hide what sites send behind the step the
shortest is chosen, of codecs that hide it within `USUAL` steps the most exact one, and of numbers
of sites that are about as fast the smallest: each is nearer to data parallel training.

Nodes that fast links join are a site (`Topology.groupings`). Devices fill a mesh in the order of
the nodes, so the nodes of a site must follow one another: where they do not, the plan is for
another order, and a line says it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moejax.config.fields import change, fields
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.plan.cluster.pairs import Groups, chain
from moejax.plan.cluster.topology import Topology, names_of
from moejax.plan.price.candidate import PricedPlan, frozen_garbage, price, trace_config
from moejax.plan.price.routing import ExpertLoad
from moejax.plan.search.budget import default_budget
from moejax.plan.search.search import SAME, FoundSites, SearchResult, Sites, search
from moejax.plan.search.space import Limits

# Steps of a period. DiLoCo ends as data parallel training does at 500 (arXiv 2311.08105), and work
# after it trains with tens of steps (arXiv 2501.18512, 2503.09799): decision 0040.
PERIODS = tuple(2**n for n in range(2, 10))
USUAL = 32  # a period up to which a more exact codec is worth more than a shorter period
CODECS = ("none", "int8", "int4+feedback")  # the most exact first
HIDDEN = 0.02  # of a step: so much of it may wait for what sites send, but logged numbers
NEAR = 0.02  # fewer sites are chosen if they are slower by no more
FIXED = {  # of a plan with sites, as `config.checks.mesh.check_outer` has it
    "mesh.stage": 1,
    "memory.optimizer": "device",
    "memory.experts": "device",
}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Question:
    """A model, a cluster, and what may be chosen."""

    cfg: Config
    topology: Topology
    limits: Limits
    load: ExpertLoad
    progress: Progress


def search_all(
    cfg: Config,
    topology: Topology,
    limits: Limits,
    load: ExpertLoad,
    *,
    traces: int | None = None,
    seconds: float | None = None,
    reorder: bool = False,
    progress: Progress = lambda _: None,
) -> SearchResult:
    """Returns what `search` finds, with `plan.sites` beside plans with an outer loop.

    Arguments as of `search`. With `outer.every` set, all plans have an outer loop.

    Args:
      reorder: whether nodes may be numbered anew. A program that runs has its order.
    Raises:
      InputError: as `search`, or if `outer.every` is set and no nodes form sites.
    """
    how: dict[str, Any] = {"traces": traces, "seconds": seconds, "progress": progress}
    if not cfg.plan.sites:
        return search(cfg, topology, limits, load, **how)
    plain = None if cfg.outer.every is not None else search(cfg, topology, limits, load, **how)
    question, notes, found = _Question(cfg, topology, limits, load, progress), [], []
    half = -(-default_budget(limits.devices, limits.platform, traces).traces // 2)
    for groups in topology.groupings():
        order, problem = _order_of(groups, question, reorder=reorder)
        if problem is not None:
            notes.append(problem)
        if order is None:
            continue
        try:
            found.append(_with_sites(groups, order, question, half, seconds))
        except InputError as error:
            notes.append(f"no plan with {len(groups)} sites: {error}")
    if not found:
        return _without_sites(plain, notes)
    best, inside = _nearest(found)
    others = tuple(one for one, _ in found if one is not best)
    ranked = plain.ranked if plain is not None else []
    sites = FoundSites(best, others, ranked[0] if ranked else None, tuple(notes))
    if plain is None:
        ranked = [plan for plan in inside.ranked if plan.cfg != best.plan.cfg]
    if not ranked or best.plan.seconds < (1 - SAME) * ranked[0].seconds:
        return replace(plain or inside, ranked=[best.plan, *ranked], sites=sites)
    later = sorted([best.plan, *ranked[1:]], key=lambda plan: plan.seconds)
    return replace(plain or inside, ranked=[ranked[0], *later], sites=sites)


def _nearest(found: list[tuple[Sites, SearchResult]]) -> tuple[Sites, SearchResult]:
    """Returns the fastest sites, or fewer if they are about as fast."""
    fastest = min(sites.plan.seconds for sites, _ in found)
    near = [pair for pair in found if pair[0].plan.seconds <= (1 + NEAR) * fastest]
    return min(near, key=lambda pair: len(pair[0].groups))


def _without_sites(plain: SearchResult | None, notes: list[str]) -> SearchResult:
    """Returns the search without sites, with the reason for it.

    Raises:
      InputError: if there is no such search.
    """
    if plain is None:
        raise InputError(
            f"no plan with sites. {'. '.join(notes) or 'No nodes form sites of one size'}. "
            "`outer.every` is set, so all plans have an outer loop. Leave it out, or change nodes."
        )
    return replace(plain, sites=FoundSites(None, (), plain.ranked[0], tuple(notes)))


def _order_of(
    groups: Groups, question: _Question, *, reorder: bool
) -> tuple[tuple[int, ...] | None, str | None]:
    """Returns the order of nodes for a grouping; or None, and why it makes no sites if it could."""
    topology, counts = question.topology, sorted({len(group) for group in groups})
    fixed = not question.limits.free("mesh.replica")
    if len(groups) == 1 or (fixed and question.cfg.mesh.replica != len(groups)):
        return None, None
    if len(counts) > 1:
        sizes = " and ".join(map(str, counts))
        return None, (
            f"no sites of {_names(groups, topology)}: they have {sizes} nodes, and a mesh needs "
            "as many in each. Leave nodes out, or add some"
        )
    present = tuple(range(topology.nodes))
    joined = tuple(itertools.chain(*groups))
    if not reorder or len(topology.tiers) > 2:
        if joined == present:
            return present, None
        return None, (
            f"no sites of {_names(groups, topology)}: the nodes of a site must be numbered one "
            f"after the other. Start them in the order {names_of(joined, topology)}"
        )
    return tuple(itertools.chain(*(chain(group, topology.pairs) for group in groups))), None


def _with_sites(
    groups: Groups,
    order: tuple[int, ...],
    question: _Question,
    traces: int,
    seconds: float | None,
) -> tuple[Sites, SearchResult]:
    """Returns the best plan with some sites, and the search inside a site.

    The search has the longest period, so that what it chooses inside a site does not depend on
    what sites send; then come codec, period and order.

    Raises:
      InputError: if no plan fits.
    """
    given, topology = question.cfg.outer, question.topology.reordered(order)
    codec_given = given.codec != fields()["outer.codec"].default
    values = FIXED | {
        "plan.sites": False,
        "mesh.replica": len(groups),
        "outer.every": PERIODS[-1],
        "outer.codec": given.codec if codec_given else CODECS[-1],
        "outer.order": "layers",
    }
    cfg = change(question.cfg, values)
    limits = replace(question.limits, pinned=question.limits.pinned | {*FIXED, "mesh.replica"})
    inside = replace(question, cfg=cfg, topology=topology, limits=limits)
    say = question.progress
    found = search(
        cfg,
        topology,
        limits,
        question.load,
        traces=traces,
        seconds=seconds,
        progress=lambda text: say(f"{len(groups)} sites: {text}"),
    )
    start = found.ranked[0]
    periods = PERIODS if given.every is None else (given.every,)
    codecs = (given.codec,) if codec_given else CODECS
    with frozen_garbage():
        plan, hidden = _shortest(start, inside, found, codecs, periods)
        at_once = _price(plan, inside, {"outer.order": "all"})
    faster = found.fits(at_once) and at_once.seconds < (1 - SAME) * plan.seconds
    if faster or given.order == "all":
        plan, hidden = at_once, False
    moved = None if order == tuple(range(len(order))) else order
    return Sites(plan, groups, moved, at_once, hidden), found


def _shortest(
    start: PricedPlan,
    question: _Question,
    found: SearchResult,
    codecs: tuple[str, ...],
    periods: tuple[int, ...],
) -> tuple[PricedPlan, bool]:
    """Returns the plan with the shortest period that hides what sites send, and whether one does.

    The most exact codec with which a period up to `USUAL` does, else the last one.
    """
    logged = _logged(start)

    def hides(plan: PricedPlan) -> bool:
        return found.fits(plan) and waited(plan) - logged <= HIDDEN * plan.seconds

    def shortest(codec: str, allowed: tuple[int, ...]) -> tuple[PricedPlan, bool]:
        """Halves the range of periods, since longer ones hide what shorter ones do."""
        priced: dict[int, PricedPlan] = {}

        def at(place: int) -> PricedPlan:
            if place not in priced:
                question.progress(f"a period of {allowed[place]} steps, {codec}")
                changes = {"outer.every": allowed[place], "outer.codec": codec}
                priced[place] = _price(start, question, changes)
            return priced[place]

        low, high = 0, len(allowed) - 1
        if not hides(at(high)):
            return at(high), False
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if hides(at(middle)) else (middle + 1, high)
        return at(high), True

    usual = tuple(period for period in periods if period <= USUAL) or periods
    for codec in codecs[:-1]:
        plan, hidden = shortest(codec, usual)
        if hidden:
            return plan, True
    return shortest(codecs[-1], periods)


def _price(start: PricedPlan, question: _Question, changes: dict) -> PricedPlan:
    """Returns a plan with some settings of the outer loop changed."""
    cfg = change(start.cfg, changes)
    if cfg == start.cfg:
        return start
    documents = question.limits.documents
    traced = trace_config(cfg, question.limits.platform, question.load, documents=documents)
    return price(traced, question.topology, question.load)


def waited(plan: PricedPlan) -> float:
    """Returns the seconds of a step in which nothing is computed because of the outer loop."""
    return sum(share * step.totals.exposed.get("outer", 0.0) for share, step in plan.parts)


def _logged(plan: PricedPlan) -> float:
    """Returns the seconds in which sites exchange logged numbers, which no period hides."""
    step = plan.main
    return sum(
        task.seconds
        for op, task in zip(step.ops, step.timeline.tasks, strict=True)
        if op.collective is not None
        and op.collective.traffic == "outer"
        and not op.collective.beside
    )


def _names(groups: Groups, topology: Topology) -> str:
    return " | ".join(names_of(group, topology) for group in groups)
