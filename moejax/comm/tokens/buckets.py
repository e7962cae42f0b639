"""Assigns items to bucket slots: integers only, computed before any row moves.

Per device. Each peer has a bucket, and each item takes a slot in its peer's bucket. An item is an
assignment (row m, choice k). On a hop that merges, all choices of a row with the same peer are one
item, numbered as the first of them.

A bucket is cut in I parts so that exchanges can run in chunks. Items are dealt to the parts in
turn, so that all parts are equally full and meet the same mix of experts; or they are sorted by
expert and cut into equal runs, so that a part meets few experts and each weight is read in few
chunks.

Passes and micro-batches plan the same sizes again and again, so the functions are jitted, to be
traced once; `inline` leaves no call in the program.

Letters: those of `comm.tokens`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Int


class SlotMap(NamedTuple):
    """The slot of each item, and the item of each slot.

    Slot (i, p, j) has the number (i * P + p) * J + j: part i, peer p, row j.
    """

    slot_MK: Int[Array, "M K"]  # the item's slot; S if it has none
    item_of_slot: Int[Array, " S"]  # m * K + k of the item; M * K if the slot is empty


class RankedItems(NamedTuple):
    """Items sorted by peer, in row order or by expert."""

    peer_MK: Int[Array, "M K"]  # peer of each item; P if there is no item
    place_MK: Int[Array, "M K"]  # position of the item in sorted order
    order_A: Int[Array, " A"]  # the inverse: the item in each place
    start_P: Int[Array, " P+1"]  # where each peer's items begin; last: where items end

    @property
    def rank_MK(self) -> Int[Array, "M K"]:
        """The position of each item among the items of its peer."""
        return self.place_MK - _at(self.start_P, self.peer_MK)

    @property
    def counts_P(self) -> Int[Array, " P"]:
        """The number of items of each peer."""
        return self.start_P[1:] - self.start_P[:-1]


@partial(jax.jit, static_argnames=("peers", "merge"), inline=True)
def rank_items(
    peer_MK: Int[Array, "M K"],
    *,
    peers: int,
    merge: bool,
    expert_MK: Int[Array, "M K"] | None = None,
) -> RankedItems:
    """Sorts the items by peer, in row order, or by expert and then in row order.

    Args:
      peer_MK: the peer of each choice; `peers` for dropped choices.
      merge: makes one item of a row's choices with the same peer.
      expert_MK: the expert of each choice, if items are sorted by it; numbered peer after peer.
    """
    K = peer_MK.shape[1]
    if merge and expert_MK is not None:
        raise ValueError("a merged item has several experts, so items cannot be sorted by expert")
    if merge:
        earlier_KK = jnp.tri(K, k=-1, dtype=bool)
        same_MKK = peer_MK[:, :, None] == peer_MK[:, None, :]
        peer_MK = jnp.where(jnp.any(same_MKK & earlier_KK, axis=2), peers, peer_MK)
    peer_A = peer_MK.reshape(-1)
    sorted_A = peer_A if expert_MK is None else expert_MK.reshape(-1)
    order_A = jnp.argsort(sorted_A, stable=True).astype(jnp.int32)
    positions_A = jnp.arange(peer_A.size, dtype=jnp.int32)
    place_A = (
        jnp.zeros_like(positions_A)
        .at[order_A]
        .set(
            positions_A, unique_indices=True, mode="promise_in_bounds", wrap_negative_indices=False
        )
    )
    start_P = jnp.sum(peer_A[:, None] < jnp.arange(peers + 1), axis=0, dtype=jnp.int32)
    return RankedItems(peer_MK, place_A.reshape(peer_MK.shape), order_A, start_P)


@partial(jax.jit, static_argnames=("peers", "rows", "parts", "merge"), inline=True)
def place_items(
    peer_MK: Int[Array, "M K"],
    *,
    peers: int,
    rows: int,
    parts: int = 1,
    merge: bool = False,
    expert_MK: Int[Array, "M K"] | None = None,
) -> SlotMap:
    """Gives each item a slot in its peer's bucket.

    Args:
      rows: J; the caller makes sure that it is large enough for every peer.
      expert_MK: sorts the items of a peer by expert and cuts them into runs, one for each part, as
        in `rank_items`; None deals them to the parts in turn.
    """
    ranked = rank_items(peer_MK, peers=peers, merge=merge, expert_MK=expert_MK)
    slots, rank_MK = parts * peers * rows, ranked.rank_MK
    row_J, part_I1 = jnp.arange(rows), jnp.arange(parts)[:, None]
    # `rank_IPJ`: rank of slot (i, p, j)'s item among its peer's; at `stop_IPJ` and above, no item.
    if expert_MK is None:
        part_MK, row_MK = rank_MK % parts, rank_MK // parts
        rank_IPJ = (row_J * parts + part_I1)[:, None]
        stop_IPJ = ranked.counts_P[:, None]
    else:
        count_MK = jnp.maximum(_at(ranked.counts_P, ranked.peer_MK), 1)
        part_MK = rank_MK * parts // count_MK
        row_MK = rank_MK - -(-part_MK * count_MK // parts)
        rank_IPJ = -(-part_I1 * ranked.counts_P // parts)[:, :, None] + row_J
        stop_IPJ = -(-(part_I1 + 1) * ranked.counts_P // parts)[:, :, None]
    slot_MK = (part_MK * peers + ranked.peer_MK) * rows + row_MK
    slot_MK = jnp.where(ranked.peer_MK < peers, slot_MK, slots)
    # The item of each slot, gathered from sorted order: a scatter would take three kernels.
    item_IPJ = _at(ranked.order_A, ranked.start_P[:-1, None] + rank_IPJ)
    item_IPJ = jnp.where(rank_IPJ < stop_IPJ, item_IPJ, peer_MK.size)
    return SlotMap(slot_MK, item_IPJ.reshape(-1))


@partial(jax.jit, static_argnames=("groups", "rows"), inline=True)
def order_items(
    group_MK: Int[Array, "M K"], *, groups: int, rows: int
) -> tuple[SlotMap, Int[Array, " G"]]:
    """Sorts the items by group into `rows` slots without gaps; also returns each group's size."""
    ranked = rank_items(group_MK, peers=groups, merge=False)
    has_slot_MK = (group_MK < groups) & (ranked.place_MK < rows)
    slot_MK = jnp.where(has_slot_MK, ranked.place_MK, rows)
    place_S = jnp.arange(rows, dtype=jnp.int32)
    item_S = jnp.where(place_S < ranked.start_P[-1], _at(ranked.order_A, place_S), group_MK.size)
    return SlotMap(slot_MK, item_S), ranked.counts_P


