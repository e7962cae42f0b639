"""Finds the plan: sketches every mesh, traces the promising ones, prices what was traced, ranks.

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

from moejax.checks.planned import MEMORY, pinned
from moejax.config import Config
from moejax.dims import build_layout
from moejax.errors import InputError
from moejax.fields import get_value
from moejax.plan import space
from moejax.plan.build import build_abstract_mesh
from moejax.plan.memory import Peak, peak
from moejax.plan.price import Costs, Played, play
from moejax.plan.routing import Routing, work_of
from moejax.plan.schedule import Schedule
from moejax.plan.sketch import Sketch
from moejax.plan.space import Limits
from moejax.plan.target import described_cudnn
from moejax.plan.topology import Topology
from moejax.plan.trace import read as read_jaxpr
from moejax.train.step import Trainer, build_trainer

ROOM = 0.95  # of a device's memory that a plan may need: what is left is the runtime's
ROUGH = 1.3  # of that room: what a sketch must say for a plan not to be traced as it is
FIRST = 4  # meshes that are traced before the best of them is refined
OTHERS = 12  # meshes that are traced with what it then takes
SAME = 0.002  # of a step: less is no difference


@dataclass(frozen=True)
class Read:
    """A traced step. Its schedule depends on whether buckets overflow, so it is made on demand."""

    trainer: Trainer
    jaxpr: Any

    @property
    def cfg(self) -> Config:
        """Of the step."""
        return self.trainer.cfg

    def schedule(self, rounds: int = 0) -> Schedule:
        """What a device does; see `plan.trace.read`."""
        return read_jaxpr(self.jaxpr, rounds=rounds)


@dataclass(frozen=True)
class Priced:
    """A plan and what it costs. Seconds are of a step, bytes of one device.

    Attributes:
      read: the traced step.
      parts: (share of the expert layers, the step as it would be if all were so).
      peak: of the device's memory.
    """

    read: Read = field(repr=False)
    parts: tuple[tuple[float, Played], ...] = field(repr=False)
    peak: Peak

    @property
    def cfg(self) -> Config:
        """The config that the plan makes."""
        return self.read.cfg

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(share * played.seconds for share, played in self.parts)

    @property
    def main(self) -> Played:
        """The step of most layers."""
        return max(self.parts, key=lambda part: part[0])[1]


@dataclass
class Found:
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

    ranked: list[Priced]
    baseline: Priced | None
    meshes: int
    traced: int
    too_large: int
    room: float
    seconds: float


def read_step(cfg: Config, platform: str) -> Read:
    """Traces the train step of a resolved config; needs no devices, allocates nothing."""
    trainer = build_trainer(cfg, build_abstract_mesh(build_layout(cfg.mesh)), platform)
    with described_cudnn():
        traced = trainer.step.trace(trainer.abstract, trainer.abstract_batch())
    return Read(trainer, traced.jaxpr)


def price(read: Read, topology: Topology, routing: Routing) -> Priced:
    """Plays a traced step on a cluster, for tokens that fall so."""
    layout, route = read.trainer.layout, read.trainer.program.route
    parts, most = [], None
    for share, work in work_of(routing, read.cfg, layout, route):
        schedule = read.schedule(work.rounds)
        parts.append((share, play(schedule, Costs(topology, layout, work))))
        needed = peak(schedule)
        most = needed if most is None or needed.bytes > most.bytes else most
    assert most is not None
    return Priced(read, tuple(parts), most)


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
    routing: Routing
    seconds: float
    say: Callable[[str], None]
    priced: dict[Config, Priced] = field(default_factory=dict)
    too_large: int = 0
    slowest: float = 0.0  # seconds of what took longest to trace and price

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self.ends = self.began + self.seconds

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may need."""
        return ROOM * self.topology.device.memory_bytes

    @property
    def late(self) -> bool:
        """Whether another plan could be late; two are compared whatever it takes."""
        return len(self.priced) >= 2 and time.perf_counter() + 2 * self.slowest > self.ends

    def run(self) -> Found:
        """Searches.

        Raises:
          InputError: if no plan obeys the rules, or none fits.
        """
        meshes = list(space.meshes(self.cfg, self.limits))
        sketches = sorted((Sketch(cfg, self.topology) for cfg in meshes), key=Sketch.seconds)
        self.say(f"{len(sketches):,} meshes sketched")
        with _frozen_garbage():
            baseline = self._choose(sketches)
        ranked = self._ranked()
        if not ranked:
            raise InputError(self._why_none(len(sketches)))
        return Found(
            ranked=ranked,
            baseline=baseline,
            meshes=len(sketches),
            traced=len(self.priced),
            too_large=self.too_large,
            room=self.room,
            seconds=time.perf_counter() - self.began,
        )

    def _choose(self, sketches: list[Sketch]) -> Priced | None:
        """Prices plans, likely ones first, until time is up; returns the default's.

        The best of the first meshes is refined. Then others show what they are worth with the
        routes and codecs that it takes, for most of what is right for one is right for all.
        """
        baseline = self._baseline()
        promising = self._promising(sketches)
        self._try_all(islice(promising, FIRST))
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

    def _ranked(self) -> list[Priced]:
        fitting = [one for one in self.priced.values() if one.peak.bytes <= self.room]
        ranked = sorted(fitting, key=lambda one: one.seconds)
        # Of plans that cost the same, the one that changes least.
        same = [one for one in ranked if one.seconds <= (1 + SAME) * ranked[0].seconds]
        plainest = min(same, key=lambda one: len(pinned(one.cfg)), default=None)
        return sorted(ranked, key=lambda one: one is not plainest)

    def _promising(self, sketches: list[Sketch]) -> Iterator[Config]:
        """Meshes that seem to fit, fastest first, no more than a few alike; then lighter ones."""
        seen: Counter[tuple[int, int]] = Counter()
        large: list[Sketch] = []
        for sketch in sketches:
            if sketch.bytes() > ROUGH * self.room:
                large.append(sketch)
            elif self._new(sketch.cfg, seen):
                yield sketch.cfg
        for sketch in large:
            other = self._lighter(sketch.cfg)
            if other is not None and self._new(other, seen):
                yield other
        if large and not seen:  # a sketch refuses nothing: what it counts is rough
            lightest = min(large, key=Sketch.bytes)
            every = [Sketch(cfg, self.topology) for cfg in space.lighter(lightest.cfg, self.limits)]
            yield min((lightest, *every), key=Sketch.bytes).cfg

    def _new(self, cfg: Config, seen: Counter) -> bool:
        """Whether fewer than two plans alike were seen; counts this one."""
        alike = (cfg.mesh.expert, cfg.mesh.tensor)
        seen[alike] += 1
        return seen[alike] <= 2

    def _lighter(self, cfg: Config, factor: float = 1.0) -> Config | None:
        """The least change that a sketch says fits.

        Args:
          factor: what the program needs over what the sketch says.
        """
        for other in space.lighter(cfg, self.limits):
            if factor * Sketch(other, self.topology).bytes() <= self.room:
                return other
        return None

    def _try(self, cfg: Config) -> Priced | None:
        """Traces and prices a plan; if it does not fit, a lighter one of the same mesh."""
        found = self._price(cfg)
        for _ in range(3):
            if found is None or found.peak.bytes <= self.room:
                return found
            self.too_large += 1
            factor = found.peak.bytes / Sketch(found.cfg, self.topology).bytes()
            other = self._lighter(found.cfg, max(1.0, factor))
            if other is None or self.late:
                return None
            found = self._price(other)
        return None

    def _price(self, cfg: Config) -> Priced | None:
        if cfg in self.priced:
            return None
        began = time.perf_counter()
        found = price(read_step(cfg, self.limits.platform), self.topology, self.routing)
        self.slowest = max(self.slowest, time.perf_counter() - began)
        self.priced[cfg] = found
        self.say(f"{len(self.priced)} plans traced, best so far {self._best()}")
        return found

    def _best(self) -> str:
        ranked = self._ranked()
        return f"{ranked[0].seconds:.4g} s a step" if ranked else "none fits"

    def _refine(self, start: Priced) -> None:
        """Changes one part at a time and keeps what is faster."""
        best = start
        for neighbours in (self._coded, self._routes):
            best = self._best_of(best, neighbours(best.cfg))
        while (found := self._best_of(best, space.more_chunks(best.cfg, self.limits))) is not best:
            best = found
        for neighbours in (self._fewer_codecs, self._pieces, self._heavier):
            best = self._best_of(best, neighbours(best.cfg))

    def _best_of(self, best: Priced, configs: Iterable[Config]) -> Priced:
        """The best plan so far, or one of those if it is faster."""
        for cfg in configs:
            if self.late:
                break
            found = self._price(cfg)
            fits = found is not None and found.peak.bytes <= self.room
            if found is not None and fits and found.seconds < (1 - SAME) * best.seconds:
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
        """Less recomputed, fewer micro-batches: faster, where it fits after all."""
        if cfg.model.remat != self.cfg.model.remat and self.limits.free("model.remat"):
            for remat in space.REMATS[: space.REMATS.index(cfg.model.remat)]:
                other = space.resolve(space.change(cfg, {"model.remat": remat}), self.limits)
                if other is not None:
                    yield other

    def _baseline(self) -> Priced | None:
        """What people take who do not plan, made as light as it must be."""
        cfg = space.baseline(self.cfg, self.limits)
        if cfg is None:
            return None
        found = self._try(cfg) or self.priced[cfg]
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
            f"of {self.room / 2**30:.1f} GiB that may be used. Offer more devices, or unpin "
            f"{', '.join(sorted(self.limits.pinned)) or 'nothing'}."
        )


def search(
    cfg: Config,
    topology: Topology,
    limits: Limits,
    routing: Routing,
    *,
    seconds: float,
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """Returns the plans of a model on a cluster, fastest first.

    Args:
      cfg: the model; what is pinned keeps its settings.
      seconds: that the search may take.
      say: is told how far it is.

    Raises:
      InputError: if no plan obeys the rules, or none fits.
    """
    if cfg.compression.preset != "none" or limits.nodes == 1:
        limits = replace(limits, codecs="none")
    return _Search(cfg, topology, limits, routing, seconds, say).run()
