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
    position_S: Int[Array, " S"],
    *,
    window: int | None,
    scale: float,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H"]]:
    """Returns each query's mean of the values, weighted by the softmax of its scores, and its log.

    The softmax is as in `kernels.attention.blocked`, in float32. The cache is read once for all
    heads. The log is that of the denominators.

    Args:
      position_B: position of each row's query. It sees the keys that are not later and not `window`
        or more back; the cache's entries at later positions are ignored.
      position_S: positions of the cache's entries.
    """
    B, H, C = q_BHC.shape
    G = k_BSGC.shape[2]
    q_BGRC = (q_BHC * scale).reshape(B, G, H // G, C)
    score_BGRS = jnp.einsum("bgrc,bsgc->bgrs", q_BGRC, k_BSGC, preferred_element_type=jnp.float32)
    back_BS = position_B[:, None] - position_S
    seen_BS = back_BS >= 0 if window is None else (back_BS >= 0) & (back_BS < window)
    score_BGRS = jnp.where(seen_BS[:, None, None], score_BGRS, MASKED)
    top_BGR1 = jnp.max(score_BGRS, axis=-1, keepdims=True)
    p_BGRS = jnp.exp(score_BGRS - top_BGR1)
    total_BGR1 = jnp.sum(p_BGRS, axis=-1, keepdims=True)
    y_BGRV = jnp.einsum(
        "bgrs,bsgv->bgrv", p_BGRS.astype(v_BSGV.dtype), v_BSGV, preferred_element_type=jnp.float32
    )
    log_BGR1 = top_BGR1 + jnp.log(total_BGR1)
    return (y_BGRV / total_BGR1).reshape(B, H, -1), log_BGR1.reshape(B, H)


def put(kept_BS: jax.Array, new_B: jax.Array, place_B: Int[Array, " B"]) -> jax.Array:
    """Returns a cache [B, S, ...] with each row's new entry [B, ...] in its place, if there is."""
    return kept_BS.at[jnp.arange(new_B.shape[0]), place_B].set(new_B, mode="drop")
