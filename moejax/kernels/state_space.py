"""The state space dual form of Mamba-2: linear attention whose states fade and are added to.

Per device. A head's state S [C, V] maps keys to values. At each position it fades, then a key
writes its value, then a query reads:

    S <- exp(g) S + k v^T;    y = S^T q

with a number g <= 0 for each head. Source: Dao, Gu, Transformers are SSMs (2024), where queries are
C, keys B, values x times its time step, and g is A times that.

Training takes the positions in chunks. What positions of a chunk read of each other, what a chunk
writes into its state and what it reads of the state before it are matrix products, of all chunks at
once; from chunk to chunk states are only faded and added. Legend: as in `chunks`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from moejax.annotations import Array, Float, Int
from moejax.kernels.chunks import (
    CHUNK,
    Before,
    Effect,
    by_key_head,
    cut,
    documents,
    dot,
    head_shares,
    passes_of,
    times,
)


def state_space(
    q_BTGC: Float[Array, "B T G C"],
    k_BTGC: Float[Array, "B T G C"],
    v_BTHV: Float[Array, "B T H V"],
    g_BTH: Float[Array, "B T H"],
    segment_BT: Int[Array, "B T"] | None = None,
    state_BHCV: Before = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H C V"]]:
    """Returns what each position reads, in float32, and the state after the last position.

    Operands of products have the dtype of v; sums, shares and the state are in float32. A position
    with g = 0 and v = 0 changes nothing.

    Args:
      q_BTGC, k_BTGC: value head h reads and writes by key head h // (H / G).
      segment_BT: document of each position: the state is zero where one begins. None: all one.
      state_BHCV: the state before the first position, whose document goes on; None: zero. A
        function takes the positions' effect.
      chunk: positions of a chunk, `CHUNK` at most.
    """
    (B, T, H, V), G, dtype = v_BTHV.shape, k_BTGC.shape[2], v_BTHV.dtype
    segment_BT = jnp.zeros((B, T), jnp.int32) if segment_BT is None else segment_BT
    state_BHCV = jnp.zeros((B, H, k_BTGC.shape[-1], V)) if state_BHCV is None else state_BHCV
    chunks = partial(cut, length=min(chunk, T))
    q_NBGQC, k_NBGQC = chunks(q_BTGC), chunks(k_BTGC)
    v_NBGRQV = by_key_head(chunks(v_BTHV), G)
    passes = passes_of(documents(segment_BT, min(chunk, T)))
    shares = head_shares(chunks(g_BTH.astype(jnp.float32)), passes, G)
    before_NBGRQ, after_NBGRQ, kept_NBGR11, within_NBGRQJ = shares

    lasting_NBGRQV = times(after_NBGRQ, v_NBGRQV).astype(dtype)
    written_NBGRCV = dot("nbgqc,nbgrqv->nbgrcv", k_NBGQC, lasting_NBGRQV)

    def go_on(state_BGRCV: jax.Array, now: tuple[jax.Array, jax.Array]):
        kept_BGR11, written_BGRCV = now
        return kept_BGR11 * state_BGRCV + written_BGRCV, state_BGRCV

    if callable(state_BHCV):
        state_BHCV = state_BHCV(_effect(kept_NBGR11, written_NBGRCV))
    first_BGRCV = by_key_head(state_BHCV.astype(jnp.float32)[None], G)[0]
    last_BGRCV, state_NBGRCV = lax.scan(go_on, first_BGRCV, (kept_NBGR11, written_NBGRCV))
    old_NBGRQV = dot("nbgqc,nbgrcv->nbgrqv", q_NBGQC, state_NBGRCV.astype(dtype))
    met_NBG1QJ = dot("nbgqc,nbgjc->nbgqj", q_NBGQC, k_NBGQC)[:, :, :, None]
    seen_NBGRQJ = (met_NBG1QJ * within_NBGRQJ).astype(dtype)
    new_NBGRQV = dot("nbgrqj,nbgrjv->nbgrqv", seen_NBGRQJ, v_NBGRQV)
    y_NBGRQV = times(before_NBGRQ, old_NBGRQV) + new_NBGRQV
    y_BTHV = y_NBGRQV.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, H, V)
    return y_BTHV[:, :T], last_BGRCV.reshape(state_BHCV.shape)


def _effect(kept_NBGR11: jax.Array, written_NBGRCV: jax.Array) -> Effect:
    """Returns what all chunks do to the state before them, [B, H, ...]."""
    nothing = Effect(jnp.ones_like(kept_NBGR11[0]), jnp.zeros_like(written_NBGRCV[0]))
    each = Effect(kept_NBGR11, written_NBGRCV)
    every, _ = lax.scan(lambda early, late: (early.then(late), None), nothing, each)
    return Effect(*(x.reshape(len(x), -1, *x.shape[3:]) for x in every))


def state_space_step(
    q_BGC: Float[Array, "B G C"],
    k_BGC: Float[Array, "B G C"],
    v_BHV: Float[Array, "B H V"],
    g_BH: Float[Array, "B H"],
    state_BHCV: Float[Array, "B H C V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H C V"]]:
    """Returns the result of `state_space` for one position behind a state, in float32."""
    R = v_BHV.shape[1] // k_BGC.shape[1]
    q_BHC, k_BHC = (jnp.repeat(x.astype(jnp.float32), R, axis=1) for x in (q_BGC, k_BGC))
    state_BHCV = jnp.exp(g_BH)[..., None, None] * state_BHCV
    state_BHCV = state_BHCV + k_BHC[..., None] * v_BHV[:, :, None]
    return jnp.einsum("bhc,bhcv->bhv", q_BHC, state_BHCV), state_BHCV
