"""The spread of tokens over experts, and the resulting fill of buckets.

An expert load is the share of assignments that each expert of each layer gets: even, a named skew,
or a record of a run. It decides how many rows the busiest device computes, and how often buckets
overflow, so that a layer has overflow rounds (`moe.sizes`, `comm.tokens.rounds`).

Legend: N tokens, L layers, E experts.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.layout.layout import Layout, build_layout
from moejax.layout.route import Route, plain_route
from moejax.moe.copies import of_places, place_shares, plan_copies, rings
from moejax.moe.dispatch import ROUND_SHARE
from moejax.moe.sizes import BucketSizes, expert_capacity, usual_sizes
from moejax.plan.price.cost import BucketFill

RARE = 0.01  # a chance below it is none


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
    load: ExpertLoad, cfg: Config, layout: Layout, route: Route, sharing: float = 1.0
) -> list[tuple[float, BucketFill]]:
    """Returns pairs: a share of the expert layers, and the fill of their buckets.

    The shares sum to one. Counts of independent draws vary: the fullest of n buckets of mean m
    holds about m + sqrt(2 m ln n), and where buckets are small some overflow under any routing.

    Args:
      sharing: devices that share the same cores. They take turns, so their sum sets the time.
    """
    tokens = tokens_of(cfg, layout, route)
    if cfg.moe.slots and route.exchanges:
        load, cfg = _of_places(load, cfg, layout)
    sizes = usual_sizes(route, layout, cfg.moe, tokens=tokens)
    shares: dict[BucketFill, float] = {}
    for share_E in load.share_LE:
        for chance, fill in _layer(share_E, cfg, layout, route, sizes, tokens, round(sharing)):
            shares[fill] = shares.get(fill, 0.0) + chance / len(load.share_LE)
    return [(share, fill) for fill, share in shares.items()]


def busiest_device(load: ExpertLoad, cfg: Config) -> float:
    """Returns the choices of the device that gets most over their mean; the mean over layers."""
    layout = build_layout(cfg.mesh)
    owners = layout.size(layout.expert_owner_axes)
    if cfg.moe.slots:
        load, cfg = _of_places(load, cfg, layout)
    return sum(max(_grouped(list(x), owners)) * owners for x in load.share_LE) / len(load.share_LE)


def _of_places(load: ExpertLoad, cfg: Config, layout: Layout) -> tuple[ExpertLoad, Config]:
    """Returns the load of places, and a config that has them as experts; see `moe.copies`."""
    rings_r, shares = rings(layout, cfg.moe.slots), []
    for share_E in map(np.array, load.share_LE):
        plan = plan_copies((share_E * 2**22).astype(np.int32), rings_r, np)
        shares.append(tuple(place_shares(share_E, plan, rings_r).tolist()))
    places = of_places(cfg.moe, len(shares[0]))
    return dataclasses.replace(load, share_LE=tuple(shares)), dataclasses.replace(cfg, moe=places)


def tokens_of(cfg: Config, layout: Layout, route: Route) -> int:
    """Returns N: tokens that a device routes at one time."""
    ranks = layout.size(layout.inside.token_axes) * cfg.train.micro_batches
    ranks *= 1 if route.replicated else layout.size(layout.tensor)
    return max(1, cfg.train.batch_sequences * cfg.data.sequence_length // ranks)


def _layer(
    share_E: tuple[float, ...],
    cfg: Config,
    layout: Layout,
    route: Route,
    sizes: BucketSizes,
    tokens: int,
    sharing: int,
) -> list[tuple[float, BucketFill]]:
    """Returns the chances of a layer: that its buckets hold all rows, and that there are rounds."""
    if not route.exchanges:
        return [(1.0, BucketFill())]
    # A device's assignments to each expert: at most one a token, at most its capacity.
    capacity, choices = expert_capacity(cfg.moe, tokens=tokens), cfg.moe.experts_per_token
    max_tokens = float(tokens if capacity is None else min(tokens, capacity))
    rows_E = [min(max_tokens, tokens * choices * share) for share in share_E]
    senders = math.prod(hop.peers(layout) for hop in route.exchanges)
    ranks = math.prod(layout.size(hop.axes) for hop in route.hops if hop.kind == "gather")
    devices = layout.size(layout.inside.mesh_axes)
    # The busiest device: rows from all devices that send to it, for the experts it owns.
    owned = _grouped(rows_E, senders)
    busiest = _busiest([senders * ranks * rows for rows in owned], devices, sharing)
    usual = BucketFill(filled=min(1.0, busiest / (sizes.expert_rows * route.parts)))
    if sizes.certain:
        return [(1.0, usual)]
    chance, over = _overflow(rows_E, tokens, layout, route, sizes, devices)
    if chance < RARE:
        return [(1.0, usual)]
    plain = plain_route(route, layout)
    small = usual_sizes(plain, layout, cfg.moe, tokens=-(-tokens // ROUND_SHARE))
    rounds = max(1, math.ceil(over / small.rows[0]))
    # All senders have too many rows for a popular device, one of them if it was by chance.
    top = senders * ranks * max(owned) - sizes.expert_rows * route.parts
    filled = min(1.0, max(top, over) / (rounds * small.expert_rows))
    with_rounds = dataclasses.replace(usual, filled_in_rounds=filled, rounds=rounds)
    if chance > 1 - RARE:
        return [(1.0, with_rounds)]
    return [(1 - chance, usual), (chance, with_rounds)]


def _busiest(means: list[float], devices: int, sharing: int) -> float:
    """Returns the rows of the busiest device; of neighbours that share cores, their mean."""
    sharing = max(1, min(sharing, devices))
    size = math.gcd(sharing, len(means))
    sums = [sharing // size * own for own in _grouped(means, len(means) // size)]
    return fullest(sums, devices // sharing) / sharing


def _overflow(
    rows_E: list[float], tokens: int, layout: Layout, route: Route, sizes: BucketSizes, devices: int
) -> tuple[float, float]:
    """Returns the chance that a bucket anywhere is too small, and by how many rows."""
    held, over, owners, sources, total, E = 1.0, 0.0, 1, 1, sum(rows_E), len(rows_E)
    distinct = max(0.0, E - total / tokens) / max(1, E - 1)  # a token's experts differ
    for hop, slots in zip(route.exchanges, sizes.rows, strict=True):
        owners *= hop.peers(layout)
        rows = _distinct(rows_E, tokens, owners) if hop.merge else _grouped(rows_E, owners)
        # Where a token takes one slot however many of its experts are behind it, a bucket holds at
        # most every token of its senders.
        most = sources * tokens if hop.merge else math.inf
        room = slots * route.parts
        if most > room:
            count = max(1, devices * hop.peers(layout) // owners)  # buckets of each mean
            rest = [1 - n / tokens if hop.merge else (1 - n / total) * distinct for n in rows]
            pairs = zip(rows, rest, strict=True)
            held *= math.prod(_holds(sources * n, own, room) ** count for n, own in pairs)
            excess = fullest([sources * n for n in rows], count * owners) - room
            # If several devices fill a bucket, only rows of the last one exceed it.
            over = max(over, min(excess, max(rows)) if sources > 1 else excess)
        sources = owners
    return 1 - held, max(1.0, over)


def _holds(mean: float, spread: float, room: int) -> float:
    """Returns the chance that a count is at most `room`; its variance is `mean * spread`."""
    deviation = math.sqrt(max(mean * spread, 1e-9))
    return 0.5 * (1 + math.erf((room + 0.5 - mean) / deviation / math.sqrt(2)))


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
