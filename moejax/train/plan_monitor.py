"""Compares measured steps with the plan's prediction, and finds the rate that is off."""

from collections.abc import Callable

from moejax.plan.cluster.topology import Topology
from moejax.plan.probe.timer import ProgressFn
from moejax.plan.search.file import Plan

WITHIN = (0.8, 1.25)  # accepted range of measured over predicted
WINDOW = 3  # reports in a row outside the range before it measures again


class PlanMonitor:
    """Compares reports with the plan. Reports one mismatch at most."""

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        measure: Callable[[ProgressFn], Topology] | None = None,
    ):
        """Takes the plan and the links that it was made for.

        Args:
          measure: measures the links again; all processes call it at the same step. It stops a run
            for a minute or more. None: steps are only compared.
        """
        self.predicted = float(plan.predicted["seconds"])
        self.terms = plan.predicted["terms"]
        self.topology, self.measure = topology, measure
        self._outside, self._reported = 0, False

    def off(self, seconds_per_step: float) -> bool:
        """Whether steps have been outside the range for `WINDOW` reports."""
        low, high = WITHIN
        ratio = seconds_per_step / self.predicted
        self._outside = 0 if low <= ratio <= high else self._outside + 1
        return self._outside >= WINDOW and not self._reported

    def mismatch(self, seconds_per_step: float, now: Topology | None) -> str:
        """Returns how steps differ from the plan, in a line for the user. Is called once.

        Args:
          now: links and rates as measured now, with which the line names a cause: the rate that
            changed most in the direction of the steps, slower or faster.
        """
        self._reported = True
        ratio = seconds_per_step / self.predicted
        message = f"warning: a step takes {ratio:.2f} x what was predicted"
        largest = max(self.terms, key=lambda term: self.terms[term])
        if now is None:
            return (
                f"{message}; the plan's largest term is {largest}. Another program may have used "
                "the machine, now or while the links were measured. To measure them again and plan "
                f"anew, stop the run and start it with --config.plan.replan=true"
            )

        def explains(row: tuple[str, float, float]) -> float:
            return row[1] / row[2] if ratio > 1 else row[2] / row[1]

        name, before, after = best = max(compare(self.topology, now), key=explains)
        if explains(best) > WITHIN[1]:
            cause = f"{name} is {after:.3g} a second now, the plan has {before:.3g}"
        else:
            cause = (
                f"no link or rate explains it (the nearest, {name}, changed by "
                f"{after / before - 1:+.0%}); the plan's largest term is {largest}; another "
                "program may have used the machine"
            )
        return f"{message}: {cause}"


def compare(before: Topology, after: Topology) -> list[tuple[str, float, float]]:
    """Returns (name, old rate, new rate) of every link and rate that both have."""
    rows = []
    for tier, measured in zip(before.tiers, after.tiers, strict=False):
        for kind, link in tier.links.items():
            if tier.size > 1 and kind in measured.links:
                name = f"{kind} over {tier.name}, bytes"
                rows.append((name, link.bytes_per_s, measured.links[kind].bytes_per_s))
    old, new = before.device.products, after.device.products
    for dtype in (name for name in old if name in new):
        rows.append((f"{dtype} products, FLOPs", old[dtype][-1][1], new[dtype][-1][1]))
    copies = before.device.copy_bytes_per_s, after.device.copy_bytes_per_s
    programs = _program_rate(before), _program_rate(after)
    return [*rows, ("copies, bytes", *copies), ("whole programs, FLOPs", *programs)]


def _program_rate(topology: Topology) -> float:
    """Returns the FLOP/s of the largest product, divided by the program overhead."""
    largest = next(iter(topology.device.products.values()))[-1]
    return largest[1] / topology.device.program_overhead
