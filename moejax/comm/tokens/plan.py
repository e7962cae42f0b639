"""Plans where every row goes: the integers that travel ahead of the rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Int
from moejax.comm import wire
from moejax.comm.tokens.buckets import SlotMap, experts_of_slots, place_items
from moejax.comm.tokens.swap import send
from moejax.layout.layout import Layout
from moejax.layout.route import Hop, Route


class DispatchPlan(NamedTuple):
    """Where all rows of one device go, hop after hop.

    Items stand part by part, I in front. Slots of the first exchange are over all parts, so that
    they find a token's rows in all of them; of later ones per part, I in front.
    """

    places: tuple[SlotMap, ...]  # of each all-to-all hop
    expert_IMK: Int[Array, "I M k"]  # at the end: choices of each row; experts_here for none
    # Rows of a bucket that any device fills, for each exchange; None: whole buckets travel.
    filled: Int[Array, " S"] | None

    @property
    def source(self) -> SlotMap:
        """Where the tokens' rows stand at home, all parts after each other."""
        return SlotMap(self.places[0].slot_MK, self.places[0].item_of_slot.reshape(-1))


def plan_dispatch(
    expert_NK: Int[Array, "N K"],
    route: Route,
    layout: Layout,
    *,
    num_experts: int,
    rows: tuple[int, ...],
    filled: Int[Array, " S"] | None = None,
) -> DispatchPlan:
    """Plans the way of every assignment whose expert is below `num_experts`.

    Wire: the expert numbers of each bucket row, in the smallest integer that holds them.

    Args:
      rows: J of each exchange, of one part of a bucket.
      filled: as in `DispatchPlan`; the same on every device.
    """
    parts, span, places = route.parts, num_experts, []
    expert_IMK = expert_NK[None]
    for hop in route.hops:
        if hop.kind == "all_to_all":
            J, peers, first = rows[len(places)], hop.peers(layout), not places
            span //= peers

            def bucket(expert_MK, J=J, peers=peers, span=span, first=first, merge=hop.merge):
                peer_MK = jnp.minimum(expert_MK // span, peers)
                cut = parts if first else 1
                placed = place_items(peer_MK, peers=peers, rows=J, parts=cut, merge=merge)
                options = {"peers": peers, "rows": J, "per_peer": span, "merge": merge}
                return placed, experts_of_slots(expert_MK, placed, **options)

            placed, expert_IMK = jax.vmap(bucket)(expert_IMK)
            if first:
                placed = SlotMap(placed.slot_MK[0], placed.item_of_slot.reshape(parts, -1))
                expert_IMK = expert_IMK.reshape(parts, peers * J, -1)
            places.append(placed)
        expert_IMK = _send_choices(expert_IMK, hop, layout, none=span)
    return DispatchPlan(tuple(places), expert_IMK, filled)


def _send_choices(expert_IMK: jax.Array, hop: Hop, layout: Layout, *, none: int) -> jax.Array:
    dtype = next(d for d in ("uint8", "uint16", "int32") if none <= jnp.iinfo(d).max)
    with jax.named_scope("routing"):
        shipped = send(expert_IMK.astype(dtype), hop, layout)
    return checkpoint_name(shipped, wire.TOKEN_WIRE).astype(jnp.int32)
