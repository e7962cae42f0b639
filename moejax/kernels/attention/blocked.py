"""Softmax attention that never keeps scores: causal, inside a document, grouped queries.

Per device. Legend: B sequences, T queries, S keys, H heads, G heads of keys, R = H / G, C width
of a head's queries and keys, V of its values, Q queries of a block.

`blocked` works on one sequence and one block of queries at a time, over the keys that the block may
see, so that scores stay in cache and causality halves the work. The mask is also computed block by
block: nothing grows with the square of the length. Scores are laid out keys first, so that softmax
runs along whole vectors, and no product needs a transposed copy.
Backward computes the probabilities again from the saved log of the softmax's denominator
(FlashAttention: Dao et al. 2022). `benchmarks/cpu/ops.py attention` times it.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Bool, Float, Int
from moejax.kernels.attention.splash import splash_attention
from moejax.kernels.kept import ATTENDED

# The primitive of cuDNN's forward pass, whose results have no name of their own; by its name in JAX
# 0.10 to 0.12. Under another name remat policies run the forward pass twice, as for other values.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
MASKED = -1e30  # a score that softmax turns into zero; finite, so that no difference is NaN


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
) -> Float[Array, "B T H V"]:
    """Returns each query's mean of the values, weighted by the softmax of its scores.

    Queries are of the last T of S positions. Head h reads keys and values h // (H / G).
    FLOPs: 2 * B * H * (C + V) * (pairs of positions visited); for cuDNN, C and V are the wider of
    both.

    Args:
      segment_BS: document of each position. A query sees the keys of its own document that are not
        later and not `window` or more back.
      implementation: "blocked"; "splash", on TPUs; "splash_whole", which takes all of a sequence
        for one document; "cudnn", which does so too; "cudnn_masked", for which a mask [B, 1, T, S]
        is made; or "reference" (the whole batch at once, scores kept). `kernels.select` chooses.
        Both forms of splash, and "cudnn", only take the queries of all positions.
      scale: factor of the scores; None for 1 / sqrt(C).
      sinks_H: logits that take part in the softmax of each of a head's queries and have no value,
        so that the weights of keys sum to less than one; None for none. cuDNN takes none.
    """
    scale = 1 / math.sqrt(q_BTHC.shape[-1]) if scale is None else scale
    if implementation == "blocked":
        return _attention(q_BTHC, k_BSGC, v_BSGV, segment_BS, sinks_H, window, scale)
    if implementation in ("splash", "splash_whole"):
        _require_whole(implementation, q_BTHC.shape[1], segment_BS.shape[1])
        told_BT = segment_BS if implementation == "splash" else None
        options = {"window": window, "scale": scale, "sinks_H": sinks_H}
        return splash_attention(q_BTHC, k_BSGC, v_BSGV, told_BT, **options)
    form: dict[str, Any] = _library_form(implementation, segment_BS, window, q_BTHC.shape[1])
    form["scale"] = scale
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


def _require_whole(implementation: str, queries: int, length: int) -> None:
    """Refuses a part of the positions, where a kernel counts queries from the first."""
    if queries != length:
        raise ValueError(
            f"{implementation} takes queries of all positions, these are {queries} of {length}"
        )


def _library_form(
    implementation: str, segment_BS: Int[Array, "B S"], window: int | None, queries: int
) -> dict[str, Any]:
    """Returns the arguments of `jax.nn.dot_product_attention` for the keys a query sees."""
    whole = queries == segment_BS.shape[1]
    if implementation == "cudnn":
        _require_whole(implementation, queries, segment_BS.shape[1])
        window_size = None if window is None else (window - 1, 0)
        return {"is_causal": True, "local_window_size": window_size}
    if implementation not in ("cudnn_masked", "reference"):
        raise ValueError(f"no implementation {implementation}")
    mask_BST = attention_mask(segment_BS, window, queries)
    # Causal besides, so that the kernel skips later keys; it takes no window here. The library
    # counts queries from the first key, so not if queries are only at the last positions.
    return {"mask": mask_BST.swapaxes(1, 2)[:, None], "is_causal": whole}


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
    segment_BS: Int[Array, "B S"], window: int | None, queries: int | None = None
) -> Bool[Array, "B S T"]:
    """Returns whether query t may see key s; T x S for each sequence.

    Args:
      queries: number of queries, at the last positions; None: at all positions.
    """
    S = segment_BS.shape[1]
    first = 0 if queries is None else S - queries
    seen = partial(_seen, places=slice(first, S), keys=slice(0, S), window=window)
    return jax.vmap(seen)(segment_BS)


def _seen(segment_S: jax.Array, places: slice, keys: slice, window: int | None) -> jax.Array:
    """Returns which keys of a block [S] the queries at some places [Q] may see."""
    back_SQ = jnp.arange(places.start, places.stop) - jnp.arange(keys.start, keys.stop)[:, None]
    near_SQ = back_SQ >= 0
    if window is not None:
        near_SQ &= back_SQ < window
    # Found once for all heads: inside a loop over scores it would take up to half of the time.
    return lax.optimization_barrier(near_SQ & (segment_S[keys, None] == segment_S[places]))


def _blocks(queries: int, length: int, window: int | None) -> list[tuple[slice, slice, slice]]:
    """Blocks of queries, each with their places and the keys that any of them may see."""
    rows, first = max(64, min(queries // 4, 256)), length - queries
    found = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        places = slice(first + start, first + stop)
        nearest = 0 if window is None else max(0, places.start - window + 1)
        found.append((slice(start, stop), places, slice(nearest, places.stop)))
    return found


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q_BTHC, k_BSGC, v_BSGV, segment_BS, sinks_H, window: int | None, scale: float):
    return _forward(q_BTHC, k_BSGC, v_BSGV, segment_BS, sinks_H, window, scale)[0]


def _forward(q_BTHC, k_BSGC, v_BSGV, segment_BS, sinks_H, window: int | None, scale: float):
    y_BTHV, log_BGRT = blocked(q_BTHC, k_BSGC, v_BSGV, segment_BS, sinks_H, window, scale)
    y_BTHV, log_BGRT = (checkpoint_name(x, ATTENDED) for x in (y_BTHV, log_BGRT))
    return y_BTHV, (q_BTHC, k_BSGC, v_BSGV, segment_BS, sinks_H, y_BTHV, log_BGRT)


def blocked(q_BTHC, k_BSGC, v_BSGV, segment_BS, sinks_H, window: int | None, scale: float):
    """Returns the result of `attention`, and the log of the softmax's denominators [B, G, R, T]."""

    def sequence(arrays):
        q_GRTC, k_GSC, v_GVS, segment_S = arrays
        G, R, T = q_GRTC.shape[:3]
        y_blocks, log_blocks = [], []
        for queries, places, keys in _blocks(T, segment_S.shape[0], window):
            seen_SQ = _seen(segment_S, places, keys, window)
            score_GSQ = _scores(q_GRTC[:, :, queries], k_GSC[:, keys], seen_SQ)
            top_G1Q = jnp.max(score_GSQ, axis=1, keepdims=True)
            sink_G1Q = None if sinks_H is None else _by_query(sinks_H, G, queries)
            top_G1Q = top_G1Q if sink_G1Q is None else jnp.maximum(top_G1Q, sink_G1Q)
            p_GSQ = jnp.exp(score_GSQ - top_G1Q)
            total_G1Q = jnp.sum(p_GSQ, axis=1, keepdims=True)
            if sink_G1Q is not None:
                total_G1Q += jnp.exp(sink_G1Q - top_G1Q)
            y_GVQ = _multiply(v_GVS[:, :, keys], p_GSQ.astype(v_GVS.dtype)) / total_G1Q
            y_blocks.append(y_GVQ.astype(v_GVS.dtype).reshape(G, v_GVS.shape[1], R, -1))
            log_blocks.append((top_G1Q + jnp.log(total_G1Q)).reshape(G, R, -1))
        return jnp.concatenate(y_blocks, axis=3), jnp.concatenate(log_blocks, axis=2)

    G = k_BSGC.shape[2]
    arrays = (_by_head(q_BTHC * scale, G), k_BSGC.transpose(0, 2, 1, 3))
    arrays += (v_BSGV.transpose(0, 2, 3, 1), segment_BS)
    y_BGVRT, log_BGRT = lax.map(sequence, arrays)
    y_BTHV = y_BGVRT.transpose(0, 4, 1, 3, 2).reshape(*q_BTHC.shape[:3], v_BSGV.shape[-1])
    return y_BTHV, log_BGRT


