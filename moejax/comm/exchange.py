"""Carries rows along a route, and their results home.

Per device, inside shard_map. `plan_journey` sends the integers that say where every row goes;
`outward` and `homeward` then move rows, one hop and any number of parts at a time, and are each
other's mirror: the gradient of a result travels outward, the gradient of a row travels homeward.
Buckets have a fixed number of rows, padded with zeros: static shapes are what every backend's
all-to-all supports.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from moejax.comm import wire
from moejax.comm.buckets import Places, follow, place_items
from moejax.comm.codec import build_plain_codec
from moejax.comm.pack import decode_packed, encode_packed
from moejax.compression import CodecSpec
from moejax.dims import Layout
from moejax.kernels.permute import rows_at, sum_rows
from moejax.route import Hop, Route

# Into how many equal steps a bucket's rows are counted when only the filled ones travel.
PIECES = 128


class Journey(NamedTuple):
    """Where all rows of one device go, hop after hop.

    Places of the first exchange are over all parts; of later ones per part, I in front.
    """

    places: tuple[Places, ...]  # of each all-to-all hop
    expert_IMK: Int[Array, "I M k"]  # at the end: choices of each row; experts_here for none
    # Rows of a bucket that any device fills, for each exchange; None: whole buckets travel.
    filled: Int[Array, " S"] | None


def plan_journey(
    expert_NK: Int[Array, "N K"],
    route: Route,
    layout: Layout,
    *,
    num_experts: int,
    rows: tuple[int, ...],
    filled: Int[Array, " S"] | None = None,
) -> Journey:
    """Plans the journey of every assignment whose expert is below `num_experts`.

    Wire: the expert numbers of each bucket row, in the smallest integer that holds them.

    Args:
      rows: J of each exchange, of one part of a bucket.
      filled: as in `Journey`; the same on every device.
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
                return placed, follow(expert_MK, placed, **options)

            placed, expert_IMK = jax.vmap(bucket)(expert_IMK)
            if first:
                placed = jax.tree.map(lambda x: x[0], placed)
                expert_IMK = expert_IMK.reshape(parts, peers * J, -1)
            places.append(placed)
        expert_IMK = _ship_choices(expert_IMK, hop, layout, none=span)
    return Journey(tuple(places), expert_IMK, filled)


def _ship_choices(expert_IMK: jax.Array, hop: Hop, layout: Layout, *, none: int) -> jax.Array:
    dtype = next(d for d in ("uint8", "uint16", "int32") if none <= jnp.iinfo(d).max)
    with jax.named_scope("routing"):
        shipped = ship(expert_IMK.astype(dtype), hop, layout)
    return checkpoint_name(shipped, wire.TOKEN_WIRE).astype(jnp.int32)


def outward(
    rows: Any, number: int, piece: Journey, route: Route, layout: Layout, **way: bool
) -> Any:
    """Takes rows of some parts one hop towards the experts.

    Args:
      rows: arrays [I, M, ...]; before the first exchange, its buckets. The first of them has the
        hop's codec; what travels beside it, weights, goes as it is.
      number: of the hop.
      piece: the journey, with the places of the exchanges after the first, for these parts.
      way: gradient=True where the rows are gradients of results on their way back.
    """
    hop = route.hops[number]
    if number and hop.kind == "all_to_all":
        slot_IMK, item_IS = piece.places[number - 1]
        row_IS = item_IS // slot_IMK.shape[-1]
        rows = jax.tree.map(lambda x_IMD: jax.vmap(rows_at)(x_IMD, row_IS), rows)
    with jax.named_scope("combine_backward" if way.get("gradient") else "dispatch"):
        return _each(ship, rows, number, piece, hop, layout, **way)


def homeward(
    results: Any, number: int, piece: Journey, route: Route, layout: Layout, **way: bool
) -> Any:
    """Takes what became of `outward`'s rows back one hop; arguments as there."""
    hop = route.hops[number]
    with jax.named_scope("dispatch_backward" if way.get("gradient") else "combine"):
        results = _each(bring, results, number, piece, hop, layout, **way)
    if number and hop.kind == "all_to_all":
        slot_IMK = piece.places[number - 1].slot_MK
        results = jax.tree.map(lambda y_ISD: jax.vmap(sum_rows)(y_ISD, slot_IMK), results)
    return results


def _each(
    move: Callable, rows: Any, number: int, piece: Journey, hop: Hop, layout: Layout, **way: bool
) -> Any:
    """Moves every array; the first as the hop's codec says."""
    exchanges = hop.kind == "all_to_all" and piece.filled is not None
    filled = piece.filled[number] if exchanges else None  # type: ignore[index]
    leaves, tree = jax.tree.flatten(rows)
    options = {"filled": filled, **way}
    moved = [move(x, hop, layout, coded=not place, **options) for place, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, moved)


