"""Breaks a plan's step into terms: seconds by term, and the differences between two plans."""

from collections import defaultdict
from typing import Any

from moejax.plan.price.candidate import PricedPlan

WAITING = "waiting for "


def terms(priced: PricedPlan) -> dict[str, float]:
    """Returns the seconds of a step by term; their sum is the step.

    Terms are compute by scope of the program, and exposed communication by class of traffic.
    """
    total: dict[str, float] = defaultdict(float)
    for share, simulated in priced.parts:
        for name, seconds in simulated.totals.computed.items():
            total[name] += share * seconds
        for name, seconds in simulated.totals.exposed.items():
            total[WAITING + name] += share * seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def why(
    winner: PricedPlan, loser: PricedPlan, max_terms: int = 4
) -> list[tuple[str, float, float]]:
    """Returns (term, seconds in the winner, in the loser), the largest differences first."""
    first, second = terms(winner), terms(loser)
    names = {*first, *second}
    rows = [(name, first.get(name, 0.0), second.get(name, 0.0)) for name in names]
    return sorted(rows, key=lambda row: -abs(row[2] - row[1]))[:max_terms]


def tokens_per_second(priced: PricedPlan) -> float:
    """Predicted tokens a second of all devices together."""
    train = priced.cfg.train
    return train.batch_sequences * priced.cfg.data.sequence_length / priced.seconds


def to_json(priced: PricedPlan) -> dict[str, Any]:
    """Returns a plan's prices as JSON values."""
    return {
        "seconds": priced.seconds,
        "terms": terms(priced),
        "memory_bytes": priced.peak.bytes,
        "host_bytes": priced.host_bytes,
        "tokens_per_second": tokens_per_second(priced),
    }