def _backward(window: int | None, scale: float, saved, dy_BTHV):
    dq_BTHC, dk_BSGC, dv_BSGV, dsinks_H = blocked_gradients(window, scale, saved, dy_BTHV)
    return dq_BTHC, dk_BSGC, dv_BSGV, None, dsinks_H


def blocked_gradients(window: int | None, scale: float, saved, dy_BTHV):
    """Returns the gradients of q, k, v and sinks.

    Args:
      saved: the arguments of `blocked` without the last two, and its results.
    """

    def sequence(arrays):
        q_GRTC, k_GSC, v_GSV, segment_S, log_GRT, dot_GRT, dy_GRTV = arrays
        G, R, T, C = q_GRTC.shape
        dk_GSC = jnp.zeros(k_GSC.shape, jnp.float32)
        dv_GSV, dq_blocks = jnp.zeros(v_GSV.shape, jnp.float32), []
        for queries, places, keys in _blocks(T, segment_S.shape[0], window):
            q_GQC = q_GRTC[:, :, queries].reshape(G, -1, C)
            dy_GQV = dy_GRTV[:, :, queries].reshape(G, -1, dy_GRTV.shape[-1])
            log_G1Q, dot_G1Q = (x[:, :, queries].reshape(G, 1, -1) for x in (log_GRT, dot_GRT))
            seen_SQ = _seen(segment_S, places, keys, window)
            score_GSQ = _scores(q_GRTC[:, :, queries], k_GSC[:, keys], seen_SQ)
            p_GSQ = jnp.exp(score_GSQ - log_G1Q)
            dscore_GSQ = p_GSQ * (_multiply_transposed(v_GSV[:, keys], dy_GQV) - dot_G1Q)
            p_GSQ, dscore_GSQ = p_GSQ.astype(q_GQC.dtype), dscore_GSQ.astype(q_GQC.dtype)
            dv_GSV = dv_GSV.at[:, keys].add(_multiply(p_GSQ, dy_GQV))
            dk_GSC = dk_GSC.at[:, keys].add(_multiply(dscore_GSQ, q_GQC))
            dq_GCQ = _multiply(k_GSC[:, keys].transpose(0, 2, 1), dscore_GSQ)
            dq_blocks.append(dq_GCQ.reshape(G, C, R, -1))
        return jnp.concatenate(dq_blocks, axis=3), dk_GSC, dv_GSV

    q_BTHC, k_BSGC, v_BSGV, segment_BS, sinks_H, y_BTHV, log_BGRT = saved
    G = k_BSGC.shape[2]
    dot_BTH1 = jnp.sum(y_BTHV.astype(jnp.float32) * dy_BTHV, axis=-1, keepdims=True)
    arrays = (_by_head(q_BTHC * scale, G), k_BSGC.transpose(0, 2, 1, 3))
    arrays += (v_BSGV.transpose(0, 2, 1, 3), segment_BS, log_BGRT)
    dot_BGRT = _by_head(dot_BTH1, G)[..., 0]
    arrays += (dot_BGRT, _by_head(dy_BTHV, G))
    dq_BGCRT, dk_BGSC, dv_BGSV = lax.map(sequence, arrays)
    dq_BTHC = dq_BGCRT.transpose(0, 4, 1, 3, 2).reshape(q_BTHC.shape) * scale
    dk_BSGC, dv_BSGV = (x.transpose(0, 2, 1, 3).astype(k_BSGC.dtype) for x in (dk_BGSC, dv_BGSV))
    dsinks_H = None if sinks_H is None else _sinks_gradient(sinks_H, log_BGRT, dot_BGRT)
    return dq_BTHC.astype(q_BTHC.dtype), dk_BSGC, dv_BSGV, dsinks_H


