"""Attention of sequences that several devices share (`comm.context`).

Per device, inside shard_map. Letters as in `comm.context`; here S counts the keys that queries of
this device may see.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Float, Int
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


def put_own(
    cache: tuple[jax.Array, ...], new: tuple[jax.Array, ...], position_B: jax.Array, layout: Layout
) -> tuple[jax.Array, ...]:
    """Returns a cache [B', S, ...] with new entries of the B' rows of all devices that share them.

    Wire: the new entries.

    Args:
      new: entries of this device's rows, [B, ...].
      position_B: their positions; the device that has a position keeps the entry.
    """
    place_B = context.place_of(context.gather_rows(position_B, layout), layout)
    both = zip(cache, new, strict=True)
    return tuple(put(kept, context.gather_rows(own, layout), place_B) for kept, own in both)


def attend_cached(
    q_BHC: Float[Array, "B H C"],
    k_BSGC: Float[Array, "_ S G C"],
    v_BSGV: Float[Array, "_ S G V"],
    position_B: Int[Array, " B"],
    layout: Layout,
    *,
    sinks_H: Float[Array, " H"] | None = None,
    **form: Any,
) -> Float[Array, "B H V"]:
    """Attends from one token of each of this device's rows to a cache.

    Where devices share sequences, each has a part of the cache of all their rows. Wire: queries of
    these rows, and their results in float32.

    Args:
      form: window and scale.
    """
    q_BHC, all_B = (context.gather_rows(x, layout) for x in (q_BHC, position_B))
    position_S = context.positions(k_BSGC.shape[1] * layout.size(layout.context), layout)
    y_BHV, log_BH = cached_attention(q_BHC, k_BSGC, v_BSGV, all_B, position_S, **form)
    if layout.context:
        with jax.named_scope(context.CONTEXT):
            top_BH = wire.all_max(log_BH, layout.context)
            weight_BH = jnp.exp(log_BH - top_BH)
            total_BH = wire.all_reduce(weight_BH, layout.context, tag=None)
            y_BHV *= (weight_BH / total_BH)[..., None]
            y_BHV = wire.reduce_scatter(y_BHV, layout.context, dim=0, tag=None)
        log_BH = context.own_rows(top_BH + jnp.log(total_BH), layout)
    return join_sinks(PartialAttention(y_BHV, log_BH), sinks_H)[0].astype(v_BSGV.dtype)
