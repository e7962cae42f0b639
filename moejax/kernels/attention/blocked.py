"""Softmax attention in blocks of queries and keys, in plain JAX: it runs everywhere.

Per device. Legend as in `kernels.attention.ranged`; N blocks of Q queries, M blocks of K keys,
R = H / G heads that share keys, P = R * Q.

A loop over blocks of queries holds a loop over the blocks of keys that any of them sees, so that
the program, and what it holds at a time, does not grow with the sequence. The softmax is summed up
as blocks come (Milakov and Gimelshein 2018), backward computes the probabilities again from its
saved logarithm (FlashAttention: Dao et al. 2022). Scores are laid out keys first, so that the
softmax runs along whole vectors. `benchmarks/cpu/ops.py attention` times it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.costs import trips_of

MASKED = -1e30  # a score that softmax turns into zero; finite, so that no difference is NaN
LOWEST = MASKED / 2  # where maxima begin: above every masked score, below every other
QUERIES, KEYS = 256, 512  # most of a block


class BlockSizes(NamedTuple):
    """Sizes of blocks, and how many pairs of blocks of one sequence are visited, for the price."""

    queries: int
    keys: int
    visits: float


def blocks_of(queries: int, keys: int, extent: Any) -> BlockSizes:
    """Returns the blocks for some queries and keys; visits are a mean over `extent.starts`."""
    Q = min(queries, max(64, min(QUERIES, queries // 4)))
    K = min(keys, KEYS if keys >= 8 * Q else Q)
    return BlockSizes(Q, K, extent.visits(queries, keys, Q, K))


def forward(q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, *, scale: float, extent: Any):
    """Returns the mean of the values [B, T, H, V] and the log of the denominators, in float32."""
    T, H = q_BTHC.shape[1:3]
    G, V = v_BSGV.shape[2:]
    blocks = blocks_of(T, k_BSGC.shape[1], extent)
    N = -(-T // blocks.queries)

    def block(k_MGKC, v_MGVK, arrays):
        q_GPC, first_P, last_P = arrays

        def visit(m, sums):
            y_GVP, top_G1P, total_G1P = sums
            score_GKP = _scores(q_GPC, k_MGKC, m, first_P, last_P)
            higher_G1P = jnp.maximum(top_G1P, jnp.max(score_GKP, axis=1, keepdims=True))
            p_GKP, less_G1P = jnp.exp(score_GKP - higher_G1P), jnp.exp(top_G1P - higher_G1P)
            total_G1P = total_G1P * less_G1P + jnp.sum(p_GKP, axis=1, keepdims=True)
            v_GVK = _at(v_MGVK, m)
            y_GVP = y_GVP * less_G1P + _multiply(v_GVK, p_GKP.astype(v_GVK.dtype))
            return y_GVP, higher_G1P, total_G1P

        P = q_GPC.shape[1]
        zero_G1P = jnp.zeros((G, 1, P), jnp.float32)
        sums = jnp.zeros((G, V, P), jnp.float32), zero_G1P + LOWEST, zero_G1P
        y_GVP, top_G1P, total_G1P = _over_keys(visit, sums, first_P, last_P, blocks, N)
        log_G1P = jnp.where(total_G1P > 0, top_G1P + jnp.log(total_G1P), MASKED)
        return y_GVP / jnp.where(total_G1P > 0, total_G1P, 1), log_G1P

    def sequence(arrays):
        k_MGKC, v_MGVK, *of_queries = arrays
        return lax.map(partial(block, k_MGKC, v_MGVK), tuple(of_queries))

    keys = _key_blocks(k_BSGC, blocks.keys), _key_blocks(v_BSGV, blocks.keys).swapaxes(3, 4)
    ranges = _range_blocks(first_BT, last_BT, H // G, blocks.queries)
    y_BNGVP, log_BNG1P = lax.map(
        sequence, (*keys, _query_blocks(q_BTHC * scale, G, blocks.queries), *ranges)
    )
    y_BTHV = _by_query(y_BNGVP.swapaxes(3, 4), T, H)
    return y_BTHV, _by_query(log_BNG1P.swapaxes(3, 4), T, H)[..., 0]


def gradients(
    q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, y_BTHV, log_BTH, dy_BTHV, *, scale, extent: Any
):
    """Returns the gradients of q, k and v, in float32.

    Args:
      y_BTHV, log_BTH: results of all pieces together, sinks included.
    """
    B, T, H, C = q_BTHC.shape
    S, G = v_BSGV.shape[1:3]
    blocks = blocks_of(T, S, extent)
    N = -(-T // blocks.queries)
    # A query that sees nothing has no weights: here its logarithm is above every score.
    log_BTH = jnp.where(log_BTH > LOWEST, log_BTH, -MASKED)
    dot_BTH = jnp.sum(y_BTHV.astype(jnp.float32) * dy_BTHV, axis=-1)

    def block(k_MGKC, v_MGKV, of_keys, arrays):
        q_GPC, first_P, last_P, log_G1P, dot_G1P, dy_GPV = arrays

        def visit(m, sums):
            dq_GCP, dk_MGKC, dv_MGKV = sums
            p_GKP = jnp.exp(_scores(q_GPC, k_MGKC, m, first_P, last_P) - log_G1P)
            dp_GKP = _multiply_transposed(_at(v_MGKV, m), dy_GPV)
            dscore_GKP = (p_GKP * (dp_GKP - dot_G1P)).astype(q_GPC.dtype)
            dv_MGKV = _add_at(dv_MGKV, m, _multiply(p_GKP.astype(dy_GPV.dtype), dy_GPV))
            dk_MGKC = _add_at(dk_MGKC, m, _multiply(dscore_GKP, q_GPC))
            dq_GCP += _multiply(_at(k_MGKC, m).swapaxes(1, 2), dscore_GKP)
            return dq_GCP, dk_MGKC, dv_MGKV

        dq_GCP = jnp.zeros((G, C, q_GPC.shape[1]), jnp.float32)
        dq_GCP, *of_keys = _over_keys(visit, (dq_GCP, *of_keys), first_P, last_P, blocks, N)
        return tuple(of_keys), dq_GCP

    def sequence(arrays):
        k_MGKC, v_MGKV, *of_queries = arrays
        zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k_MGKC, v_MGKV))
        of_keys, dq_NGCP = lax.scan(partial(block, k_MGKC, v_MGKV), zeros, tuple(of_queries))
        return *of_keys, dq_NGCP

    by_query = partial(_query_blocks, groups=G, rows=blocks.queries)
    ranges = _range_blocks(first_BT, last_BT, H // G, blocks.queries)
    sums = (by_query(x[..., None]).swapaxes(3, 4) for x in (log_BTH, dot_BTH))
    keys = (_key_blocks(x, blocks.keys) for x in (k_BSGC, v_BSGV))
    dk_BMGKC, dv_BMGKV, dq_BNGCP = lax.map(
        sequence, (*keys, by_query(q_BTHC * scale), *ranges, *sums, by_query(dy_BTHV))
    )
    dk_BSGC, dv_BSGV = (
        x.swapaxes(2, 3).reshape(B, -1, G, x.shape[-1])[:, :S] for x in (dk_BMGKC, dv_BMGKV)
    )
    return _by_query(dq_BNGCP.swapaxes(3, 4), T, H) * scale, dk_BSGC, dv_BSGV


def _over_keys(visit, sums, first_P, last_P, blocks: BlockSizes, count: int):
    """Visits the blocks of keys that a block of queries sees, of `count` such blocks."""
    start, stop = jnp.min(first_P) // blocks.keys, jnp.max(last_P) // blocks.keys + 1
    with trips_of(blocks.visits / count):
        return lax.fori_loop(start, stop, visit, sums)


def _scores(q_GPC, k_MGKC, m, first_P, last_P):
    """Scores of a block of keys; `MASKED` where a query does not see a key."""
    k_GKC = _at(k_MGKC, m)
    place_K1 = m * k_GKC.shape[1] + jnp.arange(k_GKC.shape[1])[:, None]
    # Found once for all groups: inside a loop over scores it would take up to half of the time.
    seen_KP = lax.optimization_barrier((place_K1 >= first_P) & (place_K1 <= last_P))
    return jnp.where(seen_KP, _multiply_transposed(k_GKC, q_GPC), MASKED)


def _at(x_M: jax.Array, m: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x_M, m, keepdims=False)


def _add_at(x_M: jax.Array, m: jax.Array, more: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_M, _at(x_M, m) + more, m, axis=0)


def _query_blocks(x_BTHC: jax.Array, groups: int, rows: int) -> jax.Array:
    """[B, T, H, C] -> [B, N, G, P, C]."""
    x_BTHC = _padded(x_BTHC, rows, 0)
    B, T, H, C = x_BTHC.shape
    x_BNQGRC = x_BTHC.reshape(B, T // rows, rows, groups, H // groups, C)
    return x_BNQGRC.transpose(0, 1, 3, 4, 2, 5).reshape(B, T // rows, groups, -1, C)


def _by_query(x_BNGPC: jax.Array, length: int, heads: int) -> jax.Array:
    """[B, N, G, P, C] -> [B, T, H, C]."""
    B, N, G, _, C = x_BNGPC.shape
    x_BNGRQC = x_BNGPC.reshape(B, N, G, heads // G, -1, C)
    return x_BNGRQC.transpose(0, 1, 4, 2, 3, 5).reshape(B, -1, heads, C)[:, :length]


def _key_blocks(x_BSGC: jax.Array, rows: int) -> jax.Array:
    """[B, S, G, C] -> [B, M, G, K, C]."""
    x_BSGC = _padded(x_BSGC, rows, 0)
    B, S, G, C = x_BSGC.shape
    return x_BSGC.reshape(B, S // rows, rows, G, C).swapaxes(2, 3)


def _range_blocks(first_BT, last_BT, heads: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last key of each query, [B, N, P]; queries that fill a block see none."""
    none, shape = jnp.iinfo(jnp.int32).max // 2, (first_BT.shape[0], -1, rows)
    first_BNQ = _padded(first_BT, rows, none).reshape(shape)
    last_BNQ = _padded(last_BT, rows, -1).reshape(shape)
    return jnp.tile(first_BNQ, (1, 1, heads)), jnp.tile(last_BNQ, (1, 1, heads))


def _padded(x_BT: jax.Array, rows: int, value: int) -> jax.Array:
    """Appends positions, up to a multiple of `rows`."""
    missing = -x_BT.shape[1] % rows
    widths = [(0, 0), (0, missing), *[(0, 0)] * (x_BT.ndim - 2)]
    return jnp.pad(x_BT, widths, constant_values=value) if missing else x_BT


def _multiply(x_GMK: jax.Array, y_GKN: jax.Array) -> jax.Array:
    return jnp.matmul(x_GMK, y_GKN, preferred_element_type=jnp.float32)


def _multiply_transposed(x_GMK: jax.Array, y_GNK: jax.Array) -> jax.Array:
    dims = (((2,), (2,)), ((0,), (0,)))
    return lax.dot_general(x_GMK, y_GNK, dims, preferred_element_type=jnp.float32)
