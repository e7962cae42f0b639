"""Attention from one query a row to the keys and values that a cache keeps.

Per device. Legend: B rows (sequences), S positions of the cache, H heads, G heads of keys,
R = H / G, C width of a head's queries and keys, V of its values.
"""

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Float, Int
from moejax.kernels.attention.blocked import MASKED


def cached_attention(
    q_BHC: Float[Array, "B H C"],
    k_BSGC: Float[Array, "B S G C"],
    v_BSGV: Float[Array, "B S G V"],
    position_B: Int[Array, " B"],
    *,
    window: int | None,
    scale: float,
    sinks_H: Float[Array, " H"] | None = None,
) -> Float[Array, "B H V"]:
    """Returns each query's mean of the values, weighted by the softmax of its scores.

    The softmax is as in `kernels.attention.blocked`, in float32. The cache is read once for all
    heads.

    Args:
      position_B: position of each row's query. It sees the keys that are not later and not `window`
        or more back; the cache's entries at later positions are ignored.
    """
    B, H, C = q_BHC.shape
    S, G = k_BSGC.shape[1:3]
    q_BGRC = (q_BHC * scale).reshape(B, G, H // G, C)
    score_BGRS = jnp.einsum("bgrc,bsgc->bgrs", q_BGRC, k_BSGC, preferred_element_type=jnp.float32)
    back_BS = position_B[:, None] - jnp.arange(S)
    seen_BS = back_BS >= 0 if window is None else (back_BS >= 0) & (back_BS < window)
    score_BGRS = jnp.where(seen_BS[:, None, None], score_BGRS, MASKED)
    top_BGR1 = jnp.max(score_BGRS, axis=-1, keepdims=True)
    sink_1GR1 = None if sinks_H is None else sinks_H.reshape(1, G, H // G, 1)
    top_BGR1 = top_BGR1 if sink_1GR1 is None else jnp.maximum(top_BGR1, sink_1GR1)
    p_BGRS = jnp.exp(score_BGRS - top_BGR1)
    total_BGR1 = jnp.sum(p_BGRS, axis=-1, keepdims=True)
    if sink_1GR1 is not None:
        total_BGR1 += jnp.exp(sink_1GR1 - top_BGR1)
    y_BGRV = jnp.einsum(
        "bgrs,bsgv->bgrv", p_BGRS.astype(v_BSGV.dtype), v_BSGV, preferred_element_type=jnp.float32
    )
    return (y_BGRV / total_BGR1).astype(v_BSGV.dtype).reshape(B, H, -1)


def put(kept_BS: jax.Array, new_B: jax.Array, position_B: Int[Array, " B"]) -> jax.Array:
    """Returns a cache [B, S, ...] with each row's new entry [B, ...] at its position."""
    return kept_BS.at[jnp.arange(new_B.shape[0]), position_B].set(new_B)
