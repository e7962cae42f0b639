"""Carries rows along a route, and their results back, hop by hop.

Per device, inside shard_map. `dispatch_hop` and `combine_hop` move rows one hop and any number of
parts at a time. They are each other's mirror: gradients of results are dispatched, gradients of
rows are combined. On the source rank `dispatch_hop` gathers tokens straight into send buckets and
encodes them in the same pass (`comm.tokens.rows`); `combine_at_source` decodes and sums what came
back.
"""

from functools import partial
from typing import Any, NamedTuple

import jax

from moejax.annotations import Array, Float
from moejax.comm import wire
from moejax.comm.codecs.build import build_plain_codec
from moejax.comm.codecs.codec import Codec, Payload
from moejax.comm.tokens.plan import DispatchPlan
from moejax.comm.tokens.rows import decode, encode, encode_rows, sum_encoded
from moejax.comm.tokens.swap import by_part, by_peer, for_peers, send, send_back, swap_encoded
from moejax.kernels.permute import rows_at, sum_rows, weight_at
from moejax.layout.layout import Layout
from moejax.layout.route import Hop, Route


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


def dispatch_hop(
    rows: Rows,
    number: int,
    piece: DispatchPlan,
    route: Route,
    layout: Layout,
    *,
    gradient: bool = False,
) -> Rows:
    """Takes rows of some parts one hop towards the experts.

    Args:
      rows: before the first exchange all tokens of this device: its buckets hold copies of them.
      number: of the hop.
      piece: the plan, with places of these parts.
      gradient: rows are gradients of results on their way back; before the first exchange, with the
        weights of the results.
    """
    hop, filled = route.hops[number], _filled(piece, number)
    with jax.named_scope("combine_backward" if gradient else "dispatch"):
        if hop.kind == "all_to_all" and number == 0:
            return _leave_source(rows, piece, route, layout, gradient=gradient)
        if hop.kind == "all_to_all":
            slot_IMK, item_IS = piece.places[number]
            row_IS = item_IS // slot_IMK.shape[-1]
            rows = jax.tree.map(lambda x_IMD: jax.vmap(rows_at)(x_IMD, row_IS), rows)
        move = partial(send, hop=hop, layout=layout, gradient=gradient, filled=filled)
        return jax.tree.map(move, rows)


def _leave_source(
    tokens: Rows, piece: DispatchPlan, route: Route, layout: Layout, *, gradient: bool
) -> Rows:
    """The first exchange: encodes the copies of tokens that fill its buckets, decodes what came."""
    hop, (slot_NK, item_IS), filled = route.hops[0], piece.places[0], _filled(piece, 0)
    (x_ND, weight_NK), K = tokens, slot_NK.shape[1]
    codec = build_plain_codec(hop.codecs.combine_backward if gradient else hop.codecs.dispatch)

    def copies(codec: Codec | None, item_PIJ: jax.Array) -> Payload:
        weighted = gradient and not route.merges
        weight_PIJ = weight_at(weight_NK, item_PIJ) if weighted else None
        return encode_rows(codec, x_ND, item_PIJ // K, weight_PIJ)

    item_PIJ = by_peer(item_IS, hop.peers(layout))
    if gradient and hop.split:  # tensor ranks hold terms of the same gradients
        rows_PIJ = wire.reduce_scatter(copies(None, item_PIJ), hop.split, dim=2, tag=None)
        payload = encode(codec, rows_PIJ)
    else:
        payload = copies(codec, for_peers(item_PIJ, hop, layout))
    arrived = decode(codec, swap_encoded(payload, hop, filled, codec), x_ND.shape[1], x_ND.dtype)
    beside = None
    if route.merges and not gradient:
        beside = send(rows_at(weight_NK, item_IS // K), hop, layout, filled=filled)
    return Rows(by_part(arrived), beside)


def combine_hop(
    results: Rows,
    number: int,
    piece: DispatchPlan,
    route: Route,
    layout: Layout,
    *,
    gradient: bool = False,
) -> Rows:
    """Takes what became of `dispatch_hop`'s rows back one hop; arguments as there.

    Over the first exchange x arrives as its codec left it, for `combine_at_source`.
    """
    hop, filled = route.hops[number], _filled(piece, number)
    with jax.named_scope("dispatch_backward" if gradient else "combine"):
        move = partial(send_back, hop=hop, layout=layout, gradient=gradient, filled=filled)
        if hop.kind == "all_to_all" and number == 0:
            x = move(results.x, codec=_codec_back(hop, gradient))
            return Rows(x, jax.tree.map(move, results.weight))
        results = jax.tree.map(move, results)
        if hop.kind == "all_to_all":
            slot_IMK = piece.places[number].slot_MK
            results = jax.tree.map(lambda y_ISD: jax.vmap(sum_rows)(y_ISD, slot_IMK), results)
        return results


def combine_at_source(
    arrived: Rows,
    weight_NK: Float[Array, "N K"] | None,
    plan: DispatchPlan,
    route: Route,
    *,
    like: Float[Array, "N D"],
    gradient: bool = False,
) -> Rows:
    """The end at home: each token's rows decoded and added up, weighted unless weights are None.

    Args:
      arrived: what `combine_hop` brought over the first exchange, of all parts.
      like: what the sums are like.
    """
    home, D = plan.source, like.shape[1]
    with jax.named_scope("dispatch_backward" if gradient else "combine"):
        x_S, beside_SK = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrived)
        codec = codec_at_source(route, gradient=gradient)
        x_ND = sum_encoded(codec, x_S, weight_NK, home, D, like.dtype)
        return Rows(x_ND, jax.tree.map(lambda w_SK: sum_rows(w_SK, home.slot_MK), beside_SK))


def codec_at_source(route: Route, *, gradient: bool = False) -> Codec | None:
    """The codec of what `combine_hop` brings over the first exchange; None: it is decoded."""
    hop = route.hops[0]
    return None if hop.copies or hop.split else _codec_back(hop, gradient)


def _codec_back(hop: Hop, gradient: bool) -> Codec | None:
    return build_plain_codec(hop.codecs.dispatch_backward if gradient else hop.codecs.combine)


def _filled(piece: DispatchPlan, number: int) -> jax.Array | None:
    """Rows of a bucket that travel over a hop; None: all."""
    if piece.filled is None or number >= len(piece.places):
        return None
    return piece.filled[number]
