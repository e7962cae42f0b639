"""Plans the dispatch: the slot of every row on every hop, and the experts each row is bound for.

Only integers move here, ahead of the rows. Letters: those of `comm.tokens`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Bool, Int
from moejax.comm import wire
from moejax.comm.tokens.buckets import SlotMap, experts_of_slots, place_items
from moejax.comm.tokens.swap import send
from moejax.kernels.kept import PLACES
from moejax.layout.layout import Layout
from moejax.layout.route import Hop, Route


class DispatchPlan(NamedTuple):
    """The slots of all rows that one device sends, hop after hop.

    The first map covers all parts, because one token's rows may be in different parts: slot_MK is
    [N, K], item_of_slot [I, P * J]. Later maps have a leading part dimension.
    """

    slot_maps: tuple[SlotMap, ...]  # one for each all-to-all hop
    # After the last hop: the choices of each row; the number of experts here stands for no choice.
    expert_IMK: Int[Array, "I M K"]
    # The most rows that any device fills in one part of a bucket; None: all rows of buckets travel.
    filled: Int[Array, " X"] | None

    @property
    def source(self) -> SlotMap:
        """The slots of the first exchange, on the tokens' own device, all parts in one row."""
        return SlotMap(self.slot_maps[0].slot_MK, self.slot_maps[0].item_of_slot.reshape(-1))


def plan_dispatch(
    expert_NK: Int[Array, "N K"],
    route: Route,
    layout: Layout,
    *,
    num_experts: int,
    rows: tuple[int, ...],
    kept_NK: Bool[Array, "N K"] | None = None,
    filled: Int[Array, " X"] | None = None,
) -> DispatchPlan:
    """Plans the slots of every assignment whose expert is below `num_experts`.

    Wire: the expert numbers of each bucket row, in the smallest integer type that holds them.

    Args:
      rows: J of each all-to-all hop.
      kept_NK: choices that go on behind the first exchange; others have no expert. None: all.
      filled: as in `DispatchPlan`; the same on every device.
    """
    # `span` experts lie behind this point of the route; expert numbers count within them.
    parts, span, slot_maps = route.parts, num_experts, []
    expert_IMK = expert_NK[None]
    for hop in route.hops:
        if hop.kind == "all_to_all":
            J, peers, first = rows[len(slot_maps)], hop.peers(layout), not slot_maps
            span //= peers

            def bucket(expert_MK, J=J, peers=peers, span=span, first=first, merge=hop.merge):
                peer_MK = jnp.minimum(expert_MK // span, peers)
                sizes = {"peers": peers, "rows": J, "merge": merge}
                by_MK = expert_MK if route.parts_by_expert else None
                # Later hops take each part as it arrived.
                slot_map = place_items(
                    peer_MK, parts=parts if first else 1, expert_MK=by_MK, **sizes
                )
                if first and kept_NK is not None:
                    expert_MK = jnp.where(kept_NK, expert_MK, num_experts)
                return slot_map, experts_of_slots(expert_MK, slot_map, per_peer=span, **sizes)

            slot_map, expert_IMK = jax.vmap(bucket)(expert_IMK)
            if first:
                slot_map = SlotMap(slot_map.slot_MK[0], slot_map.item_of_slot.reshape(parts, -1))
                expert_IMK = expert_IMK.reshape(parts, peers * J, -1)
            slot_maps.append(slot_map)
        expert_IMK = _send_choices(expert_IMK, hop, layout, none=span)
    maps, expert_IMK = jax.tree.map(
        lambda x: checkpoint_name(x, PLACES), (tuple(slot_maps), expert_IMK)
    )
    return DispatchPlan(maps, expert_IMK, filled)


def _send_choices(expert_IMK: jax.Array, hop: Hop, layout: Layout, *, none: int) -> jax.Array:
    """Sends the choices of all bucket rows over one hop; `none` stands for no choice."""
    dtype = next(d for d in ("uint8", "uint16", "int32") if none <= jnp.iinfo(d).max)
    with jax.named_scope("routing"):
        arrived_IMK = send(expert_IMK.astype(dtype), hop, layout)
    return checkpoint_name(arrived_IMK, wire.TOKEN_WIRE).astype(jnp.int32)
