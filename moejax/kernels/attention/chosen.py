"""Attention to chosen keys: an indexer's scores choose them, for each query by itself.

Per device. Legend: B sequences, T queries, S keys, K keys chosen for a query, I heads of the
indexer, J channels of one, H heads, Z channels of the entry that all heads share as key, V of its
channels that are the value; Q queries of a block.

Blocks of queries come one after the other, and backward computes each again, so that no array has
both all queries and all keys. The entries that a query chose are gathered: no pair beside them is
computed. Source: DeepSeek-V3.2 (2025), section 2.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.annotations import Array, Float, Int
from moejax.kernels.attention.blocked import MASKED

QUERIES = 128  # most of a block


def choose(
    q_BTIJ: Float[Array, "B T I J"],
    weight_BTI: Float[Array, "B T I"],
    k_BSJ: Float[Array, "B S J"],
    first_BT: Int[Array, "B T"],
    last_BT: Int[Array, "B T"],
    count: int,
) -> Int[Array, "B T K"]:
    """Returns the places of the keys with the highest scores of the indexer, -1 where none is left.

    FLOPs: 2 * B * T * S * I * J. Not differentiable.

    Args:
      weight_BTI: weights of the indexer's heads, in float32.
      first_BT, last_BT: places of the first and of the last key that a query may choose.
      count: K.
    """

    def block(q_QIJ, weight_QI, first_Q, last_Q, k_SJ):
        place_S = jnp.arange(k_SJ.shape[0])
        seen_QS = (place_S >= first_Q[:, None]) & (place_S <= last_Q[:, None])
        score_QS = jnp.where(seen_QS, _dense_scores(q_QIJ, weight_QI, k_SJ), -jnp.inf)
        top_QK, place_QK = lax.top_k(score_QS, count)
        return jnp.where(top_QK > -jnp.inf, place_QK, -1)

    arrays = lax.stop_gradient((q_BTIJ, weight_BTI, first_BT, last_BT))
    return by_blocks(block, arrays, (lax.stop_gradient(k_BSJ),))


def index_scores(
    q_QIJ: Float[Array, "Q I J"],
    weight_QI: Float[Array, "Q I"],
    k_SJ: Float[Array, "S J"],
    place_QK: Int[Array, "Q K"],
) -> Float[Array, "Q K"]:
    """Returns the scores of the indexer for chosen keys, `MASKED` where there is none."""
    product_QIK = _dot("qij,qkj->qik", q_QIJ, k_SJ[place_QK].astype(q_QIJ.dtype))
    score_QK = jnp.einsum("qik,qi->qk", jax.nn.relu(product_QIK), weight_QI)
    return jnp.where(place_QK >= 0, score_QK, MASKED)


def attend_chosen(
    q_QHZ: Float[Array, "Q H Z"],
    entry_SZ: Float[Array, "S Z"],
    place_QK: Int[Array, "Q K"],
    *,
    values: int,
    scale: float,
) -> tuple[Float[Array, "Q H V"], Float[Array, "Q H K"]]:
    """Returns each query's mean of the values it chose, and their weights; both in float32.

    FLOPs: 2 * Q * H * K * (Z + V). Bytes: Q * K * Z entries are copied.

    Args:
      entry_SZ: entries, in whose dtype backward adds up the gradients of each.
      values: V: an entry's first channels are its value.
    """
    entry_QKZ = entry_SZ[place_QK].astype(q_QHZ.dtype)
    score_QHK = _dot("qhz,qkz->qhk", q_QHZ, entry_QKZ) * scale
    p_QHK = jax.nn.softmax(jnp.where(place_QK[:, None] >= 0, score_QHK, MASKED), axis=-1)
    return _dot("qhk,qkv->qhv", p_QHK.astype(q_QHZ.dtype), entry_QKZ[..., :values]), p_QHK


def by_blocks(function: Callable[..., Any], queries: Any, keys: tuple[jax.Array, ...]) -> Any:
    """Calls a function for blocks of the queries of each sequence, and joins its results.

    Args:
      function: takes arrays [Q, ...] and [S, ...] of one sequence; returns arrays [Q, ...].
        Queries that fill the last block are zeros.
      queries, keys: arrays [B, T, ...] and [B, S, ...].
    """
    T = queries[0].shape[1]
    Q = min(QUERIES, T)

    def cut(x_BT: jax.Array) -> jax.Array:
        widths = [(0, 0), (0, -T % Q), *[(0, 0)] * (x_BT.ndim - 2)]
        return jnp.pad(x_BT, widths).reshape(len(x_BT), -1, Q, *x_BT.shape[2:])

    def sequence(arrays: Any) -> Any:
        own, keys = arrays
        return lax.map(lambda block: jax.checkpoint(function)(*block, *keys), own)

    together = QUERIES // T if T < QUERIES else None  # sequences of few queries
    found = lax.map(sequence, (jax.tree.map(cut, queries), keys), batch_size=together)
    return jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[3:])[:, :T], found)


def _dense_scores(q_QIJ: jax.Array, weight_QI: jax.Array, k_SJ: jax.Array) -> jax.Array:
    """Returns the scores of the indexer for all keys [Q, S], head by head."""

    def add(score_QS: jax.Array, head: Any) -> tuple[jax.Array, None]:
        q_QJ, weight_Q = head
        product_QS = jax.nn.relu(_dot("qj,sj->qs", q_QJ, k_SJ))
        return score_QS + weight_Q[:, None] * product_QS, None

    zeros_QS = jnp.zeros((q_QIJ.shape[0], k_SJ.shape[0]), jnp.float32)
    return lax.scan(add, zeros_QS, (q_QIJ.swapaxes(0, 1), weight_QI.T))[0]


_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