def _at(x_A: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x by non-negative index; the last number for an index past the end."""
    return x_A.at[index].get(mode="clip", wrap_negative_indices=False)


@partial(jax.jit, static_argnames=("peers", "rows", "per_peer", "merge"), inline=True)
def experts_of_slots(
    expert_MK: Int[Array, "M K"],
    slot_map: SlotMap,
    *,
    peers: int,
    rows: int,
    per_peer: int,
    merge: bool,
) -> Int[Array, "S k"]:
    """The experts that each slot's row is bound for, numbered as the slot's peer numbers them.

    A merged row keeps its K choices, with choices of other peers masked; other rows have one
    choice. The result has `per_peer` where there is no choice.

    Args:
      expert_MK: numbered over all peers; peers * per_peer for no choice.
      rows: J.
      per_peer: experts behind each peer.
    """
    item_of_slot = slot_map.item_of_slot
    source_S = item_of_slot // expert_MK.shape[1] if merge else item_of_slot
    choices = expert_MK if merge else expert_MK.reshape(-1, 1)
    none = peers * per_peer
    expert_Sk = jnp.take(choices, source_S, axis=0, mode="fill", fill_value=none)
    peer_S = jnp.arange(item_of_slot.shape[0], dtype=jnp.int32) // rows % peers
    here_Sk = expert_Sk - peer_S[:, None] * per_peer
    return jnp.where((here_Sk >= 0) & (here_Sk < per_peer), here_Sk, per_peer)
