"""Carries rows along a route, and their results home.

Per device, inside shard_map. `plan_journey` sends the integers that say where every row goes;
`outward` and `homeward` then move rows, one hop and any number of parts at a time, and are each
other's mirror: the gradient of a result travels outward, the gradient of a row travels homeward.
`outward` fills buckets with copies of what it is given, which at home are the tokens themselves, so
that a codec meets them on their way into a bucket (`comm.tokens.rows`). `add_up` is the end at
home. Buckets have a fixed number of rows, padded with zeros: static shapes are what every backend's
all-to-all supports.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.codecs.build import build_plain_codec
from moejax.comm.codecs.codec import Codec, Payload
from moejax.comm.codecs.pack import pack, unpack
from moejax.comm.tokens.buckets import Places, follow, place_items
from moejax.comm.tokens.rows import decode, encode, encode_rows, sum_encoded
from moejax.kernels.permute import rows_at, sum_rows, weight_at
from moejax.layout.layout import Layout
from moejax.layout.route import Hop, Route

# Into how many equal steps a bucket's rows are counted when only the filled ones travel.
PIECES = 128


class Journey(NamedTuple):
    """Where all rows of one device go, hop after hop.

    Items stand part by part, I in front. Slots of the first exchange are over all parts, so that
    they find a token's rows in all of them; of later ones per part, I in front.
    """

    places: tuple[Places, ...]  # of each all-to-all hop
    expert_IMK: Int[Array, "I M k"]  # at the end: choices of each row; experts_here for none
    # Rows of a bucket that any device fills, for each exchange; None: whole buckets travel.
    filled: Int[Array, " S"] | None

    @property
    def home(self) -> Places:
        """Where the tokens' rows stand at home, all parts after each other."""
        return Places(self.places[0].slot_MK, self.places[0].item_S.reshape(-1))


class Rows(NamedTuple):
    """What travels: arrays [I, M, ...] of some parts; before the first exchange [N, ...].

    Attributes:
      x: tokens, results, or gradients of either; come home over the first exchange, what its codec
        made of them.
      weight: the router's, or gradients of them, where they travel along; else None. No codec
        touches them.
    """

    x: Payload
    weight: Any


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
                placed = Places(placed.slot_MK[0], placed.item_S.reshape(parts, -1))
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
    rows: Rows, number: int, piece: Journey, route: Route, layout: Layout, *, gradient: bool = False
) -> Rows:
    """Takes rows of some parts one hop towards the experts.

    Args:
      rows: before the first exchange all tokens of this device: its buckets hold copies of them.
      number: of the hop.
      piece: the journey, with places of these parts.
      gradient: rows are gradients of results on their way back; before the first exchange, with the
        weights of the results.
    """
    hop, filled = route.hops[number], _filled(piece, number)
    with jax.named_scope("combine_backward" if gradient else "dispatch"):
        if hop.kind == "all_to_all" and number == 0:
            return _leave_home(rows, piece, route, layout, gradient=gradient)
        if hop.kind == "all_to_all":
            slot_IMK, item_IS = piece.places[number]
            row_IS = item_IS // slot_IMK.shape[-1]
            rows = jax.tree.map(lambda x_IMD: jax.vmap(rows_at)(x_IMD, row_IS), rows)
        move = partial(ship, hop=hop, layout=layout, gradient=gradient, filled=filled)
        return jax.tree.map(move, rows)


