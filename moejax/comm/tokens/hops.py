"""Moves rows one hop along a route: `dispatch_hop` to the experts, `combine_hop` back.

Per device, inside shard_map, for any number of parts at a time. The two mirror each other, also in
backward: gradients of results are dispatched, gradients of rows are combined. On the source device
`dispatch_hop` gathers tokens straight into send buckets and encodes them in the same pass
(`comm.tokens.rows`); `combine_at_source` decodes the results that came back and sums them by token.

Letters: those of `comm.tokens`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax

from moejax.annotations import Array, Float
from moejax.comm.codecs.codec import Codec, Payload, build_plain_codec
from moejax.comm.tokens.plan import DispatchPlan
from moejax.comm.tokens.rows import decode, encode_rows, sum_encoded
from moejax.comm.tokens.swap import by_part, by_peer, send, send_back, swap_encoded
from moejax.kernels.permute import dots_of_choices, rows_at, sum_rows, weight_at
from moejax.layout.layout import Layout
from moejax.layout.route import Hop, Route


class Rows(NamedTuple):
    """Rows and their weights: arrays [I, M, ...] of some parts; at the source [N, ...] of tokens.

    Attributes:
      x: tokens, results, or gradients of either. After the return over hop 0, `x` is still encoded;
        `combine_at_source` decodes it.
      weight: the router's weights or their gradients, never encoded; None if they do not travel.
    """

    x: Payload
    weight: Any


def dispatch_hop(
    rows: Rows,
    hop_index: int,
    plan: DispatchPlan,
    route: Route,
    layout: Layout,
    *,
    gradient: bool = False,
) -> Rows:
    """Moves rows of some parts one hop towards the experts.

    Args:
      rows: before the first exchange, all tokens of this device, whose copies fill the buckets.
      plan: its slot maps are cut to these parts.
      gradient: for backward: rows are gradients of results; before the first exchange they come
        with the router's weights.
    """
    hop, filled = route.hops[hop_index], _filled(plan, hop_index)
    with jax.named_scope("combine_backward" if gradient else "dispatch"):
        if hop.kind == "all_to_all" and hop_index == 0:
            return _leave_source(rows, plan, route, layout, gradient=gradient)
        if hop.kind == "all_to_all":
            slot_IMK, item_IQ = plan.slot_maps[hop_index]
            row_IQ = item_IQ // slot_IMK.shape[-1]
            rows = jax.tree.map(lambda x_IMD: jax.vmap(rows_at)(x_IMD, row_IQ), rows)
        move = partial(send, hop=hop, layout=layout, gradient=gradient, filled=filled)
        return jax.tree.map(move, rows)


def _leave_source(
    tokens: Rows, plan: DispatchPlan, route: Route, layout: Layout, *, gradient: bool
) -> Rows:
    """Fills send buckets with encoded tokens, exchanges them over hop 0, decodes what arrives."""
    hop, (slot_NK, item_IQ), filled = route.hops[0], plan.slot_maps[0], _filled(plan, 0)
    (x_ND, weight_NK), K = tokens, slot_NK.shape[1]
    codec = build_plain_codec(hop.codecs.combine_backward if gradient else hop.codecs.dispatch)
    item_PIJ = by_peer(item_IQ, hop.peers(layout))
    weighted = gradient and not route.merges
    weight_PIJ = weight_at(weight_NK, item_PIJ) if weighted else None
    payload = encode_rows(codec, x_ND, item_PIJ // K, weight_PIJ)
    arrived = decode(codec, swap_encoded(payload, hop, filled, codec), x_ND.shape[1], x_ND.dtype)
    weight_IMK = None
    if route.merges and not gradient:
        weight_IMK = send(rows_at(weight_NK, item_IQ // K), hop, layout, filled=filled)
    return Rows(by_part(arrived), weight_IMK)


def combine_hop(
    results: Rows,
    hop_index: int,
    plan: DispatchPlan,
    route: Route,
    layout: Layout,
    *,
    gradient: bool = False,
) -> Rows:
    """Moves results back over one hop, see `Rows`; arguments as in `dispatch_hop`."""
    hop, filled = route.hops[hop_index], _filled(plan, hop_index)
    with jax.named_scope("dispatch_backward" if gradient else "combine"):
        move = partial(send_back, hop=hop, layout=layout, gradient=gradient, filled=filled)
        if hop.kind == "all_to_all" and hop_index == 0:
            x = move(results.x, codec=_codec_back(hop, gradient))
            return Rows(x, jax.tree.map(move, results.weight))
        results = jax.tree.map(move, results)
        if hop.kind == "all_to_all":
            slot_IMK = plan.slot_maps[hop_index].slot_MK
            results = jax.tree.map(lambda y_IQD: jax.vmap(sum_rows)(y_IQD, slot_IMK), results)
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
    """Decodes the results of each token and adds them up, on the token's own device.

    Args:
      arrived: result of `combine_hop` for hop 0, with all parts.
      weight_NK: weights of the sum; None if rows were weighted at the experts, or are gradients.
      like: an array of the result's shape and dtype.
    """
    slot_map, D = plan.source, like.shape[1]
    with jax.named_scope("dispatch_backward" if gradient else "combine"):
        x_S, weight_SK = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrived)
        codec = _codec_back(route.hops[0], gradient)
        x_ND = sum_encoded(codec, x_S, weight_NK, slot_map, D, like.dtype)
        return Rows(x_ND, jax.tree.map(lambda w_SK: sum_rows(w_SK, slot_map.slot_MK), weight_SK))


def return_dots(
    dots_IM1: Float[Array, "I M 1"], plan: DispatchPlan, route: Route, layout: Layout
) -> Float[Array, "N K"]:
    """Sends one number per row, all parts at once, back over the hops of a route without merges.

    Returns the number of each choice; zero for a dropped one. Wire: 4 bytes a row, exact.
    """
    with jax.named_scope("combine_backward"):
        for hop_index in reversed(range(len(route.hops))):
            hop, filled = route.hops[hop_index], _filled(plan, hop_index)
            dots_IM1 = send_back(dots_IM1, hop, layout, gradient=True, filled=filled)
            if hop.kind == "all_to_all" and hop_index:
                slot_IMK = plan.slot_maps[hop_index].slot_MK
                dots_IM1 = jax.vmap(sum_rows)(dots_IM1, slot_IMK)
        return dots_of_choices(dots_IM1.reshape(-1), plan.source.slot_MK)


def _codec_back(hop: Hop, gradient: bool) -> Codec | None:
    """The codec of combine, or in backward of the gradients of dispatched rows."""
    return build_plain_codec(hop.codecs.dispatch_backward if gradient else hop.codecs.combine)


def _filled(plan: DispatchPlan, hop_index: int) -> jax.Array | None:
    """Rows of a bucket that travel over a hop; None for all."""
    if plan.filled is None or hop_index >= len(plan.slot_maps):
        return None
    return plan.filled[hop_index]
