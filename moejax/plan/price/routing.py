"""How tokens are spread over experts, and how full that makes buckets.

An expert load is the share of assignments that each expert of each layer gets: even, a named skew,
or a record of a run. It decides how many rows the busiest device computes, and whether buckets
overflow, so that a layer needs overflow rounds (`moe.sizes`, `comm.tokens.rounds`).

Legend: N tokens, L layers, E experts.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.layout.layout import Layout
from moejax.layout.route import Route, plain_route
from moejax.moe.dispatch import ROUND_SHARE
from moejax.moe.sizes import Sizes, expert_capacity, usual_sizes
from moejax.plan.price.cost import BucketFill


@dataclass(frozen=True)
class ExpertLoad:
    """Share of assignments by layer and expert.

    Attributes:
      name: the text that was given to `read_expert_load`.
      share_LE: shares of each layer, summing to one. One row may stand for all layers.
    """

    name: str
    share_LE: tuple[tuple[float, ...], ...]

    @property
    def skew(self) -> float:
        """The largest share of an expert over an even share, in the worst layer."""
        return max(max(share_E) * len(share_E) for share_E in self.share_LE)


def read_expert_load(text: str, num_experts: int) -> ExpertLoad:
    """Returns the expert load of a name or a file.

    Args:
      text: `balanced`; `zipf:1.2`, where the n-th most popular expert gets a share in proportion to
        n ** -1.2; or the path of a routing.json that a run has recorded.

    Raises:
      InputError: if it is none of these, or for another number of experts.
    """
    name, _, argument = text.partition(":")
    if name == "balanced" and not argument:
        return ExpertLoad(text, ((1 / num_experts,) * num_experts,))
    if name == "zipf":
        return ExpertLoad(text, (_zipf(text, argument, num_experts),))
    return _recorded(Path(text), num_experts)


def _zipf(text: str, argument: str, num_experts: int) -> tuple[float, ...]:
    try:
        power = float(argument)
    except ValueError:
        power = -1.0
    if not 0 <= power < 100:
        raise InputError(f"routing is {text}. The power must be 0 or more. Choose zipf:0.5.")
    shares = [rank**-power for rank in range(1, num_experts + 1)]
    total = sum(shares)
    # Popular experts are placed evenly apart, so that no device gets all of them.
    step = next(
        s
        for s in range(num_experts * 5 // 8 + 1, 2 * num_experts + 2)
        if math.gcd(s, num_experts) == 1
    )
    placed = [0.0] * num_experts
    for rank, share in enumerate(shares):
        placed[rank * step % num_experts] = share / total
    return tuple(placed)


def _recorded(path: Path, num_experts: int) -> ExpertLoad:
    try:
        data = json.loads(path.read_text())
        counts_LE = [[float(n) for n in layer] for layer in data["load"]]
    # Brackets nested thousands deep end json with RecursionError.
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"routing {path} cannot be read: {type(error).__name__}. It must be balanced, "
            "zipf:POWER, or a routing.json from a run directory. Check the path."
        ) from error
    good = all(
        len(layer) == num_experts and min(layer) >= 0 and 0 < sum(layer) < math.inf
        for layer in counts_LE
    )
    if not counts_LE or not good:
        raise InputError(
            f"routing {path} does not fit. It has layers of "
            f"{sorted({len(layer) for layer in counts_LE})} experts, the model has {num_experts}. "
            "Every layer needs one count for each expert. Record it with this model."
        )
    return ExpertLoad(str(path), tuple(tuple(n / sum(layer) for n in layer) for layer in counts_LE))


def bucket_fills(
    load: ExpertLoad, cfg: Config, layout: Layout, route: Route
) -> list[tuple[float, BucketFill]]:
    """Returns pairs: a share of the expert layers, and how full their buckets are.

    The shares sum to one. Counts of independent draws vary: the fullest of n buckets of mean m
    holds about m + sqrt(2 m ln n).
    """
    tokens = tokens_of(cfg, layout, route)
    sizes = usual_sizes(route, layout, cfg.moe, tokens=tokens)
    counts: dict[BucketFill, int] = {}
    for share_E in load.share_LE:
        fill = _layer(share_E, cfg, layout, route, sizes, tokens)
        counts[fill] = counts.get(fill, 0) + 1
    return [(count / len(load.share_LE), fill) for fill, count in counts.items()]


def tokens_of(cfg: Config, layout: Layout, route: Route) -> int:
    """Returns N: tokens that a device routes at one time."""
    ranks = layout.size(layout.inside.token_axes) * cfg.train.micro_batches
    ranks *= 1 if route.replicated else layout.size(layout.tensor)
    return max(1, cfg.train.batch_sequences * cfg.data.sequence_length // ranks)


def _layer(
    share_E: tuple[float, ...], cfg: Config, layout: Layout, route: Route, sizes: Sizes, tokens: int
) -> BucketFill:
    if not route.exchanges:
        return BucketFill()
    moe = cfg.moe
    rows_E = _rows(share_E, cfg, tokens)
    senders = math.prod(hop.peers(layout) for hop in route.exchanges)
    gathers = [layout.size(hop.axes) for hop in route.hops if hop.kind == "gather"]
    copies = [layout.size(hop.copies) for hop in route.exchanges if hop.copies]
    ranks = math.prod(gathers + copies)
    devices = layout.size(layout.inside.mesh_axes)
    # The busiest device: rows from all devices that send to it, for the experts it owns.
    owned = _grouped(rows_E, senders)
    busiest = fullest([senders * ranks * rows for rows in owned], devices)
    slots = sizes.expert_rows * route.parts
    if sizes.certain or not _overflows(rows_E, tokens, layout, route, sizes, devices):
        return BucketFill(filled=min(1.0, busiest / slots))
    plain = plain_route(route, layout)
    small = usual_sizes(plain, layout, moe, tokens=-(-tokens // ROUND_SHARE))
    peers = plain.exchanges[0].peers(layout)
    rounds = math.ceil(fullest(_grouped(rows_E, peers), devices * peers) / small.rows[0])
    filled = min(1.0, busiest / (rounds * small.expert_rows))
    return BucketFill(filled_in_rounds=filled, rounds=max(1, rounds))


def _rows(share_E: tuple[float, ...], cfg: Config, tokens: int) -> list[float]:
    """Returns a device's assignments to each expert: at most one a token, at most its capacity."""
    capacity = expert_capacity(cfg.moe, tokens=tokens)
    max_tokens = tokens if capacity is None else min(tokens, capacity)
    return [min(float(max_tokens), tokens * cfg.moe.experts_per_token * share) for share in share_E]