def _leave_home(
    tokens: Rows, piece: Journey, route: Route, layout: Layout, *, gradient: bool
) -> Rows:
    """The first exchange: encodes the copies of tokens that fill its buckets, decodes what came."""
    hop, (slot_NK, item_IS), filled = route.hops[0], piece.places[0], _filled(piece, 0)
    (x_ND, weight_NK), K = tokens, slot_NK.shape[1]
    codec = build_plain_codec(hop.codecs.combine_backward if gradient else hop.codecs.dispatch)

    def copies(codec: Codec | None, item_PIJ: jax.Array) -> Payload:
        weighted = gradient and not route.merges
        weight_PIJ = weight_at(weight_NK, item_PIJ) if weighted else None
        return encode_rows(codec, x_ND, item_PIJ // K, weight_PIJ)

    item_PIJ = _by_peer(item_IS, hop.peers(layout))
    if gradient and hop.split:  # tensor ranks hold terms of the same gradients
        rows_PIJ = wire.reduce_scatter(copies(None, item_PIJ), hop.split, dim=2, tag=None)
        payload = encode(codec, rows_PIJ)
    else:
        payload = copies(codec, _for_peers(item_PIJ, hop, layout))
    arrived = decode(codec, _swap(payload, hop, filled, codec), x_ND.shape[1], x_ND.dtype)
    beside = None
    if route.merges and not gradient:
        beside = ship(rows_at(weight_NK, item_IS // K), hop, layout, filled=filled)
    return Rows(_by_part(arrived), beside)


def homeward(
    results: Rows,
    number: int,
    piece: Journey,
    route: Route,
    layout: Layout,
    *,
    gradient: bool = False,
) -> Rows:
    """Takes what became of `outward`'s rows back one hop; arguments as there.

    Over the first exchange x arrives as its codec left it, for `add_up`.
    """
    hop, filled = route.hops[number], _filled(piece, number)
    with jax.named_scope("dispatch_backward" if gradient else "combine"):
        move = partial(bring, hop=hop, layout=layout, gradient=gradient, filled=filled)
        if hop.kind == "all_to_all" and number == 0:
            x = move(results.x, codec=_codec_home(hop, gradient))
            return Rows(x, jax.tree.map(move, results.weight))
        results = jax.tree.map(move, results)
        if hop.kind == "all_to_all":
            slot_IMK = piece.places[number].slot_MK
            results = jax.tree.map(lambda y_ISD: jax.vmap(sum_rows)(y_ISD, slot_IMK), results)
        return results


def add_up(
    arrived: Rows,
    weight_NK: Float[Array, "N K"] | None,
    journey: Journey,
    route: Route,
    *,
    like: Float[Array, "N D"],
    gradient: bool = False,
) -> Rows:
    """The end at home: each token's rows decoded and added up, weighted unless weights are None.

    Args:
      arrived: what `homeward` brought over the first exchange, of all parts.
      like: what the sums are like.
    """
    home, D = journey.home, like.shape[1]
    with jax.named_scope("dispatch_backward" if gradient else "combine"):
        x_S, beside_SK = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrived)
        codec = codec_at_home(route, gradient=gradient)
        x_ND = sum_encoded(codec, x_S, weight_NK, home, D, like.dtype)
        return Rows(x_ND, jax.tree.map(lambda w_SK: sum_rows(w_SK, home.slot_MK), beside_SK))


def codec_at_home(route: Route, *, gradient: bool = False) -> Codec | None:
    """The codec of what `homeward` brings over the first exchange; None: it is decoded."""
    hop = route.hops[0]
    return None if hop.copies or hop.split else _codec_home(hop, gradient)


def _codec_home(hop: Hop, gradient: bool) -> Codec | None:
    return build_plain_codec(hop.codecs.dispatch_backward if gradient else hop.codecs.combine)


def ship(
    x_IM: jax.Array,
    hop: Hop,
    layout: Layout,
    *,
    gradient: bool = False,
    filled: jax.Array | None = None,
) -> jax.Array:
    """One hop outward: array [I, M, ...] of bucket rows, peer by peer, to what arrives.

    Its results are not tagged for remat: the pipeline tags them where its steps end.
    Wire per device: all_to_all (P - 1) / P of x's bytes (a share of them with `split`, several
    times with `copies`), gather (n - 1) times x's bytes, sum nothing (a gradient: an all-reduce).
    """
    if hop.kind == "gather":
        return wire.all_gather(x_IM, hop.axes, dim=1, tag=None)
    if hop.kind == "sum":
        return wire.all_reduce(x_IM, hop.axes, tag=None) if gradient else x_IM
    x_PIJ = _for_peers(_by_peer(x_IM, hop.peers(layout)), hop, layout)
    return _by_part(_exchange(x_PIJ, hop, filled))


def bring(
    y_IM: jax.Array,
    hop: Hop,
    layout: Layout,
    *,
    gradient: bool = False,
    filled: jax.Array | None = None,
    codec: Codec | None = None,
) -> Payload:
    """One hop homeward, the mirror of `ship`: what was copied or gathered comes back summed.

    What arrives is as a codec left it, but where copies are summed or shares are joined.
    """
    if hop.kind == "gather":
        return wire.reduce_scatter(y_IM, hop.axes, dim=1, tag=None)
    if hop.kind == "sum":
        return y_IM if gradient else wire.all_reduce(y_IM, hop.axes, tag=None)
    payload = encode(codec, _by_peer(y_IM, layout.size(hop.axes)))
    payload = _swap(payload, hop, filled, codec)
    if not (hop.copies or hop.split):
        return jax.tree.map(_by_part, payload)
    y_PIJ = decode(codec, payload, y_IM.shape[-1], y_IM.dtype)
    if hop.copies:
        by_copy = y_PIJ.reshape(-1, layout.size(hop.copies), *y_PIJ.shape[1:])
        y_PIJ = jnp.sum(by_copy.astype(jnp.float32), axis=1).astype(y_PIJ.dtype)
    if hop.split and gradient:
        y_PIJ = _only_share(y_PIJ, hop.split, dim=2)
    elif hop.split:
        y_PIJ = wire.all_gather(y_PIJ, hop.split, dim=2, tag=None)
    return _by_part(y_PIJ)


def _filled(piece: Journey, number: int) -> jax.Array | None:
    """Rows of a bucket that travel over a hop; None: all."""
    if piece.filled is None or number >= len(piece.places):
        return None
    return piece.filled[number]


def _swap(payload: Payload, hop: Hop, filled: jax.Array | None, codec: Codec | None) -> Payload:
    """The all-to-all, of rows [P, I, J] as a codec left them: all of a row as one, in bytes."""
    if codec is None:
        return _exchange(payload, hop, filled)
    return unpack(_exchange(pack(payload, 3), hop, filled), payload)


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


def _for_peers(x_PIJ: jax.Array, hop: Hop, layout: Layout) -> jax.Array:
    """Buckets as they travel: a share of those that others hold too; a copy for each device."""
    if hop.split:
        return _own_share(x_PIJ, hop.split, dim=2)
    return jnp.repeat(x_PIJ, layout.size(hop.copies), axis=0) if hop.copies else x_PIJ


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
