"""Attention from new tokens to the keys and values that a cache keeps.

Per device. Legend: R rows, T queries of each, S places of the cache, K places of a block, H heads,
G heads of keys, P = T * H / G, C width of a head's queries and keys, V of its values; N slots.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.annotations import Array, Float, Int
from moejax.kernels.attention.blocked import LOWEST, MASKED

KEYS = 512  # most places of a block


def cached_attention(
    q_RTHC: Float[Array, "R T H C"],
    k_RGSC: Float[Array, "R G S C"],
    v_RGSV: Float[Array, "R G S V"],
    position_RT: Int[Array, "R T"],
    position_RS: Int[Array, "_ S"],
    stop: Int[Array, ""],
    *,
    window: int | None,
    scale: float,
) -> tuple[Float[Array, "R T H V"], Float[Array, "R T H"]]:
    """Returns each query's mean of the values, weighted by the softmax of its scores, and its log.

    The softmax is as in `kernels.attention.blocked`, in float32. The log is that of the
    denominators. A query that sees no key gets zeros.

    Args:
      position_RT: positions of the queries. A query sees the keys that are not later and not
        `window` or more back.
      position_RS: positions of the cache's entries, below 0 for places without one.
      stop: no query sees an entry at this place or behind it; blocks from there on are not read.
    """
    R, T, H, _ = q_RTHC.shape
    G, S, V = v_RGSV.shape[1:]
    K = S if S <= KEYS else math.gcd(S, KEYS)
    # R T G (H / G) C -> R G P C
    q_RGPC = (q_RTHC * scale).reshape(R, T, G, H // G, -1).swapaxes(1, 2)
    q_RGPC = q_RGPC.reshape(R, G, T * (H // G), -1)

    def visit(m: jax.Array | int, sums: _Sums) -> _Sums:
        block = partial(lax.dynamic_slice_in_dim, start_index=m * K, slice_size=K)
        position_RK = block(position_RS, axis=1)
        seen_RTK = _seen(position_RT, position_RK, window)
        seen_R1PK = jnp.repeat(seen_RTK, H // G, axis=1)[:, None]
        return _add(sums, q_RGPC, block(k_RGSC, axis=2), block(v_RGSV, axis=2), seen_R1PK)

    zero_RGP1 = jnp.zeros((*q_RGPC.shape[:3], 1), jnp.float32)
    sums = _Sums(jnp.zeros((*q_RGPC.shape[:3], V), jnp.float32), zero_RGP1 + LOWEST, zero_RGP1)
    sums = visit(0, sums) if K == S else lax.fori_loop(0, -(-stop // K), visit, sums)
    y_RGPV, top_RGP1, total_RGP1 = sums
    log_RGP1 = jnp.where(total_RGP1 > 0, top_RGP1 + jnp.log(total_RGP1), MASKED)
    y_RGPV /= jnp.where(total_RGP1 > 0, total_RGP1, 1)

    def by_query(x_RGPV: jax.Array) -> jax.Array:
        return x_RGPV.reshape(R, G, T, H // G, -1).swapaxes(1, 2).reshape(R, T, H, -1)

    return by_query(y_RGPV), by_query(log_RGP1)[..., 0]


class _Sums(NamedTuple):
    """Sums over the blocks so far; weights are relative to the largest score."""

    y_RGPV: jax.Array
    top_RGP1: jax.Array
    total_RGP1: jax.Array


def _seen(position_RT: jax.Array, position_RK: jax.Array, window: int | None) -> jax.Array:
    """Returns which keys of a block each query sees, [R, T, K]."""
    back_RTK = position_RT[:, :, None] - position_RK[:, None]
    seen_RTK = (back_RTK >= 0) & (position_RK >= 0)[:, None]
    return seen_RTK if window is None else seen_RTK & (back_RTK < window)


def _add(
    sums: _Sums, q_RGPC: jax.Array, k_RGKC: jax.Array, v_RGKV: jax.Array, seen_R1PK: jax.Array
) -> _Sums:
    """Adds a block of keys and values."""
    score_RGPK = jnp.where(seen_R1PK, _dot("rgpc,rgkc->rgpk", q_RGPC, k_RGKC), MASKED)
    top_RGP1 = jnp.maximum(sums.top_RGP1, jnp.max(score_RGPK, axis=-1, keepdims=True))
    p_RGPK, less_RGP1 = jnp.exp(score_RGPK - top_RGP1), jnp.exp(sums.top_RGP1 - top_RGP1)
    total_RGP1 = sums.total_RGP1 * less_RGP1 + jnp.sum(p_RGPK, axis=-1, keepdims=True)
    more_RGPV = _dot("rgpk,rgkv->rgpv", p_RGPK.astype(v_RGKV.dtype), v_RGKV)
    return _Sums(sums.y_RGPV * less_RGP1 + more_RGPV, top_RGP1, total_RGP1)


def _dot(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(form, x, y, preferred_element_type=jnp.float32)


def put(
    kept_NGSC: Float[Array, "N G S C"],
    new_RTGC: Float[Array, "R T G C"],
    slot_R: Int[Array, " R"],
    place_RT: Int[Array, "R T"],
) -> Float[Array, "N G S C"]:
    """Returns a cache with new entries in the places of their slots, those that there are."""
    return kept_NGSC.at[slot_R[:, None], :, place_RT].set(new_RTGC, mode="drop")
