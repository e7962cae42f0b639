"""Finds the plan: estimates every mesh, traces and prices the promising ones, ranks them.

A plan that needs more memory than a device has is never chosen. It is first made lighter with more
recomputation and more micro-batches. The search ends after a number of traces, so that the same
question gets the same answer however fast the machine is; only the time cap depends on it.

Meshes with pipeline stages are searched apart, with half as many traces, and only if the best of
them is estimated to be clearly faster than the best without: their estimates and those of the
others are wrong in different ways, so in one list one kind would hide the other.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from moejax.config.checks.planned import MEMORY, pinned
from moejax.config.compression import NO_COMPRESSION, build_compression
from moejax.config.fields import change, get_value
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.plan.cluster.pairs import Groups
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import (
    PricedPlan,
    frozen_garbage,
    may_overflow,
    price,
    trace_config,
)
from moejax.plan.price.routing import ExpertLoad, busiest_device
from moejax.plan.search import space
from moejax.plan.search.budget import Budget, default_budget
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.fitting import Fitting
from moejax.plan.search.space import Limits


@dataclass(frozen=True)
class Sites:
    """A plan with an outer loop.

    Attributes:
      groups: nodes of each site.
      order: all nodes, in the order that the plan is for; None: as they are.
      at_once: the same plan with everything sent after a period, when the step waits.
      hidden: whether the step hides what sites send.
    """

    plan: PricedPlan
    groups: Groups
    order: tuple[int, ...] | None
    at_once: PricedPlan
    hidden: bool


@dataclass(frozen=True)
class FoundSites:
    """The result of `plan.search.sites`.

    Attributes:
      best: None if no nodes form sites.
      without: the best plan without an outer loop; None if none was looked for.
      notes: why some nodes that belong together are no sites.
    """

    best: Sites | None
    others: tuple[Sites, ...]
    without: PricedPlan | None
    notes: tuple[str, ...]


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
      ranked: plans that fit: the chosen one, which is the plainest of the equally fast, then the
        others, fastest first.
      meshes: number of valid meshes.
      too_large: number of traced plans that need too much memory.
      memory_budget: bytes of a device that a plan may use.
      cut: one line about the time cap if it ended the search; None: another search finds the same.
      host_budget: bytes of a node's host that a plan may use.
      rules: plans of `space.RULES`, fastest first, each made lighter until it fits; those that
        cannot fit stand at the end.
      sites: what `plan.sites` asked for; None: nothing.
    """

    ranked: list[PricedPlan]
    meshes: int
    traced: int
    too_large: int
    memory_budget: float
    seconds: float
    cut: str | None = None
    rules: dict[str, PricedPlan] = field(default_factory=dict)
    host_budget: float = math.inf
    sites: FoundSites | None = None

    def fits(self, plan: PricedPlan) -> bool:
        """Returns whether a plan fits devices and hosts."""
        return plan.peak.bytes <= self.memory_budget and plan.node_bytes <= self.host_budget

    @property
    def best_rule(self) -> str | None:
        """Name of the fastest rule of thumb; None if none fits."""
        return next((name for name, plan in self.rules.items() if self.fits(plan)), None)

    @property
    def plain(self) -> PricedPlan | None:
        """The fastest plan without codecs; None if all that fit have some."""
        plans = sorted(self.ranked, key=lambda plan: plan.seconds)
        return next((plan for plan in plans if not has_codecs(plan)), None)


def has_codecs(plan: PricedPlan) -> bool:
    """Returns whether a plan compresses anything."""
    return build_compression(plan.cfg.compression) != NO_COMPRESSION


