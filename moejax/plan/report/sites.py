"""Sentences about sites: which plan is better and why, and what another order could give."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from moejax.plan.cluster.pairs import chain
from moejax.plan.cluster.topology import Topology, names_of
from moejax.plan.price.candidate import PricedPlan, price
from moejax.plan.price.routing import ExpertLoad
from moejax.plan.search.search import SAME, FoundSites, SearchResult, Sites
from moejax.plan.search.sites import PERIODS, waited

ORDERED = 0.95  # of the chosen plan's time: another order of nodes that takes less is told
GAIN = 1.3  # times as fast: an outer loop that could give so much is told


def sites_texts(found: FoundSites, topology: Topology, without: str) -> Iterator[str]:
    """Yields lines about the sites: which plan is better, why this period, what else was priced.

    Args:
      without: the best plan without an outer loop, in words.
    """
    if found.best is None:
        yield "no outer loop: no nodes form sites of one size."
    else:
        yield _comparison(found.best, found.without, topology, without)
        yield _period(found.best)
        yield _others(found.best, found.others)
        if found.best.order is not None:
            order = names_of(found.best.order, topology)
            yield f"these sites need nodes numbered {order}: start the processes in this order."
    yield from (f"{note}." for note in found.notes)


def _comparison(best: Sites, other: PricedPlan | None, topology: Topology, without: str) -> str:
    outer, seconds, size = best.plan.cfg.outer, best.plan.seconds, len(best.groups[0])
    how = "by layers" if outer.order == "layers" else "all at once"
    names = " | ".join(names_of(group, topology) for group in best.groups)
    sites = (
        f"{len(best.groups)} sites of {size} node{'s' * (size > 1)} ({names}), H = {outer.every}, "
        f"codec {outer.codec}, {how}"
    )
    if other is None:
        return f"{sites}: {seconds * 1e3:,.2f} ms a step."
    named = f"the best plan without an outer loop ({without})"
    if seconds < (1 - SAME) * other.seconds:
        return f"{sites}: {other.seconds / seconds:.2f} x as fast as {named}."
    return f"no outer loop: {sites} take {seconds / other.seconds:.2f} x as long as {named}."


def _period(best: Sites) -> str:
    waits = waited(best.plan) / best.plan.seconds
    if best.plan.cfg.outer.order == "all":
        return f"a step waits {waits:.0%} of its time, the mean over a period, for other sites."
    if not best.hidden:
        return f"no period hides what sites send: {waits:.0%} of the step waits for it."
    return (
        f"H = {best.plan.cfg.outer.every} is the shortest period of {PERIODS[0]} to {PERIODS[-1]} "
        f"that hides what sites send; {waits:.0%} of the step waits. The price knows no loss: "
        "compare a run with one without an outer loop."
    )


def _others(best: Sites, others: tuple[Sites, ...]) -> str:
    seconds = best.plan.seconds
    rows = [("all at once after H steps", best.at_once.seconds)]
    rows += [(f"{len(one.groups)} sites", one.plan.seconds) for one in others]
    return (
        f"beside it: {', '.join(f'{name} {time / seconds:.2f} x as long' for name, time in rows)}."
    )


def order_text(result: SearchResult, topology: Topology, load: ExpertLoad) -> str | None:
    """Returns a line if stages, or the chosen plan, are faster with nodes in another order."""
    order = chain(range(topology.nodes), topology.pairs)
    if len(topology.tiers) != 2 or order == tuple(range(topology.nodes)):
        return None
    best, moved = result.ranked[0], topology.reordered(order)
    staged = [plan for plan in result.ranked if plan.cfg.mesh.stage > 1]
    fastest = min(
        (price(plan.traced, moved, load) for plan in (best, *staged[:1])), key=attrgetter("seconds")
    )
    if best.cfg.outer.every is not None or fastest.seconds > ORDERED * best.seconds:
        return None
    what = "it" if fastest.cfg == best.cfg else f"a plan with {fastest.cfg.mesh.stage} stages"
    return (
        f"with nodes numbered {names_of(order, topology)}, along fast links, {what} would take "
        f"{fastest.seconds / best.seconds:.2f} x this plan's time: start the processes in this "
        "order and plan again."
    )


def advice_text(result: SearchResult, topology: Topology, load: ExpertLoad) -> str | None:
    """Returns a line if sites could gain much: at most what links between nodes cost the plan."""
    best, fast = result.ranked[0], topology.tiers[0]
    apart = any(len(groups) > 1 for groups in topology.groupings())
    if not apart or best.cfg.outer.every is not None or result.sites is not None:
        return None
    slow = (replace(tier, links=fast.links, sync_delay_s=0.0) for tier in topology.tiers[1:])
    ideal = replace(topology, tiers=(fast, *slow), pairs=(), pair_startup_s=())
    gain = best.seconds / price(best.traced, ideal, load).seconds
    if gain < GAIN:
        return None
    return (
        f"links between nodes make this plan {gain:.1f} x as long as links inside a node would. An "
        "outer loop across sites can hide much of that, and changes what is trained: "
        "`plan.sites=true` (--sites) plans for it."
    )
