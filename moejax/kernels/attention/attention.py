"""Softmax attention of a model's layers: causal, inside a document, grouped queries.

Per device. Legend as in `kernels.attention.ranged`; S positions of the sequence.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.annotations import Array, Bool, Float, Int
from moejax.kernels.attention.ranged import (
    IMPLEMENTATIONS,
    Extent,
    Keys,
    ranged_attention,
    ranges,
)
from moejax.kernels.kept import ATTENDED

# The primitive of cuDNN's forward pass, whose results have no name of their own; by its name in JAX
# 0.10 to 0.12. Under another name remat policies run the forward pass twice, as for other values.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"


def attention(
    q_BTHC: Float[Array, "B T H C"],
    k_BSGC: Float[Array, "B S G C"],
    v_BSGV: Float[Array, "B S G V"],
    segment_BS: Int[Array, "B S"],
    *,
    window: int | None,
    implementation: str,
    scale: float | None = None,
    sinks_H: Float[Array, " H"] | None = None,
    inside: float = 1.0,
) -> Float[Array, "B T H V"]:
    """Returns each query's mean of the values, weighted by the softmax of its scores.

    Queries are of the last T of S positions. Head h reads keys and values h // (H / G).
    FLOPs: 2 * B * H * (C + V) * (pairs of positions visited); for cuDNN, C and V are the wider of
    both.

    Args:
      segment_BS: document of each position. A query sees the keys of its own document that are not
        later and not `window` or more back.
      implementation: one of `ranged.IMPLEMENTATIONS`; "cudnn", which takes all of a sequence for
        one document, and the queries of all positions; "cudnn_masked", for which a mask
        [B, 1, T, S] is made; or "reference" (the whole batch at once, scores kept).
        `kernels.select` chooses.
      scale: factor of the scores; None for 1 / sqrt(C).
      sinks_H: logits that take part in the softmax of each of a head's queries and have no value,
        so that the weights of keys sum to less than one; None for none. cuDNN takes none.
      inside: share of the pairs that lie inside a document, for the price of kernels that skip.
    """
    scale = 1 / math.sqrt(q_BTHC.shape[-1]) if scale is None else scale
    T, S = q_BTHC.shape[1], segment_BS.shape[1]
    if implementation in IMPLEMENTATIONS:
        pieces = (_piece(k_BSGC, v_BSGV, segment_BS, S - T + jnp.arange(T), window),)
        extents = (Extent((S - T,), window, window, inside=inside),)
        options = {"scale": scale, "sinks_H": sinks_H, "implementation": implementation}
        return ranged_attention(q_BTHC, pieces, extents, **options)
    form = _library_form(implementation, segment_BS, window, T) | {"scale": scale}
    return _by_library(implementation, form, q_BTHC, k_BSGC, v_BSGV, sinks_H)


def sliced_attention(
    q_BTHC: Float[Array, "B T H C"],
    k_BTGC: Float[Array, "B T G C"],
    v_BTGV: Float[Array, "B T G V"],
    past: tuple[Float[Array, "B S G C"], Float[Array, "B S G V"]],
    segment_BS: Int[Array, "B S"],
    number: Int[Array, ""],
    *,
    window: int | None,
    implementation: str,
    scale: float,
    sinks_H: Float[Array, " H"] | None = None,
    numbers: range | None = None,
) -> Float[Array, "B T H V"]:
    """Returns the attention of slice `number` of a sequence to itself and to the slices before it.

    Source of the idea: TeraPipe (Li et al. 2021).

    Args:
      past: keys and values of earlier slices, at their positions; all others count for nothing, and
        have gradients of zero. Backward takes them from here, so that they are stored once.
      implementation: as of `attention`, if it takes a part of the queries.
      numbers: possible values of `number`; None: all.
    """
    T, S = q_BTHC.shape[1], segment_BS.shape[1]
    numbers, start = numbers or range(S // T), number * T
    options = {"scale": scale, "sinks_H": sinks_H, "implementation": implementation}
    if implementation not in IMPLEMENTATIONS:
        own, attend = (k_BTGC, v_BTGV), partial(attention, window=window, **options)
        return _joined(attend, q_BTHC, own, past, segment_BS, number, numbers)
    before = _piece(*past, segment_BS, start + jnp.arange(T), window)
    own = Keys(k_BTGC, v_BTGV, jnp.maximum(before.first_BT - start, 0), before.last_BT - start)
    pieces = before._replace(last_BT=jnp.minimum(before.last_BT, start - 1)), own
    starts = tuple(place * T for place in numbers)
    extents = Extent(starts, window, window, before=True), Extent((0,), window, window)
    return ranged_attention(q_BTHC, pieces, extents, **options)


def _piece(k_BSGC, v_BSGV, segment_BS, position_T, window: int | None) -> Keys:
    return Keys(k_BSGC, v_BSGV, *ranges(segment_BS, position_T, window))


def _joined(
    attend: Any,
    q_BTHC: jax.Array,
    own: tuple[jax.Array, ...],
    past: tuple[jax.Array, ...],
    segment_BS: jax.Array,
    number: jax.Array,
    numbers: range,
) -> jax.Array:
    """Attends to keys that are joined here and, so that they are not stored twice, in backward.

    Each slice has a branch, over the keys up to its own. The middle one's comes first: the planner
    prices it.
    """
    T, count = q_BTHC.shape[1], len(numbers)
    order = [numbers[(n + count // 2) % count] for n in range(count)]

    def branch(end, q_BTHC, keys):
        return attend(q_BTHC, *(x[:, :end] for x in keys), segment_BS[:, :end])

    def join(q_BTHC, own, past):
        update = partial(lax.dynamic_update_slice_in_dim, start_index=number * T, axis=1)
        keys = tuple(update(x, y) for x, y in zip(past, own, strict=True))
        branches = [partial(branch, (place + 1) * T) for place in order]
        return lax.switch((number - numbers[0] - count // 2) % count, branches, q_BTHC, keys)

    return jax.checkpoint(join, policy=keep_attended)(q_BTHC, own, past)


def _require_whole(implementation: str, queries: int, length: int) -> None:
    """Refuses a part of the positions, where a kernel counts queries from the first."""
    if queries != length:
        raise ValueError(
            f"{implementation} takes queries of all positions, these are {queries} of {length}"
        )


def _library_form(
    implementation: str,
    segment_BS: Int[Array, "B S"],
    window: int | None,
    queries: int,
) -> dict[str, Any]:
    """Returns the arguments of `jax.nn.dot_product_attention` for the keys a query sees."""
    whole = queries == segment_BS.shape[1]
    if implementation == "cudnn":
        _require_whole(implementation, queries, segment_BS.shape[1])
        window_size = None if window is None else (window - 1, 0)
        return {"is_causal": True, "local_window_size": window_size}
    if implementation not in ("cudnn_masked", "reference"):
        raise ValueError(f"no implementation {implementation}")
    mask_BTS = attention_mask(segment_BS, window, queries)
    # Causal besides, so that the kernel skips later keys; it takes no window here. The library
    # counts queries from the first key, so not if queries are only at the last positions.
    return {"mask": mask_BTS[:, None], "is_causal": whole}


def _by_library(
    implementation: str,
    form: dict[str, Any],
    q_BTHC: jax.Array,
    k_BSGC: jax.Array,
    v_BSGV: jax.Array,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Attends by `jax.nn.dot_product_attention`, with the arguments of `_library_form`."""
    V, widest = v_BSGV.shape[-1], max(q_BTHC.shape[-1], v_BSGV.shape[-1])
    # The library takes heads of one width: channels of zeros change no score and are cut off again.
    q_BTHC, k_BSGC, v_BSGV = (_widened(x, widest) for x in (q_BTHC, k_BSGC, v_BSGV))
    if implementation == "reference":
        y_BTHV = _reference(q_BTHC, k_BSGC, v_BSGV, sinks_H, form)
    else:
        if sinks_H is not None:
            raise ValueError(f"{implementation} takes no sinks")
        y_BTHV = jax.nn.dot_product_attention(
            q_BTHC, k_BSGC, v_BSGV, implementation="cudnn", **form
        )
    return y_BTHV[..., :V] if widest > V else y_BTHV


