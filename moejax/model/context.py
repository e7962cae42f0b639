"""Attention of sequences that several devices share (`comm.context`).

Per device, inside shard_map. Letters as in `comm.context`; here S counts the keys that queries of
this device may see.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Bool, Float, Int
from moejax.comm import context, wire
from moejax.comm.context import Reach
from moejax.kernels.attention.attention import attention
from moejax.kernels.attention.cached_attention import cached_attention, put
from moejax.kernels.attention.ranged import (
    Extent,
    Keys,
    PartialAttention,
    join_sinks,
    ranged_attention,
    ranges,
)
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec
from moejax.model import ring


def see(sources: Any, reach: Reach, spec: StepSpec, *, over_tensor: bool = False) -> Any:
    """Returns keys and values, or their sources, of all positions that queries may see.

    Args:
      sources: arrays [B, T, ...] of this device's positions.
      over_tensor: as of `context.exchange`.
    """
    move = partial(
        context.exchange,
        reach=reach,
        layout=spec.layout,
        gradient_dtype=spec.gradient_dtype,
        over_tensor=over_tensor,
    )
    return jax.tree.map(move, sources)


def attend_seen(
    q_BTHC: Float[Array, "B T H C"],
    k_BSGC: Float[Array, "B S G C"],
    v_BSGV: Float[Array, "B S G V"],
    *,
    segment: Int[Array, "B _"],
    window: int | None,
    spec: StepSpec,
    **form: Any,
) -> Float[Array, "B T H V"]:
    """Returns the result of `attention` for the queries of this device's positions.

    Args:
      k_BSGC, v_BSGV: results of `see`, by `reach_of(window)`.
      segment: document of each position of the sequences.
      form: scale and sinks.
    """
    layout, length = spec.layout, segment.shape[1]
    reach = context.reach_of(window, layout)
    seen = ranges(segment, context.positions(length, layout), window)
    piece = Keys(k_BSGC, v_BSGV, *reach.places(*seen, length, layout))
    starts, inside = reach.starts(length, layout), spec.documents
    extent = Extent(starts, window, window, run=layout.stripe, inside=inside)
    return ranged_attention(q_BTHC, (piece,), (extent,), implementation=spec.attention, **form)


def attend(
    q_BTHC: Float[Array, "B T H C"],
    k_BTGC: Float[Array, "B T G C"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    segment: Int[Array, "B _"],
    window: int | None,
    spec: StepSpec,
    **form: Any,
) -> Float[Array, "B T H V"]:
    """Attends to keys of this device's positions, and to those of others if there are any.

    Args:
      form: scale and sinks.
    """
    if not spec.layout.context:
        own = {"window": window, "implementation": spec.attention, "inside": spec.documents}
        return attention(q_BTHC, k_BTGC, v_BTGV, segment, **own, **form)
    reach, form = context.reach_of(window, spec.layout), form | {"segment": segment}
    if reach.before is None and spec.context_exchange == "ring":
        return ring.attend(q_BTHC, k_BTGC, v_BTGV, window=window, spec=spec, **form)
    seen = see((k_BTGC, v_BTGV), reach, spec)
    return attend_seen(q_BTHC, *seen, window=window, spec=spec, **form)


class Rows(NamedTuple):
    """Rows of new tokens, whose texts are in slots of a cache: R rows, T tokens of each.

    Attributes:
      slot_R: slot of each row, among those of this device.
      start_R: position of its first token.
      count_R: its tokens; what stands behind them is padding.
      length: T.
      every: whether row r has slot r, for every slot.
    """

    slot_R: Int[Array, " R"]
    start_R: Int[Array, " R"]
    count_R: Int[Array, " R"]
    length: int
    every: bool

    @property
    def position_RT(self) -> Int[Array, "R T"]:
        """Positions of the tokens."""
        return self.start_R[:, None] + jnp.arange(self.length)

    @property
    def is_token_RT(self) -> Bool[Array, "R T"]:
        """Whether there is a token."""
        return jnp.arange(self.length) < self.count_R[:, None]

    def joined(self, slots: int, layout: Layout) -> "Rows":
        """Returns the rows of all devices that share sequences, which have `slots` together."""
        if not layout.context:
            return self
        before = wire.index(layout.context) * (slots // layout.size(layout.context))
        slot_R, start_R, count_R = (
            context.gather_rows(x, layout)
            for x in (self.slot_R + before, self.start_R, self.count_R)
        )
        return Rows(slot_R, start_R, count_R, self.length, self.every)


def put_own(
    cache: tuple[jax.Array, ...], new: tuple[jax.Array, ...], rows: Rows, layout: Layout
) -> tuple[jax.Array, ...]:
    """Returns a cache [N, G, S, ...] with the entries of new tokens.

    An entry is kept at the place of its position, counted around S. Where devices share sequences,
    the device that has the position keeps it. Wire: the new entries.

    Args:
      new: entries of the tokens of this device's rows, [R, T, G, ...].
    """
    slots, _, S, _ = cache[0].shape
    rows = rows.joined(slots, layout)
    position_RT = rows.position_RT
    place_RT = context.place_of(position_RT, layout) if layout.context else position_RT % S
    place_RT = jnp.where(rows.is_token_RT, place_RT, S)
    return tuple(
        put(kept, context.gather_rows(own, layout), rows.slot_R, place_RT)
        for kept, own in zip(cache, new, strict=True)
    )


def attend_cached(
    q_RTHC: Float[Array, "R T H C"],
    k_NGSC: Float[Array, "N G S C"],
    v_NGSV: Float[Array, "N G S V"],
    rows: Rows,
    layout: Layout,
    *,
    sinks_H: Float[Array, " H"] | None = None,
    **form: Any,
) -> Float[Array, "R T H V"]:
    """Attends from the tokens of this device's rows to a cache that has their entries.

    Where devices share sequences, each has a part of the cache of all their rows. Wire: queries of
    these rows, and their results in float32.

    Args:
      form: window and scale.
    """
    slots, _, S, _ = k_NGSC.shape
    q_RTHC, rows = context.gather_rows(q_RTHC, layout), rows.joined(slots, layout)
    newest_R = rows.start_R + rows.count_R - 1
    if layout.context:
        position_RS = context.positions(S * layout.size(layout.context), layout)[None]
        places_R = context.keys_before(newest_R + 1, wire.index(layout.context), layout)
    else:
        newest_R1 = newest_R[:, None]
        position_RS = newest_R1 - (newest_R1 - jnp.arange(S)) % S
        places_R = jnp.minimum(newest_R + 1, S)
    k_RGSC, v_RGSV = (x if rows.every else x[rows.slot_R] for x in (k_NGSC, v_NGSV))
    keys = k_RGSC, v_RGSV, rows.position_RT, position_RS, jnp.max(places_R)
    y_RTHV, log_RTH = cached_attention(q_RTHC, *keys, **form)
    if layout.context:
        with jax.named_scope(context.CONTEXT):
            top_RTH = wire.all_max(log_RTH, layout.context)
            weight_RTH = jnp.exp(log_RTH - top_RTH)
            total_RTH = wire.all_reduce(weight_RTH, layout.context, tag=None)
            y_RTHV *= (weight_RTH / total_RTH)[..., None]
            y_RTHV = wire.reduce_scatter(y_RTHV, layout.context, dim=0, tag=None)
        log_RTH = context.own_rows(top_RTH + jnp.log(total_RTH), layout)
    return join_sinks(PartialAttention(y_RTHV, log_RTH), sinks_H)[0].astype(v_NGSV.dtype)
