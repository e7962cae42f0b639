"""What a plan's step is made of: seconds by term, bytes by link, and what differs between two."""

from collections import defaultdict
from typing import Any

from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.cost import SimulatedStep

WAITING = "waiting for "


def terms(priced: PricedPlan) -> dict[str, float]:
    """Seconds of a step by what they go into; their sum is the step.

    What is computed, by scope of the program, and what is waited for while nothing computes, by
    class of traffic.
    """
    total: dict[str, float] = defaultdict(float)
    for share, simulated in priced.parts:
        for name, seconds in simulated.totals.computed.items():
            total[name] += share * seconds
        for name, seconds in simulated.totals.exposed.items():
            total[WAITING + name] += share * seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def why(
    winner: PricedPlan, other: PricedPlan, max_terms: int = 4
) -> list[tuple[str, float, float]]:
    """(term, its seconds in the winner, in the other), the largest differences first."""
    first, second = terms(winner), terms(other)
    names = {*first, *second}
    rows = [(name, first.get(name, 0.0), second.get(name, 0.0)) for name in names]
    return sorted(rows, key=lambda row: -abs(row[2] - row[1]))[:max_terms]


def traffic(simulated: SimulatedStep) -> dict[tuple[str, str], tuple[float, float]]:
    """(link, class) -> (bytes that a device sends, seconds on the link), most bytes first."""
    sent = simulated.totals.bytes_sent
    keys = sorted(sent, key=lambda key: -sent[key])
    return {key: (sent[key], simulated.totals.sent[key]) for key in keys}


def tokens_per_second(priced: PricedPlan) -> float:
    """Over all devices."""
    train = priced.cfg.train
    return train.batch_sequences * priced.cfg.data.sequence_length / priced.seconds


def to_json(priced: PricedPlan) -> dict[str, Any]:
    """A plan's prices as a file holds them."""
    return {
        "seconds": priced.seconds,
        "terms": terms(priced),
        "memory_bytes": priced.peak.bytes,
        "tokens_per_second": tokens_per_second(priced),
    }
