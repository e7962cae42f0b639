"""The gated delta rule, a linear attention.

Per device. A head's state S [C, V] maps keys to values. At each position it fades, then moves what
it holds of the key towards the value, then answers the query:

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    y = S^T q

with beta in [0, 1] and g <= 0, which is a number for the head or for each channel of its keys.
Sources: Yang, Kautz, Hatamizadeh, Gated Delta Networks (2024); Kimi Team, Kimi Linear (2025).

Training takes the positions in chunks. Inside a chunk the corrections depend on each other by a
triangular matrix, inverted by products of its blocks; from chunk to chunk the state goes on. No
exponent is positive, so nothing overflows. Legend: N chunks of Q positions (J: the earlier of two);
G key heads of C channels; R value heads to each, H = G * R in all, of V channels; A: keys, and
queries, as they meet keys.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.kernels.chunks import (
    CHUNK,
    Before,
    Effect,
    Passes,
    Sums,
    by_key_head,
    cut,
    documents,
    dot,
    head_shares,
    passes_of,
    sums_of,
    times,
)
from moejax.kernels.kept import INVERSES

BASE = 16  # rows of the diagonal blocks that are inverted all at once


class Faded(NamedTuple):
    """What fading and borders of documents leave of the parts of chunks.

    Attributes:
      q_NBGQC: queries as they read the state before a chunk.
      keys: keys as they read it, and as they write into the state after; one array if both are
        the same. [N, B, G, Q, C] each.
      before_NBGRQ: share, in what Q reads, of the state before the chunk; None: `q_NBGQC` and
        `keys` have it. In float32, as all shares.
      after_NBGRQ: share of what Q wrote, in the state after the chunk; None: `keys` have it.
      kept_NBGRCV: share of the state before the chunk, in the state after it; C and V may be 1.
      owed_NBGRQJ, seen_NBGRQJ: products of the key, and of the query, of Q with the key of J, times
        the share of what J wrote; 0 if J is later.
    """

    q_NBGQC: jax.Array
    keys: tuple[jax.Array, ...]
    before_NBGRQ: jax.Array | None
    after_NBGRQ: jax.Array | None
    kept_NBGRCV: jax.Array
    owed_NBGRQJ: jax.Array
    seen_NBGRQJ: jax.Array


def gated_delta(
    q_BTGC: Float[Array, "B T G C"],
    k_BTGC: Float[Array, "B T G C"],
    v_BTHV: Float[Array, "B T H V"],
    g: Float[Array, "B T H"] | Float[Array, "B T G C"],
    beta_BTH: Float[Array, "B T H"],
    segment_BT: Int[Array, "B T"] | None = None,
    state_BHCV: Before = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H C V"]]:
    """Returns what each position reads, in float32, and the state after the last position.

    Operands of products have the dtype of v; sums, gates and the state are in float32. A position
    with g = 0 and beta = 0 changes nothing. For backward a caller may keep the values that are
    named `INVERSES`, and compute the others again.

    Args:
      q_BTGC, k_BTGC: keys of unit length, or shorter; value head h reads key head h // (H / G).
      g: of value heads, or of channels of key heads.
      segment_BT: document of each position: the state is zero where one begins. None: all one.
      state_BHCV: the state before the first position, whose document goes on; None: zero. A
        function takes the positions' effect, which costs about as much again as their results.
      chunk: positions of a chunk: a power of two times `BASE`.
    """
    B, T, H, V = v_BTHV.shape
    segment_BT = jnp.zeros((B, T), jnp.int32) if segment_BT is None else segment_BT
    if state_BHCV is None:
        state_BHCV = jnp.zeros((B, H, k_BTGC.shape[-1], V), jnp.float32)
    while chunk > BASE and chunk // 2 >= T:
        chunk //= 2
    y_NBHQV, state_BHCV = _by_chunks(
        q_BTGC, k_BTGC, v_BTHV, g, beta_BTH, segment_BT, state_BHCV, chunk
    )
    y_BTHV = y_NBHQV.transpose(1, 0, 3, 2, 4).reshape(B, -1, H, V)
    return y_BTHV[:, :T], state_BHCV


def delta_step(
    q_BGC: Float[Array, "B G C"],
    k_BGC: Float[Array, "B G C"],
    v_BHV: Float[Array, "B H V"],
    g: Float[Array, "B H"] | Float[Array, "B G C"],
    beta_BH: Float[Array, "B H"],
    state_BHCV: Float[Array, "B H C V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H C V"]]:
    """Returns the result of `gated_delta` for one position behind a state, in float32."""
    R = v_BHV.shape[1] // k_BGC.shape[1]
    q_BHC, k_BHC = (jnp.repeat(x.astype(jnp.float32), R, axis=1) for x in (q_BGC, k_BGC))
    g_BHC = g[..., None] if g.ndim == 2 else jnp.repeat(g, R, axis=1)
    state_BHCV = jnp.exp(g_BHC)[..., None] * state_BHCV
    held_BHV = jnp.einsum("bhc,bhcv->bhv", k_BHC, state_BHCV)
    u_BHV = beta_BH[..., None] * (v_BHV - held_BHV)
    state_BHCV = state_BHCV + k_BHC[..., None] * u_BHV[:, :, None]
    return jnp.einsum("bhc,bhcv->bhv", q_BHC, state_BHCV), state_BHCV


def _by_chunks(
    q_BTGC, k_BTGC, v_BTHV, g, beta_BTH, segment_BT, before_BHCV: Any, length: int
) -> tuple[jax.Array, jax.Array]:
    """Returns [N, B, H, Q, V] and the last state."""
    G, dtype = k_BTGC.shape[2], v_BTHV.dtype
    chunks = partial(cut, length=length)
    q_NBGQC, k_NBGQC, v_NBHQV = chunks(q_BTGC), chunks(k_BTGC), chunks(v_BTHV)
    g_cut, beta_NBHQ = (chunks(x.astype(jnp.float32)) for x in (g, beta_BTH))
    fade = _fade_heads if g.ndim == 3 else _fade_channels
    faded = fade(q_NBGQC, k_NBGQC, g_cut, passes_of(documents(segment_BT, length)))
    v_NBGRQV, beta_NBGRQ = by_key_head(v_NBHQV, G), by_key_head(beta_NBHQ, G)
    # What Q would read of what J wrote, times beta of Q, for J before Q.
    owed_NBGRQJ = faded.owed_NBGRQJ * beta_NBGRQ[..., None]
    inverse_NBGRQJ = checkpoint_name(_inverse(owed_NBGRQJ), INVERSES)
    corrects_NBGRQJ = inverse_NBGRQJ * beta_NBGRQ[..., None, :]

    def chunk(state_BGRCV: jax.Array, arrays: tuple[Any, ...]) -> tuple[jax.Array, Any]:
        keys, v_BGRQV, corrects_BGRQJ, before_BGRQ, after_BGRQ, kept_BGRCV = arrays
        held_BGRQV = dot("bgqc,bgrcv->bgrqv", keys[0], state_BGRCV.astype(dtype))
        missing_BGRQV = v_BGRQV - times(before_BGRQ, held_BGRQV)
        u_BGRQV = dot("bgrqj,bgrjv->bgrqv", corrects_BGRQJ, missing_BGRQV.astype(dtype))
        written_BGRQV = times(after_BGRQ, u_BGRQV).astype(dtype)
        new_BGRCV = dot("bgqc,bgrqv->bgrcv", keys[-1], written_BGRQV)
        new_BGRCV += kept_BGRCV * state_BGRCV
        return new_BGRCV, (state_BGRCV.astype(dtype), u_BGRQV.astype(dtype))

    shares = faded.before_NBGRQ, faded.after_NBGRQ, faded.kept_NBGRCV
    scanned = faded.keys, v_NBGRQV, corrects_NBGRQJ.astype(dtype), *shares
    if callable(before_BHCV):
        before_BHCV = before_BHCV(_effect(chunk, scanned))
    first_BGRCV = by_key_head(before_BHCV.astype(jnp.float32)[None], G)[0]
    last_BGRCV, (state_NBGRCV, u_NBGRQV) = lax.scan(chunk, first_BGRCV, scanned)
    y_NBGRQV = dot("nbgqc,nbgrcv->nbgrqv", faded.q_NBGQC, state_NBGRCV)
    y_NBGRQV = times(faded.before_NBGRQ, y_NBGRQV)
    y_NBGRQV += dot("nbgrqj,nbgrjv->nbgrqv", faded.seen_NBGRQJ.astype(dtype), u_NBGRQV)
    return y_NBGRQV.reshape(v_NBHQV.shape), last_BGRCV.reshape(before_BHCV.shape)


def _effect(chunk: Any, scanned: tuple[Any, ...]) -> Effect:
    """Returns the effect of all chunks, by value heads.

    The columns of a state do not meet. So the chunks run on more of them: those of a state of
    zeros, and those of the identity, into which nothing is written.
    """
    keys, v_NBGRQV, *others = scanned
    C, (_, B, G, R, _, V) = keys[0].shape[-1], v_NBGRQV.shape
    wide_NBGRQX = jnp.pad(v_NBGRQV, ((0, 0),) * 5 + ((0, C),))
    columns_CX = jnp.pad(jnp.eye(C), ((0, 0), (V, 0)))
    first_BGRCX = jnp.broadcast_to(columns_CX, (B, G, R, C, V + C))
    arrays = keys, wide_NBGRQX, *others
    last_BGRCX, _ = lax.scan(lambda x, now: (chunk(x, now)[0], None), first_BGRCX, arrays)
    addend_BHCV, factor_BHCC = jnp.split(last_BGRCX.reshape(B, G * R, C, V + C), [V], axis=-1)
    return Effect(factor_BHCC, addend_BHCV)


def _fade_heads(q_NBGQC: jax.Array, k_NBGQC: jax.Array, g_NBHQ: jax.Array, passes: Passes) -> Faded:
    """Fades all channels of a head alike: shares of results are products with numbers."""
    before, after, kept, within = head_shares(g_NBHQ, passes, k_NBGQC.shape[2])

    def pairs(a_NBGQC: jax.Array) -> jax.Array:
        products_NBGQJ = dot("nbgqc,nbgjc->nbgqj", a_NBGQC, k_NBGQC)
        return products_NBGQJ[:, :, :, None] * within

    return Faded(q_NBGQC, (k_NBGQC,), before, after, kept, pairs(k_NBGQC), pairs(q_NBGQC))


def _fade_channels(
    q_NBGQC: jax.Array, k_NBGQC: jax.Array, g_NBGQC: jax.Array, passes: Passes
) -> Faded:
    """Fades each channel by itself: queries and keys are multiplied by shares."""
    sums, dtype = sums_of(g_NBGQC, -2), k_NBGQC.dtype
    before, after, kept = (x[:, :, None, ..., None] for x in passes[1:])
    before_NBGQC = sums.share(lambda x: x, before)
    after_NBGQC = sums.share(lambda x: x[..., -1:, :] - x, after)
    kept_NBGC = sums.share(lambda x: x[..., -1, :], kept)
    pairs_ANBGQJ = _faded_products(jnp.stack([k_NBGQC, q_NBGQC]), k_NBGQC, sums)
    pairs_ANBGQJ = jnp.where(passes.within_NBQJ[:, :, None], pairs_ANBGQJ, 0)
    owed_NBG1QJ, seen_NBG1QJ = pairs_ANBGQJ[..., None, :, :]
    keys = tuple((k_NBGQC * share).astype(dtype) for share in (before_NBGQC, after_NBGQC))
    q_NBGQC = (q_NBGQC * before_NBGQC).astype(dtype)
    kept_NBG1C1 = kept_NBGC[..., None, :, None]
    return Faded(q_NBGQC, keys, None, None, kept_NBG1C1, owed_NBG1QJ, seen_NBG1QJ)


def _faded_products(a_QC: jax.Array, k_QC: jax.Array, sums: Sums) -> jax.Array:
    """Returns sum_C a_Q k_J exp(sums_Q - sums_J) for J up to Q, [A, ..., Q, J].

    By halves: where Q is in the second half and J in the first one, the difference is that of Q to
    the end of the first half and that from there to J. Neither is above zero, so that each is a
    factor of an operand, and what vanishes in a factor vanishes in the product.

    Args:
      a_QC: [A, ..., Q, C]; `k_QC` has no A.
    """
    length, dtype = k_QC.shape[-2], k_QC.dtype
    base = min(length, BASE)

    def halves(size: int, block: int) -> tuple[jax.Array, jax.Array]:
        share = sums.share(partial(_to_the_middle, size=size))
        share = share.reshape(k_QC.shape)
        a_nQC, k_nQC = (_blocks((x * share).astype(dtype), block) for x in (a_QC, k_QC))
        return a_nQC, k_nQC

    place, size = jnp.arange(base), 1
    own_nQ = jnp.sum(_blocks(a_QC.astype(jnp.float32) * k_QC, base), axis=-1)
    x_nQJ = own_nQ[..., None] * jnp.eye(base)
    while size < base:  # halves of all sizes are masks of one product
        row, column = place[:, None] // size, place // size
        products_nQJ = dot("a...qc,...jc->a...qj", *halves(size, base))
        x_nQJ += jnp.where((row == column + 1) & (column % 2 == 0), products_nQJ, 0)
        size *= 2
    while size < length:
        a_nQC, k_nQC = halves(size, 2 * size)
        below = dot("a...qc,...jc->a...qj", a_nQC[..., size:, :], k_nQC[..., :size, :])
        x_nQJ = _join(x_nQJ[..., ::2, :, :], below, x_nQJ[..., 1::2, :, :])
        size *= 2
    return x_nQJ[..., 0, :, :]


def _blocks(x_QC: jax.Array, length: int) -> jax.Array:
    """Cuts positions into blocks, [..., n, Q, C]."""
    return x_QC.reshape(*x_QC.shape[:-2], -1, length, x_QC.shape[-1])


def _to_the_middle(x_QC: jax.Array, size: int) -> jax.Array:
    """Returns the differences across the way to the end of the first half of 2 * size rows."""
    away_nQC = _blocks(x_QC, 2 * size)
    away_nQC = away_nQC - away_nQC[..., size - 1 : size, :]
    return jnp.where(jnp.arange(2 * size)[:, None] < size, -away_nQC, away_nQC)


def _join(first: jax.Array, below: jax.Array, second: jax.Array) -> jax.Array:
    """Returns lower triangular blocks of blocks on the diagonal and one below."""
    upper = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)


@jax.custom_vjp
def _inverse(a_QJ: jax.Array) -> jax.Array:
    """Returns the inverse of the identity plus what stands below the diagonal of `a` [..., Q, Q].

    By halves: with the inverses X and Y of both diagonal blocks, the block below the diagonal is
    -Y A X. All that appears is a part of `a` or of the inverse, so that no large numbers cancel,
    as they do in a sum of powers of `a`.
    """
    Q = a_QJ.shape[-1]
    base = min(Q, BASE)
    blocks = [a_QJ[..., n : n + base, n : n + base] for n in range(0, Q, base)]
    x_nQJ = _inverse_of_blocks(jnp.stack(blocks, axis=-3))
    while x_nQJ.shape[-1] < Q:
        size = x_nQJ.shape[-1]
        first, second = x_nQJ[..., ::2, :, :], x_nQJ[..., 1::2, :, :]
        starts = range(0, Q, 2 * size)
        below = [a_QJ[..., n + size : n + 2 * size, n : n + size] for n in starts]
        below = -_multiply(second, _multiply(jnp.stack(below, axis=-3), first))
        x_nQJ = _join(first, below, second)
    return x_nQJ[..., 0, :, :]


def _inverse_of_blocks(a_QJ: jax.Array) -> jax.Array:
    """As `_inverse`, of small blocks: halves of all sizes are masks of the same product."""
    place = jnp.arange(a_QJ.shape[-1])
    x_QJ, size = jnp.broadcast_to(jnp.eye(len(place), dtype=a_QJ.dtype), a_QJ.shape), 1
    while size < len(place):
        row, column = place[:, None] // size, place // size
        below_QJ = jnp.where((row == column + 1) & (column % 2 == 0), a_QJ, 0)
        if size > 1:
            below_QJ = _multiply(x_QJ, _multiply(below_QJ, x_QJ))
        x_QJ, size = x_QJ - below_QJ, 2 * size
    return x_QJ


def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    # Not in fewer bits, as GPUs and TPUs would by themselves: errors would grow with the chunk.
    return jnp.matmul(x, y, precision="highest")


def _inverse_forward(a_QJ):
    x_QJ = _inverse(a_QJ)
    return x_QJ, x_QJ


def _inverse_backward(x_QJ, dx_QJ):
    transposed = x_QJ.swapaxes(-1, -2)
    da_QJ = _multiply(transposed, _multiply(dx_QJ, transposed))
    return (-jnp.tril(da_QJ, -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