def ship(
    x_IM: jax.Array,
    hop: Hop,
    layout: Layout,
    *,
    gradient: bool = False,
    filled: jax.Array | None = None,
    coded: bool = False,
) -> jax.Array:
    """One hop outward: array [I, M, ...] of bucket rows, peer by peer, to what arrives.

    Its results are not tagged for remat: the pipeline tags them where its steps end. `coded`: as
    the hop's codec says, one for each direction and pass.
    Wire per device: all_to_all (P - 1) / P of x's bytes (a share of them with `split`, several
    times with `copies`), gather (n - 1) times x's bytes, sum nothing (a gradient: an all-reduce).
    """
    if hop.kind == "gather":
        return wire.all_gather(x_IM, hop.axes, dim=1, tag=None)
    if hop.kind == "sum":
        return wire.all_reduce(x_IM, hop.axes, tag=None) if gradient else x_IM
    x_PIJ = _by_peer(x_IM, hop.peers(layout))
    if hop.split and gradient:
        x_PIJ = wire.reduce_scatter(x_PIJ, hop.split, dim=2, tag=None)
    elif hop.split:
        x_PIJ = _own_share(x_PIJ, hop.split, dim=2)
    if hop.copies:
        copies = layout.size(hop.copies)
        x_PIJ = jnp.repeat(x_PIJ, copies, axis=0)
    codec = hop.codecs.combine_backward if gradient else hop.codecs.dispatch
    return _by_part(_swap(x_PIJ, hop, filled, codec if coded else None))


def bring(
    y_IM: jax.Array,
    hop: Hop,
    layout: Layout,
    *,
    gradient: bool = False,
    filled: jax.Array | None = None,
    coded: bool = False,
) -> jax.Array:
    """One hop homeward, the mirror of `ship`: what was copied or gathered comes back summed."""
    if hop.kind == "gather":
        return wire.reduce_scatter(y_IM, hop.axes, dim=1, tag=None)
    if hop.kind == "sum":
        return y_IM if gradient else wire.all_reduce(y_IM, hop.axes, tag=None)
    codec = hop.codecs.dispatch_backward if gradient else hop.codecs.combine
    y_PIJ = _by_peer(y_IM, layout.size(hop.axes))
    y_PIJ = _swap(y_PIJ, hop, filled, codec if coded else None)
    if hop.copies:
        by_copy = y_PIJ.reshape(-1, layout.size(hop.copies), *y_PIJ.shape[1:])
        y_PIJ = jnp.sum(by_copy.astype(jnp.float32), axis=1).astype(y_PIJ.dtype)
    if hop.split and gradient:
        y_PIJ = _only_share(y_PIJ, hop.split, dim=2)
    elif hop.split:
        y_PIJ = wire.all_gather(y_PIJ, hop.split, dim=2, tag=None)
    return _by_part(y_PIJ)


def _swap(
    x_PIJ: jax.Array, hop: Hop, filled: jax.Array | None, spec: CodecSpec | None
) -> jax.Array:
    """The all-to-all, of rows as a codec leaves them: each row is encoded on its own."""
    codec = build_plain_codec(spec)
    if codec is None:
        return _exchange(x_PIJ, hop, filled)
    packed_PIJ, payload = encode_packed(codec, x_PIJ)
    arrived_PIJ = _exchange(packed_PIJ, hop, filled)
    return decode_packed(codec, arrived_PIJ, payload, x_PIJ.shape[-1], x_PIJ.dtype)


def _exchange(x_PIJ: jax.Array, hop: Hop, filled: jax.Array | None) -> jax.Array:
    """The all-to-all; of each bucket's J rows only as many as are filled, in steps of J / PIECES.

    Shapes must be static, so the number of steps travels as its binary digits: one exchange for
    each digit that is set. Rows that stay behind arrive as zeros, which is what they are.
    """
    if filled is None:
        return wire.all_to_all(x_PIJ, hop.axes, tag=None)
    step = -(-x_PIJ.shape[2] // PIECES)
    steps = -(-filled // step)
    y_PIJ, start = jnp.zeros_like(x_PIJ), jnp.int32(0)
    for digit in reversed(range(PIECES.bit_length())):
        size = step << digit
        if size > x_PIJ.shape[2]:
            continue

        def send(y_PIJ: jax.Array, start=start, size=size) -> jax.Array:
            piece = lax.dynamic_slice_in_dim(x_PIJ, start, size, axis=2)
            piece = wire.all_to_all(piece, hop.axes, tag=None)
            return lax.dynamic_update_slice_in_dim(y_PIJ, piece, start, axis=2)

        goes = (steps >> digit) & 1 == 1
        y_PIJ = lax.cond(~goes, lambda y_PIJ: y_PIJ, send, y_PIJ)
        start += jnp.where(goes, size, 0)
    return y_PIJ


def _by_peer(x_IM: jax.Array, peers: int) -> jax.Array:
    """[I, P * J, ...] -> [P, I, J, ...]."""
    parts, rows = x_IM.shape[:2]
    return jnp.swapaxes(x_IM.reshape(parts, peers, rows // peers, *x_IM.shape[2:]), 0, 1)


def _by_part(x_PIJ: jax.Array) -> jax.Array:
    """[P, I, J, ...] -> [I, P * J, ...]."""
    peers, parts, rows = x_PIJ.shape[:3]
    return jnp.swapaxes(x_PIJ, 0, 1).reshape(parts, peers * rows, *x_PIJ.shape[3:])


def _own_share(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    size = x.shape[dim] // wire.size(axes)
    return lax.dynamic_slice_in_dim(x, wire.index(axes) * size, size, axis=dim)


def _only_share(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """The transpose of `_own_share`: zeros where the other devices' shares are."""
    size = x.shape[dim]
    shape = (*x.shape[:dim], size * wire.size(axes), *x.shape[dim + 1 :])
    return lax.dynamic_update_slice_in_dim(
        jnp.zeros(shape, x.dtype), x, wire.index(axes) * size, axis=dim
    )