_attention.defvjp(_forward, _backward)


def _by_query(sinks_H: jax.Array, num_groups: int, queries: slice) -> jax.Array:
    """The sinks as scores of a block: [G, 1, R * Q], as `_scores` lays heads and queries out."""
    repeated = jnp.repeat(sinks_H, queries.stop - queries.start)
    return repeated.reshape(num_groups, 1, -1)


def _sinks_gradient(sinks_H: jax.Array, log_BGRT: jax.Array, dot_BGRT: jax.Array) -> jax.Array:
    """Returns sinks' gradients: a sink has a weight like a key, and a value of zeros."""
    weight_BGRT = jnp.exp(sinks_H.reshape(1, *log_BGRT.shape[1:3], 1) - log_BGRT)
    return -jnp.sum(weight_BGRT * dot_BGRT, axis=(0, 3)).reshape(sinks_H.shape)


def _scores(q_GRQC: jax.Array, k_GSC: jax.Array, seen_SQ: jax.Array) -> jax.Array:
    """Scores of a block, keys first; the R heads that share keys lie side by side."""
    G, R, _, C = q_GRQC.shape
    score_GSQ = _multiply_transposed(k_GSC, q_GRQC.reshape(G, -1, C))
    return jnp.where(jnp.tile(seen_SQ, (1, R)), score_GSQ, MASKED)


def _by_head(x_BTHC: jax.Array, num_groups: int) -> jax.Array:
    """[B, T, H, C] -> [B, G, H / G, T, C]."""
    B, T, _, C = x_BTHC.shape
    return x_BTHC.reshape(B, T, num_groups, -1, C).transpose(0, 2, 3, 1, 4)


def _multiply(x_GMK: jax.Array, y_GKN: jax.Array) -> jax.Array:
    return jnp.matmul(x_GMK, y_GKN, preferred_element_type=jnp.float32)


def _multiply_transposed(x_GMK: jax.Array, y_GNK: jax.Array) -> jax.Array:
    dims = (((2,), (2,)), ((0,), (0,)))
    return lax.dot_general(x_GMK, y_GNK, dims, preferred_element_type=jnp.float32)