def _widened(x_BTHC: jax.Array, width: int) -> jax.Array:
    """Appends channels of zeros."""
    missing = width - x_BTHC.shape[-1]
    return jnp.pad(x_BTHC, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x_BTHC


def _reference(
    q_BTHC: jax.Array,
    k_BSGC: jax.Array,
    v_BSGC: jax.Array,
    sinks_H: jax.Array | None,
    form: dict[str, Any],
) -> jax.Array:
    """The library's plain form; a sink is one more key of zeros, whose score is a bias."""
    if sinks_H is not None:
        last = ((0, 0), (0, 1), (0, 0), (0, 0))
        k_BSGC, v_BSGC = jnp.pad(k_BSGC, last), jnp.pad(v_BSGC, last)
        mask_B1TS = jnp.pad(form["mask"], ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=True)
        shape = (1, sinks_H.shape[0], q_BTHC.shape[1], mask_B1TS.shape[-1])
        bias_1HTS = jnp.zeros(shape).at[..., -1].set(sinks_H[:, None])
        form = form | {"mask": mask_B1TS, "bias": bias_1HTS, "is_causal": False}
    return jax.nn.dot_product_attention(q_BTHC, k_BSGC, v_BSGC, implementation="xla", **form)


def attention_mask(
    segment_BS: Int[Array, "B S"], window: int | None, queries: int
) -> Bool[Array, "B T S"]:
    """Returns whether each of the last T queries may see key s."""
    position_T = jnp.arange(segment_BS.shape[1] - queries, segment_BS.shape[1])
    first_BT, last_BT = ranges(segment_BS, position_T, window)
    place_S = jnp.arange(segment_BS.shape[1])
    return (place_S >= first_BT[..., None]) & (place_S <= last_BT[..., None])


def keep_attended(primitive: Any, *where: Any, **params: Any) -> bool:
    """The remat policy that keeps results of attention."""
    named = jax.checkpoint_policies.save_only_these_names(ATTENDED)
    return primitive.name == CUDNN_FORWARD or named(primitive, *where, **params)
