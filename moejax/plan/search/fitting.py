"""Finds plans that fit the memory of devices and hosts: lighter ones, and then heavier ones.

Lighter plans compute more again or have more micro-batches; arrays go to the host where that is
not enough. Then those are tried that compute less again because arrays lie on the host.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from moejax.config.fields import change, get_value
from moejax.config.schema import Config
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.search import space
from moejax.plan.search.estimate import Estimate
from moejax.plan.search.space import Limits

MEMORY_SHARE = 0.95  # share of a device's memory that a plan may use; the rest is for fragmentation
HOST_SHARE = 0.9  # the same of a host's; the rest is for the system, the program and its data
LIKELY = 3  # plans with more on the host that are traced at a time


@dataclass(frozen=True)
class Fitting:
    """The room of a cluster, and the changes that a search makes to fit it.

    Attributes:
      cfg: the config that the search began with.
    """

    cfg: Config
    topology: Topology
    limits: Limits

    @property
    def memory_budget(self) -> float:
        """Bytes of a device that a plan may use."""
        return MEMORY_SHARE * self.topology.device.memory_bytes

    @property
    def host_budget(self) -> float:
        """Bytes of a node's host that a plan may use; a cluster may not tell."""
        host = self.topology.host
        return math.inf if host is None else HOST_SHARE * host.memory_bytes

    def fits(self, plan: PricedPlan) -> bool:
        """Returns whether a traced plan fits."""
        return plan.peak.bytes <= self.memory_budget and plan.node_bytes <= self.host_budget

    def lighter(self, cfg: Config, plan: PricedPlan | None = None) -> Config | None:
        """Returns the smallest change that fits by estimate, which a traced `plan` corrects.

        Arrays go to the host only where nothing else fits.
        """
        fits = partial(self._would_fit, cfg=cfg, plan=plan)
        lighter = list(space.lighter(cfg, self.limits))
        for candidate in lighter:
            if fits(candidate) and (found := space.resolve(candidate, self.limits)) is not None:
                return found
        fewest = [c for c in lighter if c.train.micro_batches == cfg.train.micro_batches]
        for hosted in self._hosted(cfg, space.HOSTED[:2]):
            on_host = {name: get_value(hosted, name) for name in space.HOSTED}
            lightest = (hosted, *(change(c, on_host) for c in (*fewest[-1:], *lighter[-1:])))
            for candidate in (hosted, *lighter) if any(map(fits, lightest)) else ():
                candidate = change(candidate, on_host)
                if fits(candidate) and (found := space.resolve(candidate, self.limits)) is not None:
                    return found
        return None

    def _would_fit(self, other: Config, cfg: Config, plan: PricedPlan | None) -> bool:
        """Returns whether a change of a config fits by estimate, which a traced `plan` corrects."""
        before, after = Estimate(cfg, self.topology), Estimate(other, self.topology)
        held, factor = 0.0, 1.0
        if plan is not None:
            held = plan.peak.arguments
            factor = max(1.0, plan.peak.temporary / max(1.0, before.bytes() - held))
            held -= min(held, after.host_state() - before.host_state())
        alive = max(0.0, after.bytes() - held)
        on_host = after.host_bytes() * self.topology.tiers[0].size
        return held + factor * alive <= self.memory_budget and on_host <= self.host_budget

    def _hosted(self, cfg: Config, names: Iterable[str] = space.HOSTED) -> Iterable[Config]:
        """Returns plans with more on the host, of a cluster whose hosts are known."""
        return () if self.topology.host is None else space.hosted(cfg, self.limits, names)

    def offloaded(self, cfg: Config, plan: PricedPlan | None) -> Iterable[Config]:
        """Returns plans that do less work because more lies on the host; the likeliest alone."""
        now, fits = Estimate(cfg, self.topology), partial(self._would_fit, cfg=cfg)
        found = [
            estimate
            for heavier in space.heavier(cfg, self.cfg, self.limits)
            for hosted in self._hosted(heavier)
            if (estimate := Estimate(hosted, self.topology)).seconds() < now.seconds()
            and fits(hosted, plan=plan)
        ]
        likely = sorted(found, key=Estimate.seconds)[:LIKELY]
        resolved = (space.resolve(estimate.cfg, self.limits) for estimate in likely)
        return filter(None, resolved)

    def heavier(self, cfg: Config) -> Iterable[Config]:
        """Returns plans that hold more on the device, which may fit after all."""
        parts, remat = cfg.train.micro_batches, cfg.model.remat
        less: list[dict[str, Any]] = []
        if parts > self.cfg.train.micro_batches and self.limits.free("train.micro_batches"):
            less = [{"train.micro_batches": space.divisors(parts)[-2]}]
        if remat != self.cfg.model.remat and self.limits.free("model.remat"):
            kinds = space.REMATS[: space.REMATS.index(remat)]
            less += [{"model.remat": kind} for kind in kinds]
        moved = (name for name in space.HOSTED if get_value(cfg, name) == "host")
        less += [{name: "device"} for name in moved if self.limits.free(name)]
        return space.changed(cfg, self.limits, less)