def why_none(
    cfg: Config,
    limits: Limits,
    peaks: Sequence[int],
    memory_budget: float,
    meshes: int = 0,
    traces: int | None = None,
) -> str:
    """Returns why there is no plan, and what to change.

    Args:
      peaks: bytes of a device that each traced plan needs; none: no mesh obeys the rules.
      memory_budget: bytes of a device that a plan may use.
      meshes: number of meshes that obey the rules.
      traces: number of traces of the search, if they were spent; else None.
    """
    where = f"{limits.devices} devices on {nodes_text(limits.nodes)}"
    names = ", ".join(sorted(limits.pinned))
    free = f", or leave {names} to the planner" if names else ""
    if not peaks:
        return (
            f"no plan for {where}. No mesh obeys all rules with train.batch_sequences = "
            f"{cfg.train.batch_sequences} and what is pinned ({names or 'nothing'}). Change the "
            f"batch{free}."
        )
    untried = traces is not None and meshes > len(peaks)
    more = f", or look at more plans: --traces {2 * (traces or 0)}" if untried else ""
    of = "1 mesh" if meshes == 1 else f"{meshes:,} meshes"
    return (
        f"no plan fits {where}. The smallest of {len(peaks)} traced plans, of {of}, "
        f"needs {min(peaks) / 2**30:.1f} GiB of a device; {memory_budget / 2**30:.1f} GiB may be "
        f"used. Offer more devices, a smaller train.batch_sequences or shorter sequences"
        f"{free}{more}."
    )


def why_not_on_hosts(needed: int, budget: float, cfg: Config) -> str:
    """Returns why plans that fit their devices do not fit the hosts, and what to change."""
    copies = ", set checkpoint.memory_every=none" * (cfg.checkpoint.memory_every is not None)
    return (
        f"no plan fits the memory of hosts. The smallest that fits its devices takes "
        f"{needed / 2**30:.1f} GiB of a node's; {budget / 2**30:.1f} GiB may be used. Offer more "
        f"nodes{copies}, or keep less there (memory.optimizer, memory.experts, memory.residuals)."
    )


