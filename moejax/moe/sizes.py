"""Sizes of buckets: static, for a balanced router with some headroom.

Static shapes need sizes before routing is known. The usual sizes hold `moe.headroom` times the
balanced load. Rows that fit them (`fitting`) take the layer's route, and the rest follows in
overflow rounds of the plain route (`comm.tokens.rounds`), as many as its fullest bucket needs
anywhere.

Letters: N tokens, K choices a token, E experts, P owner groups reached after a hop, I parts of a
bucket, J rows of one part, A = N * K assignments, X exchanges; if rows merge, one more entry for
the experts' rows.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Bool, Int
from moejax.comm import wire
from moejax.comm.tokens.buckets import rank_items
from moejax.comm.tokens.swap import PIECES
from moejax.config.schema import MoEConfig
from moejax.layout.layout import Axes, Layout
from moejax.layout.route import Hop, Route


class BucketSizes(NamedTuple):
    """Numbers of rows, for one part of the buckets."""

    rows: tuple[int, ...]  # J of each exchange
    arriving: int  # rows that arrive at the experts
    expert_rows: int  # rows that the experts compute, sorted by expert
    certain: bool  # no routing can overflow these sizes


def expert_capacity(moe: MoEConfig, *, tokens: int) -> int | None:
    """The most rows that a device sends to one expert; None in dropless mode."""
    if moe.capacity_factor is None:
        return None
    return math.ceil(moe.capacity_factor * tokens * moe.experts_per_token / moe.num_experts)


def usual_sizes(route: Route, layout: Layout, moe: MoEConfig, *, tokens: int) -> BucketSizes:
    """The sizes for a router near balance; with a capacity, for any router.

    Args:
      tokens: N, tokens of one device.
    """
    E, K, parts = moe.num_experts, moe.experts_per_token, route.parts
    capacity = expert_capacity(moe, tokens=tokens)
    arriving, choices, owners, ranks = tokens, K, 1, 1
    rows: list[int] = []
    certain = True

    def bounded(worst: int, balanced: float, sources: int) -> int:
        nonlocal certain
        limit = math.ceil(moe.headroom * balanced)
        if capacity is not None:
            limit = sources * capacity * (E // owners)
        elif limit < worst:
            certain = False
        return min(worst, limit)

    # worst: rows under any routing. balanced: rows under even routing. The first exchange is sized
    # over all parts and divided afterwards; later ones are sized per part.
    for hop in route.hops:
        if hop.kind == "all_to_all":
            sources = owners
            owners *= hop.peers(layout)
            share = _reach(E, K, owners) if hop.merge else K / owners
            worst = arriving * (1 if hop.merge else min(choices, E // owners))
            size = bounded(worst, sources * tokens * share / (parts if rows else 1), sources)
            size = math.ceil(size / (1 if rows else parts))
            step = math.ceil(size / PIECES) if route.trim else 1  # trimmed ones travel in steps
            rows.append(math.ceil(size / step) * step)
            arriving = hop.peers(layout) * rows[-1]
            choices = choices if hop.merge else 1
        elif hop.kind == "gather":
            ranks = layout.size(hop.axes)
            arriving *= ranks
    if choices == 1:
        return BucketSizes(tuple(rows), arriving, arriving, certain)
    balanced = tokens * K * ranks / parts
    worst = arriving * min(K, E // owners)
    expert_rows = bounded(worst, balanced, owners * ranks) if rows else worst
    return BucketSizes(tuple(rows), arriving, expert_rows, certain)


def _reach(E: int, K: int, groups: int) -> float:
    """The probability that a given one of `groups` equal groups has any of a token's K experts."""
    return 1 - math.comb(E - E // groups, K) / math.comb(E, K)


class Fits(NamedTuple):
    """Choices that the buckets of a route hold."""

    first_NK: Bool[Array, "N K"]  # held by the first exchange; contains all of `all_NK`
    all_NK: Bool[Array, "N K"]  # held by all exchanges, and by the experts' buffers


def fitting(
    expert_NK: Int[Array, "N K"],
    route: Route,
    layout: Layout,
    sizes: BucketSizes,
    *,
    num_experts: int,
) -> Fits:
    """Returns the choices that fit. A choice that is dropped fits nowhere.

    A bucket behind the first exchange is filled by several devices: those before this one come
    first. Wire: their numbers of rows for each bucket; nothing if there is one exchange and no row
    merges.
    """
    parts, fits_NK, part_NK = route.parts, expert_NK < num_experts, jnp.zeros_like(expert_NK)
    first_NK = fits_NK
    stops = zip(_stops(route, layout), (*sizes.rows, sizes.expert_rows), strict=False)
    for (hop, owners, axes), rows in stops:
        now_NK = jnp.where(fits_NK, expert_NK, num_experts)
        peer_NK = jnp.minimum(now_NK // (num_experts // owners), owners)
        if hop is None:
            fits_NK &= _held(peer_NK, part_NK, parts, owners, axes, rows)
            continue
        if not axes:
            by = now_NK if route.parts_by_expert else None
            ranked = rank_items(peer_NK, peers=owners, merge=hop.merge, expert_MK=by)
            held_NK = ranked.rank_MK < parts * rows
            part_NK = ranked.rank_MK % parts
            item_NK = ranked.peer_MK
        else:
            item_NK = rank_items(peer_NK, peers=owners, merge=hop.merge).peer_MK
            held_NK = _held(item_NK, part_NK, parts, owners, axes, rows)
        if hop.merge:
            same_NKK = _same_item(peer_NK, item_NK, owners)
            held_NK = jnp.any(same_NKK & held_NK[:, None, :], axis=2)
            if not axes:
                part_NK = jnp.sum(jnp.where(same_NKK, part_NK[:, None, :], 0), axis=2)
        fits_NK &= held_NK
        first_NK = first_NK if axes else fits_NK
    return Fits(first_NK, fits_NK)


def needed(
    expert_NK: Int[Array, "N K"], route: Route, layout: Layout, *, num_experts: int
) -> Int[Array, " X"]:
    """The rows that this routing fills: `rows` of `BucketSizes`, and `expert_rows` if rows merge.

    It is `DispatchPlan.filled` before sizes limit it: a maximum over all parts, peers and devices.
    Wire: a few integers a peer, and their maximum.
    """
    parts, needs, part_NK = route.parts, [], jnp.zeros_like(expert_NK)
    for hop, owners, axes in _stops(route, layout):
        peer_NK = jnp.minimum(expert_NK // (num_experts // owners), owners)
        if hop is None:
            needs.append(_fullest(peer_NK, part_NK, parts, owners, axes))
            continue
        ranked = rank_items(peer_NK, peers=owners, merge=hop.merge)
        item_NK, rank_NK = ranked.peer_MK, ranked.rank_MK
        if axes:
            needs.append(_fullest(item_NK, part_NK, parts, owners, axes))
            continue
        needs.append(-(-jnp.max(ranked.counts_P) // parts))
        same_NKK = _same_item(peer_NK, item_NK, owners)
        part_NK = jnp.sum(jnp.where(same_NKK, rank_NK[:, None, :], 0), axis=2) % parts
        part_NK = part_NK if hop.merge else rank_NK % parts
    return wire.all_max(jnp.stack(needs), layout.mesh_axes)


def _stops(route: Route, layout: Layout) -> Iterator[tuple[Hop | None, int, Axes]]:
    """Yields each exchange, and None for the experts if rows merge.

    Beside it P, and the axes of hops before it: devices along them fill the same buckets.
    """
    owners, axes = 1, ()
    for hop in route.exchanges:
        owners *= hop.peers(layout)
        yield hop, owners, axes
        axes += hop.axes
    if route.merges:
        gathers = tuple(axis for hop in route.hops if hop.kind == "gather" for axis in hop.axes)
        yield None, owners, axes + gathers


def _same_item(peer_NK: jax.Array, item_NK: jax.Array, owners: int) -> jax.Array:
    """Marks the first choice with the same peer: a merged row's other choices travel with it."""
    return peer_NK[:, :, None] == jnp.where(item_NK < owners, item_NK, -1)[:, None, :]


def _keys(peer_NK: jax.Array, part_NK: jax.Array, parts: int, peers: int) -> jax.Array:
    return jnp.where(peer_NK < peers, part_NK * peers + peer_NK, parts * peers)


def _held(
    peer_NK: jax.Array, part_NK: jax.Array, parts: int, peers: int, axes: Axes, rows: int
) -> jax.Array:
    """Returns whether items are among the first `rows` of their part and peer, over the devices."""
    key_NK = _keys(peer_NK, part_NK, parts, peers)
    ranked = rank_items(key_NK, peers=parts * peers, merge=False)
    counts_SB = wire.all_gather(ranked.counts_P[None], axes, dim=0, tag=None)
    earlier_S1 = (jnp.arange(wire.size(axes)) < (wire.index(axes) if axes else 0))[:, None]
    before_B = jnp.sum(jnp.where(earlier_S1, counts_SB, 0), axis=0)
    before_NK = before_B[jnp.minimum(key_NK, parts * peers - 1)]
    return before_NK + ranked.rank_MK < rows


def _fullest(
    peer_NK: jax.Array, part_NK: jax.Array, parts: int, peers: int, axes: Axes
) -> jax.Array:
    """The largest count of items of a part for a peer, summed over the devices along `axes`."""
    key_A = _keys(peer_NK, part_NK, parts, peers).reshape(-1)
    counts = jnp.zeros((parts * peers,), jnp.int32).at[key_A].add(1, mode="drop")
    return jnp.max(wire.all_reduce(counts, axes))
