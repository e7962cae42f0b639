"""Finds the factor by which each rate of a cluster must change for another plan to win.

Both steps are simulated again on clusters that differ in one rate. That takes milliseconds,
because nothing is traced again: the program does not depend on rates.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from moejax.plan.cluster.device import Device
from moejax.plan.cluster.topology import Tier, Topology
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.cost import Costs, simulate_step
from moejax.plan.price.routing import ExpertLoad, bucket_fills
from moejax.plan.trace.schedule import COPIES

LOOKED = ((1 / 4, 1 / 16), (4, 16))  # factors that are tried, outwards from 1
# Bisection steps between two factors; leaves an error of about 1 %.
HALVINGS = 7
BANDWIDTHS = {
    "all-to-all bandwidth": ("all_to_all",),
    "bandwidth of other collectives": ("all_gather", "reduce_scatter", "all_reduce"),
}

# factor -> the cluster with one rate multiplied by it
RateChange = Callable[[float], Topology]


class ChangedSteps:
    """A plan's step on a cluster and on changed versions of it.

    Attributes:
      runs: (share of the expert layers, schedule, fill of buckets).
    """

    def __init__(self, priced: PricedPlan, topology: Topology, load: ExpertLoad):
        self.topology, self.layout = topology, priced.traced.train_step.layout
        route, sharing = priced.traced.train_step.spec.route, topology.device.oversubscription
        fills = bucket_fills(load, priced.cfg, self.layout, route, sharing)
        self.runs = [(share, priced.traced.schedule(fill.rounds), fill) for share, fill in fills]
        self.known: dict[tuple[str, float], float] = {}
        self.changes = changes(topology)

    def seconds(self, rate: str, factor: float) -> float:
        """Returns the time of a step if one rate is multiplied by `factor`."""
        if (rate, factor) not in self.known:
            changed = self.changes[rate](factor)
            self.known[rate, factor] = sum(
                share * simulate_step(schedule, Costs(changed, self.layout, fill)).seconds
                for share, schedule, fill in self.runs
            )
        return self.known[rate, factor]


def sensitivity(best: ChangedSteps, other: ChangedSteps) -> list[dict[str, str | float | None]]:
    """Returns for each rate the factor by which it alone must change for `other` to win.

    None: no factor between 1/16 and 16 is enough.
    """

    def needed(rate: str) -> float | None:
        return break_even(
            lambda factor: other.seconds(rate, factor) / best.seconds(rate, factor) - 1
        )

    return [{"rate": rate, "factor": needed(rate)} for rate in best.changes]


def break_even(gap: Callable[[float], float]) -> float | None:
    """The factor nearest to 1 that makes a gap negative; None if none does.

    A gap that closes and opens again between the factors of `LOOKED` is missed.
    """
    if gap(LOOKED[0][-1]) == gap(LOOKED[1][-1]) == gap(1.0):  # the rate does not matter
        return None
    factors = []
    for direction in LOOKED:
        too_little = 1.0
        for factor in direction:
            if gap(factor) < -1e-9:
                factors.append(_close_in(gap, too_little, factor))
                break
            too_little = factor
    return min(factors, key=lambda factor: abs(math.log(factor)), default=None)


def _close_in(gap: Callable[[float], float], too_little: float, enough: float) -> float:
    for _ in range(HALVINGS):
        middle = math.sqrt(too_little * enough)
        if gap(middle) < -1e-9:
            enough = middle
        else:
            too_little = middle
    return enough


def changes(topology: Topology) -> dict[str, RateChange]:
    """Returns the rates of a cluster by name, each with a function that changes it."""
    rates: dict[str, RateChange] = {}
    for index, tier in enumerate(topology.tiers):
        if tier.size > 1:
            for name, kinds in BANDWIDTHS.items():
                rates[f"{tier.name}: {name}"] = _on_tier(topology, index, kinds, "bytes_per_s")
            every = tuple(tier.links)
            rates[f"{tier.name}: start of a call"] = _on_tier(topology, index, every, "startup_s")
    if topology.host is not None:
        rates["copies between host and device"] = partial(_host, topology)
    device = topology.device
    return rates | {
        "matrix products": lambda factor: replace(topology, device=_products(device, factor)),
        "memory bandwidth": lambda factor: replace(topology, device=_memory(device, factor)),
        "start of an operation": lambda factor: replace(topology, device=_starts(device, factor)),
    }


def _on_tier(topology: Topology, index: int, kinds: tuple[str, ...], name: str) -> RateChange:
    def changed(factor: float) -> Topology:
        tier: Tier = topology.tiers[index]
        times = factor if name == "bytes_per_s" else 1 / factor
        links = {
            kind: replace(tier.links[kind], **{name: getattr(tier.links[kind], name) * times})
            for kind in kinds
        }
        tiers = list(topology.tiers)
        tiers[index] = replace(tier, links=tier.links | links)
        return replace(topology, tiers=tuple(tiers))

    return changed


def _host(topology: Topology, factor: float) -> Topology:
    host = topology.known_host()
    rates = {name: getattr(host, name) * factor for name in COPIES}
    return replace(topology, host=replace(host, **rates))


def _products(device: Device, factor: float) -> Device:
    products = {
        dtype: tuple((flops, rate * factor) for flops, rate in curve)
        for dtype, curve in device.products.items()
    }
    return replace(device, products=products)


def _memory(device: Device, factor: float) -> Device:
    copied, gathered = device.copy_bytes_per_s * factor, device.gather_bytes_per_s * factor
    copies = tuple((size, rate * factor) for size, rate in device.copies)
    return replace(device, copy_bytes_per_s=copied, gather_bytes_per_s=gathered, copies=copies)


def _starts(device: Device, factor: float) -> Device:
    return replace(device, startup_s=device.startup_s / factor)