def _overflows(
    rows_E: list[float], tokens: int, layout: Layout, route: Route, sizes: Sizes, devices: int
) -> bool:
    """Whether some bucket of some exchange is too small for its rows."""
    owners = sources = 1
    for hop, slots in zip(route.exchanges, sizes.rows, strict=True):
        owners *= hop.peers(layout)
        rows = _distinct(rows_E, tokens, owners) if hop.merge else _grouped(rows_E, owners)
        buckets = [sources * n / route.parts for n in rows]
        # Where a token takes one slot however many of its experts are behind it, a bucket holds at
        # most every token of its senders.
        most = sources * tokens / route.parts if hop.merge else math.inf
        if min(most, fullest(buckets, devices * owners * route.parts)) > slots:
            return True
        sources = owners
    return False


def _distinct(rows_E: list[float], tokens: int, groups: int) -> list[float]:
    """Returns the expected tokens with an assignment in each group, if drawn independently."""
    missed = [1 - rows / tokens for rows in rows_E]
    size = len(rows_E) // groups
    return [tokens * (1 - math.prod(missed[g * size : (g + 1) * size])) for g in range(groups)]


def _grouped(rows_E: list[float], groups: int) -> list[float]:
    """Returns the rows of each of `groups` equal groups of neighbouring experts."""
    size = len(rows_E) // groups
    return [sum(rows_E[g * size : (g + 1) * size]) for g in range(groups)]


def fullest(means: list[float], draws: int) -> float:
    """Returns the expected maximum of counts with these means."""
    top = max(means)
    return top + math.sqrt(2 * top * math.log(max(draws, 1)))