def nodes_text(nodes: int) -> str:
    """Returns a number of nodes as text."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"


ROUGH = 1.3  # times that budget: a plan estimated above it is made lighter before it is traced
FIRST = 4  # meshes traced before the best of them is refined
OTHERS = 6  # meshes then traced with the best plan's settings, before chunks and again after
CLEARLY = 0.85  # of the best estimate without pipeline stages: meshes with them below it are traced
# Copies of experts are tried if they take this part of the mean off the busiest device.
LESS_BUSY = 0.1
SAME = 0.002  # relative difference below which two steps count as equal


@dataclass
class _Search:
    """One search: the plans traced so far, and the budget for more."""

    cfg: Config
    topology: Topology
    limits: Limits
    load: ExpertLoad
    budget: Budget
    progress: Callable[[str], None]
    priced: dict[Config, PricedPlan] = field(default_factory=dict)
    too_large: int = 0
    staged: bool = False  # whether the meshes that are searched now have pipeline stages

    def __post_init__(self) -> None:
        self.fitting = Fitting(self.cfg, self.topology, self.limits)

    @property
    def spent(self) -> bool:
        """True if nothing more may be traced. Two plans are always priced."""
        enough = len(self.priced) >= 2 and any(
            self.fitting.fits(plan) for plan in self.priced.values()
        )
        return enough and self.budget.spent

    def run(self) -> SearchResult:
        """Runs the search; see `search`."""
        began = time.perf_counter()
        meshes = list(space.meshes(self.cfg, self.limits))
        estimates = sorted((Estimate(cfg, self.topology) for cfg in meshes), key=Estimate.seconds)
        self.progress(f"{len(meshes):,} meshes estimated")
        with frozen_garbage():
            cut = self._choose_both(estimates)
            if not self._ranked():
                raise InputError(self._why_none(len(meshes)))
            traced = len(self.priced)
            ranked, rules = self._ranked_beside_rules()
        seconds = time.perf_counter() - began
        return SearchResult(
            ranked,
            len(meshes),
            traced,
            self.too_large,
            self.fitting.memory_budget,
            seconds,
            cut,
            rules,
            self.fitting.host_budget,
        )

    def _why_none(self, meshes: int) -> str:
        plans = self.priced.values()
        on_hosts = [
            plan.node_bytes for plan in plans if plan.peak.bytes <= self.fitting.memory_budget
        ]
        if on_hosts:
            return why_not_on_hosts(min(on_hosts), self.fitting.host_budget, self.cfg)
        peaks = [plan.peak.bytes for plan in plans]
        first = self.budget.before or self.budget
        traces = first.traces if first.traced >= first.traces else None
        return why_none(self.cfg, self.limits, peaks, self.fitting.memory_budget, meshes, traces)

    def _choose_both(self, estimates: list[Estimate]) -> str | None:
        """Searches meshes without stages, then meshes with stages. Returns why it was cut short."""
        alone = [one for one in estimates if one.stages == 1]
        cut, fastest = None, math.inf
        if alone:
            self._choose(alone)
            cut = self.budget.cut_text()
            fastest = min(map(Estimate.seconds, self._fitting(alone)), default=math.inf)
        limit = CLEARLY * fastest
        staged = [one for one in estimates if one.stages > 1 and one.seconds() < limit]
        likely = any(one.seconds() < limit for one in self._fitting(staged))
        if likely or not self._ranked():
            self.staged = True
            self.budget = self.budget.another()
            self._choose(staged)
            cut = cut or self.budget.cut_text()
        return cut

    def _choose(self, estimates: list[Estimate]) -> None:
        """Prices plans, likely ones first, until the budget is spent.

        Refines the best of the first meshes, then tries other meshes with its routes and codecs,
        because most of the best choices for one mesh suit others. Chunks come after the first
        of these, because programs with chunks take several times as long to trace.
        """
        promising = self._promising(estimates)
        self._try_all(islice(promising, FIRST))
        if not self._alike():
            self._try_all(self._smallest(estimates))
        for parts in ("exchange", "all", "all"):
            for start in self._alike()[:1]:
                self._refine(start, chunks=parts == "all")
            self._try_all(self._as_best(cfg) for cfg in islice(promising, OTHERS))

    def _try_all(self, configs: Iterable[Config]) -> None:
        for cfg in configs:
            if self.spent:
                return
            self._try(cfg)

    def _ranked(self) -> list[PricedPlan]:
        fitting = [plan for plan in self.priced.values() if self.fitting.fits(plan)]
        ranked = sorted(fitting, key=lambda plan: plan.seconds)
        # Among equally fast plans, the one with the fewest changes.
        same = [plan for plan in ranked if plan.seconds <= (1 + SAME) * ranked[0].seconds]
        plainest = min(same, key=lambda plan: len(pinned(plan.cfg)), default=None)
        return sorted(ranked, key=lambda plan: plan is not plainest)

    def _alike(self) -> list[PricedPlan]:
        """Returns the ranked plans of the kind that is searched now."""
        return [plan for plan in self._ranked() if (plan.cfg.mesh.stage > 1) == self.staged]

    def _promising(self, estimates: list[Estimate]) -> Iterator[Config]:
        """Yields meshes that fit by estimate, as they are or made lighter, fastest first."""
        seen: Counter[tuple[int, int, int]] = Counter()
        for estimate in sorted(self._fitting(estimates), key=Estimate.seconds):
            mesh = estimate.cfg.mesh
            alike = (mesh.stage, mesh.expert, mesh.tensor)
            seen[alike] += 1
            if seen[alike] <= 2:
                yield estimate.cfg

    def _fitting(self, estimates: Iterable[Estimate]) -> list[Estimate]:
        return [fit for fit in map(self._estimate_that_fits, estimates) if fit is not None]

    def _estimate_that_fits(self, estimate: Estimate) -> Estimate | None:
        if estimate.bytes() <= ROUGH * self.fitting.memory_budget:
            return estimate
        lighter = self.fitting.lighter(estimate.cfg)
        return Estimate(lighter, self.topology) if lighter is not None else None

    def _smallest(self, estimates: list[Estimate]) -> Iterator[Config]:
        """Yields the meshes that need the least memory, made lighter until they fit.

        Used if no promising plan fits, because estimates are too rough to refuse anything. Goes on
        until one fits or the budget is spent.
        """
        least = sorted(estimates, key=lambda e: e.own)[:FIRST]
        for estimate in least:
            fits = estimate.bytes() <= self.fitting.memory_budget
            yield estimate.cfg if fits else self.fitting.lighter(estimate.cfg) or estimate.cfg
        for number, estimate in enumerate(sorted(estimates, key=lambda e: e.own)):
            if self._alike() or (number >= FIRST and self.budget.spent):
                return
            configs = space.lighter(estimate.cfg, self.limits)
            every = [estimate, *(Estimate(cfg, self.topology) for cfg in configs)]
            lightest = min(every, key=Estimate.bytes).cfg
            yield space.resolve(lightest, self.limits) or estimate.cfg

    def _try(self, cfg: Config) -> None:
        """Traces and prices a plan; if it does not fit, lighter plans of the same mesh."""
        plan = self._price(cfg)
        for _ in range(3):
            if plan is None or self.fitting.fits(plan):
                return
            lighter = self.fitting.lighter(plan.cfg, plan)
            if lighter is None or self.spent:
                return
            plan = self._price(lighter)

    def _price(self, cfg: Config) -> PricedPlan | None:
        if cfg in self.priced:
            return None
        began = time.perf_counter()
        documents = self.limits.documents
        traced = trace_config(cfg, self.limits.platform, self.load, documents=documents)
        plan = price(traced, self.topology, self.load)
        self.budget.count(time.perf_counter() - began)
        self.priced[cfg] = plan
        self.too_large += not self.fitting.fits(plan)
        ranked = self._ranked()
        best = f"{ranked[0].seconds:.4g} s a step" if ranked else "none fits"
        self.progress(f"{len(self.priced)} plans traced, best so far {best}")
        return plan

    def _refine(self, start: PricedPlan, *, chunks: bool) -> None:
        """Changes one part at a time and keeps faster plans.

        Args:
          chunks: whether to try chunks, fewer codecs and pieces too.
        """
        best = start
        gathers, routes = (
            partial(part, limits=self.limits) for part in (space.gathers, space.exchanges)
        )
        keys = partial(space.key_exchanges, limits=self.limits)
        first = (
            self.fitting.heavier,
            self._offloaded,
            self._schedules,
            self._coded,
            gathers,
            keys,
            routes,
            self._headrooms,
            self._slots,
        )
        for neighbours in first:
            best = self._best_of(best, neighbours(best.cfg))
        if not chunks:
            return
        while (better := self._best_of(best, space.more_chunks(best.cfg, self.limits))) is not best:
            best = better
        for neighbours in (self._fewer_codecs, partial(space.pieces, limits=self.limits)):
            best = self._best_of(best, neighbours(best.cfg))

    def _best_of(self, best: PricedPlan, configs: Iterable[Config]) -> PricedPlan:
        for cfg in configs:
            if self.spent:
                break
            plan = self._price(cfg)
            faster = plan is not None and plan.seconds < (1 - SAME) * best.seconds
            if plan is not None and faster and self.fitting.fits(plan):
                best = plan
        return best

    def _as_best(self, cfg: Config) -> Config:
        """Returns a mesh with the best plan's routes, codecs and reductions, where valid."""
        ranked = self._alike()
        parts = (*space.EXCHANGE, *space.REDUCTION, *space.CODECS)
        fewer = ((), space.EXCHANGE, (*space.EXCHANGE, *space.REDUCTION))
        for left in fewer if ranked else ():
            names = [name for name in parts if self.limits.free(name) and name not in left]
            values = {name: get_value(ranked[0].cfg, name) for name in names}
            resolved = space.resolve(change(cfg, values), self.limits)
            if resolved is not None:
                return resolved
        return cfg

    def _coded(self, cfg: Config) -> Iterable[Config]:
        """Returns the plan with all allowed codecs at once."""
        return islice(space.codecs(cfg, self.limits), 1)

    def _fewer_codecs(self, cfg: Config) -> Iterable[Config]:
        plain = space.without_codecs(cfg, self.limits)
        return islice(space.codecs(plain, self.limits), 1, None)

    def _headrooms(self, cfg: Config) -> Iterable[Config]:
        overflows = may_overflow(cfg, self.limits.platform, self.load)
        return space.headrooms(cfg, self.limits) if overflows else ()

    def _slots(self, cfg: Config) -> Iterable[Config]:
        """Returns plans with copies of experts that make the busiest device less busy."""
        busiest = busiest_device(self.load, cfg)
        found = space.slots(cfg, self.limits)
        return (c for c in found if busiest_device(self.load, c) < busiest - LESS_BUSY)

    def _offloaded(self, cfg: Config) -> Iterable[Config]:
        return self.fitting.offloaded(cfg, self.priced.get(cfg))

    def _schedules(self, cfg: Config) -> Iterable[Config]:
        yield from space.schedules(cfg, self.limits)
        now, others = Estimate(cfg, self.topology), space.shorter_tasks(cfg, self.limits)
        yield from (c for c in others if Estimate(c, self.topology).seconds() < now.seconds())

    def _ranked_beside_rules(self) -> tuple[list[PricedPlan], dict[str, PricedPlan]]:
        """Returns the ranked plans, and the plans of `space.rules`, fastest first.

        Rules are candidates like others, unless they break the pins. They are traced whatever the
        number of traces, but not after the time cap.
        """
        ranked = self._ranked()
        configs = space.rules(self.cfg, self.limits).items()
        found = {name: plan for name, cfg in configs if (plan := self._fitted(cfg)) is not None}
        if not self.limits.pinned - set(MEMORY):
            ranked = self._ranked()

        def order(name: str) -> tuple[bool, float]:
            return not self.fitting.fits(found[name]), found[name].seconds

        return ranked, {name: found[name] for name in sorted(found, key=order)}

    def _fitted(self, cfg: Config) -> PricedPlan | None:
        """Prices a plan, made lighter until it fits, or as light as it gets; None: time is up."""
        fits = self._estimate_that_fits(Estimate(cfg, self.topology))
        lighter, plan = (fits.cfg if fits is not None else cfg), None
        for _ in range(3):
            if lighter is None or (self.budget.cut and lighter not in self.priced):
                break
            plan = self.priced.get(lighter) or self._price(lighter)
            assert plan is not None, "priced twice"
            if self.fitting.fits(plan):
                break
            lighter = self.fitting.lighter(lighter, plan)
        return plan


def search(
    cfg: Config,
    topology: Topology,
    limits: Limits,
    load: ExpertLoad,
    *,
    traces: int | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Returns the plans of a model on a cluster, fastest first.

    Args:
      cfg: the model; pinned settings keep their values.
      traces: number of traces; None: the default for the number of devices.
      seconds: time cap, for machines so slow that the traces are not reached; None: the default.
      progress: called with a text before each plan.

    Raises:
      InputError: if no plan obeys the rules, none fits, or one must use hosts that are not known.
    """
    if any(get_value(cfg, name) == "host" for name in space.HOSTED):
        topology.known_host()
    if cfg.compression.preset != "none" or limits.nodes == 1:
        limits = replace(limits, codecs="none")
    budget = default_budget(limits.devices, limits.platform, traces, seconds)
    return _Search(cfg, topology, limits, load, budget, progress).run()
