"""Attention of sequences that several devices share (`comm.context`).

Per device, inside shard_map. Letters as in `comm.context`; here S counts the keys that queries of
this device may see.
"""

from functools import partial
from typing import Any

import jax

from moejax.annotations import Array, Float, Int
from moejax.comm import context
from moejax.comm.context import Reach
from moejax.kernels.attention.attention import attention
from moejax.kernels.attention.ranged import Extent, Keys, ranged_attention, ranges
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
    extent = Extent(reach.starts(length, layout), window, run=layout.stripe)
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
        own = {"window": window, "implementation": spec.attention}
        return attention(q_BTHC, k_BTGC, v_BTGV, segment, **own, **form)
    reach, form = context.reach_of(window, spec.layout), form | {"segment": segment}
    if reach.before is None and spec.context_exchange == "ring":
        return ring.attend(q_BTHC, k_BTGC, v_BTGV, window=window, spec=spec, **form)
    seen = see((k_BTGC, v_BTGV), reach, spec)
    return attend_seen(q_BTHC, *seen, window=window, spec=spec, **form)
