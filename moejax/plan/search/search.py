"""Finds the plan: estimates every mesh, traces the promising ones, prices what was traced, ranks.

A plan that needs more memory than a device has is never chosen; it is made lighter first (more
recomputed, more micro-batches), which is what a person would do.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from moejax.config.checks.planned import MEMORY, pinned
from moejax.config.fields import get_value
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan, price, trace_config
from moejax.plan.price.routing import ExpertLoad
from moejax.plan.search import space
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.space import Limits

ROOM = 0.95  # of the memory that a program may use: a plan needs no more, the rest is for gaps
ROUGH = 1.3  # of that room: what a estimate must say for a plan not to be traced as it is
FIRST = 4  # meshes that are traced before the best of them is refined
OTHERS = 12  # meshes that are traced with what it then takes
SAME = 0.002  # of a step: less is no difference
# Seconds that a search may take if nobody says, for up to so many devices and for more of them.
SECONDS, MANY_SECONDS, MANY = 10.0, 60.0, 64


@dataclass
class SearchResult:
    """What a search found.

    Attributes:
      ranked: plans that fit, fastest first.
      baseline: the plan of people who do not plan, if it is one at all.
      meshes: how many ways to spread the model obey the rules.
      traced: programs read.
      too_large: traced, and refused for their memory.
      room: bytes of a device that a plan may need.
      seconds: of the search.
    """

    ranked: list[PricedPlan]
    baseline: PricedPlan | None
    meshes: int
    traced: int
    too_large: int
    memory_budget: float
    seconds: float


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """What lives already is not looked through again and again while plans are traced."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class _Search:
    """One search: what has been traced, and how long it may go on."""

    cfg: Config
    topology: Topology
    limits: Limits
    routing: ExpertLoad
    seconds: float
    progress: Callable[[str], None]
    priced: dict[Config, PricedPlan] = field(default_factory=dict)
    too_large: int = 0
    slowest: float = 0.0  # seconds of what took longest to trace and price

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self.ends = self.began + self.seconds

    @property
    def memory_budget(self) -> float:
        """Bytes of a device that a plan may need."""
        return ROOM * self.topology.device.memory_bytes

    @property
    def late(self) -> bool:
        """Whether another plan could be late; whatever it takes, one is found and two compared."""
        enough = len(self.priced) >= 2 and any(self._fits(one) for one in self.priced.values())
        return enough and time.perf_counter() + 2 * self.slowest > self.ends

    def run(self) -> SearchResult:
        """Searches.

        Raises:
          InputError: if no plan obeys the rules, or none fits.
        """
        meshes = list(space.meshes(self.cfg, self.limits))
        estimates = sorted((Estimate(cfg, self.topology) for cfg in meshes), key=Estimate.seconds)
        self.progress(f"{len(estimates):,} meshes estimated")
        with _frozen_garbage():
            baseline = self._choose(estimates)
        ranked = self._ranked()
        if not ranked:
            raise InputError(self._why_none(len(estimates)))
        return SearchResult(
            ranked=ranked,
            baseline=baseline,
            meshes=len(estimates),
            traced=len(self.priced),
            too_large=self.too_large,
            memory_budget=self.memory_budget,
            seconds=time.perf_counter() - self.began,
        )

    def _choose(self, estimates: list[Estimate]) -> PricedPlan | None:
        """Prices plans, likely ones first, until time is up; returns the default's.

        The best of the first meshes is refined. Then others show what they are worth with the
        routes and codecs that it takes, for most of what is right for one is right for all.
        """
        baseline = self._baseline()
        promising = self._promising(estimates)
        self._try_all(islice(promising, FIRST))
        if not self._ranked():
            self._try_all(self._smallest(estimates))
        for start in self._ranked()[:1]:
            self._refine(start)
        self._try_all(self._as_best(cfg) for cfg in islice(promising, OTHERS))
        for start in self._ranked()[:1]:
            self._refine(start)
        return baseline

    def _try_all(self, configs: Iterable[Config]) -> None:
        for cfg in configs:
            self._try(cfg)
            if self.late:
                return

    def _ranked(self) -> list[PricedPlan]:
        fitting = [one for one in self.priced.values() if self._fits(one)]
        ranked = sorted(fitting, key=lambda one: one.seconds)
        # Of plans that cost the same, the one that changes least.
        same = [one for one in ranked if one.seconds <= (1 + SAME) * ranked[0].seconds]
        plainest = min(same, key=lambda one: len(pinned(one.cfg)), default=None)
        return sorted(ranked, key=lambda one: one is not plainest)

    def _promising(self, estimates: list[Estimate]) -> Iterator[Config]:
        """Meshes that seem to fit, as they are or made lighter, fastest first; a few of each."""
        seen: Counter[tuple[int, int]] = Counter()
        fitting = [one for one in map(self._estimate_that_fits, estimates) if one is not None]
        for estimate in sorted(fitting, key=Estimate.seconds):
            alike = (estimate.cfg.mesh.expert, estimate.cfg.mesh.tensor)
            seen[alike] += 1
            if seen[alike] <= 2:
                yield estimate.cfg

    def _estimate_that_fits(self, estimate: Estimate) -> Estimate | None:
        if estimate.bytes() <= ROUGH * self.memory_budget:
            return estimate
        lighter = self._lighter(estimate.cfg)
        return Estimate(lighter, self.topology) if lighter is not None else None

    def _smallest(self, estimates: list[Estimate]) -> Iterator[Config]:
        """The meshes that hold least, as light as estimated to fit; then as light as can be.

        For where no likely plan fits: what a estimate counts is rough, so it refuses nothing.
        """
        least = sorted(estimates, key=lambda one: one.own)[:FIRST]
        for estimate in least:
            fits = estimate.bytes() <= self.memory_budget
            yield estimate.cfg if fits else self._lighter(estimate.cfg) or estimate.cfg
        for estimate in least if not self._ranked() else ():
            every = [
                Estimate(cfg, self.topology) for cfg in space.lighter(estimate.cfg, self.limits)
            ]
            lightest = min((estimate, *every), key=Estimate.bytes).cfg
            yield space.resolve(lightest, self.limits) or estimate.cfg

    def _fits(self, one: PricedPlan) -> bool:
        return one.peak.bytes <= self.memory_budget

    def _lighter(self, cfg: Config, found: PricedPlan | None = None) -> Config | None:
        """The least change that a estimate says fits.

        Args:
          found: the plan as it was traced: how much more than estimated is alive during the step.
        """
        held, factor = 0.0, 1.0
        if found is not None:
            held = found.peak.arguments
            estimated = max(1.0, Estimate(cfg, self.topology).bytes() - held)
            factor = max(1.0, found.peak.temporary / estimated)
        for other in space.lighter(cfg, self.limits):
            alive = max(0.0, Estimate(other, self.topology).bytes() - held)
            if held + factor * alive <= self.memory_budget:
                resolved = space.resolve(other, self.limits)
                if resolved is not None:
                    return resolved
        return None

    def _try(self, cfg: Config) -> PricedPlan | None:
        """Traces and prices a plan; if it does not fit, a lighter one of the same mesh."""
        found = self._price(cfg)
        for _ in range(3):
            if found is None or self._fits(found):
                return found
            self.too_large += 1
            other = self._lighter(found.cfg, found)
            if other is None or self.late:
                return None
            found = self._price(other)
        return None

    def _price(self, cfg: Config) -> PricedPlan | None:
        if cfg in self.priced:
            return None
        began = time.perf_counter()
        found = price(trace_config(cfg, self.limits.platform), self.topology, self.routing)
        self.slowest = max(self.slowest, time.perf_counter() - began)
        self.priced[cfg] = found
        self.progress(f"{len(self.priced)} plans traced, best so far {self._best()}")
        return found

    def _best(self) -> str:
        ranked = self._ranked()
        return f"{ranked[0].seconds:.4g} s a step" if ranked else "none fits"

    def _refine(self, start: PricedPlan) -> None:
        """Changes one part at a time and keeps what is faster."""
        best = start
        for neighbours in (self._heavier, self._coded, self._routes):
            best = self._best_of(best, neighbours(best.cfg))
        while (found := self._best_of(best, space.more_chunks(best.cfg, self.limits))) is not best:
            best = found
        for neighbours in (self._fewer_codecs, self._pieces):
            best = self._best_of(best, neighbours(best.cfg))

    def _best_of(self, best: PricedPlan, configs: Iterable[Config]) -> PricedPlan:
        """The best plan so far, or one of those if it is faster."""
        for cfg in configs:
            if self.late:
                break
            found = self._price(cfg)
            faster = found is not None and found.seconds < (1 - SAME) * best.seconds
            if found is not None and faster and self._fits(found):
                best = found
        return best

    def _as_best(self, cfg: Config) -> Config:
        """A mesh with routes, codecs and pieces of the best plan, as far as it can take them."""
        ranked = self._ranked()
        parts = (*space.EXCHANGE, *space.REDUCTION, *space.CODECS)
        for left in ((), space.EXCHANGE) if ranked else ():
            names = [name for name in parts if self.limits.free(name) and name not in left]
            values = {name: get_value(ranked[0].cfg, name) for name in names}
            found = space.resolve(space.change(cfg, values), self.limits)
            if found is not None:
                return found
        return cfg

    def _coded(self, cfg: Config) -> Iterable[Config]:
        """All codecs that are allowed, at once."""
        return islice(space.codecs(cfg, self.limits), 1)

    def _fewer_codecs(self, cfg: Config) -> Iterable[Config]:
        plain = space.without_codecs(cfg, self.limits)
        return islice(space.codecs(plain, self.limits), 1, None)

    def _routes(self, cfg: Config) -> Iterable[Config]:
        return space.exchanges(cfg, self.limits)

    def _pieces(self, cfg: Config) -> Iterable[Config]:
        return space.pieces(cfg, self.limits)

    def _heavier(self, cfg: Config) -> Iterable[Config]:
        """Fewer micro-batches, less recomputed: faster, where it fits after all."""
        parts, remat = cfg.train.micro_batches, cfg.model.remat
        less: list[dict[str, Any]] = []
        if parts > self.cfg.train.micro_batches and self.limits.free("train.micro_batches"):
            less = [{"train.micro_batches": space.divisors(parts)[-2]}]
        if remat != self.cfg.model.remat and self.limits.free("model.remat"):
            less += [{"model.remat": one} for one in space.REMATS[: space.REMATS.index(remat)]]
        for values in less:
            other = space.resolve(space.change(cfg, values), self.limits)
            if other is not None:
                yield other

    def _baseline(self) -> PricedPlan | None:
        """What people take who do not plan, made as light as it must be."""
        cfg = space.baseline(self.cfg, self.limits)
        if cfg is None:
            return None
        fits = self._estimate_that_fits(Estimate(cfg, self.topology))
        found = self._try(fits.cfg) if fits is not None else None
        found = found or self._price(cfg) or self.priced[cfg]
        if self.limits.pinned - set(MEMORY):  # it was not asked whether it may change these
            self.priced.clear()  # which holds nothing else: the default is priced first
        return found

    def _why_none(self, meshes: int) -> str:
        devices = f"{self.limits.devices} devices on {self.limits.nodes} nodes"
        if not meshes:
            return (
                f"no plan for {devices}. No mesh obeys all rules with train.batch_sequences = "
                f"{self.cfg.train.batch_sequences} and what is pinned "
                f"({', '.join(sorted(self.limits.pinned)) or 'nothing'}). Change the batch, or "
                "leave settings at their defaults."
            )
        least = min(one.peak.bytes for one in self.priced.values())
        return (
            f"no plan fits {devices}. The least that one needs is {least / 2**30:.1f} GiB a device "
            f"of {self.memory_budget / 2**30:.1f} GiB that may be used. Offer more devices, or "
            f"unpin {', '.join(sorted(self.limits.pinned)) or 'nothing'}."
        )


def search(
    cfg: Config,
    topology: Topology,
    limits: Limits,
    routing: ExpertLoad,
    *,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Returns the plans of a model on a cluster, fastest first.

    Args:
      cfg: the model; what is pinned keeps its settings.
      seconds: that the search may take; None: as many devices need.
      say: is told how far it is.

    Raises:
      InputError: if no plan obeys the rules, or none fits.
    """
    if cfg.compression.preset != "none" or limits.nodes == 1:
        limits = replace(limits, codecs="none")
    if seconds is None:
        seconds = SECONDS if limits.devices <= MANY else MANY_SECONDS
    return _Search(cfg, topology, limits, routing, seconds, progress).run()
