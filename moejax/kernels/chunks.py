"""What linear attention in chunks shares: fading in chunks, borders of documents, the convolution.

Per device. A head's state S [C, V] fades from position to position by the logarithms g <= 0.
Legend: N chunks of Q positions (J: the earlier of two); G key heads of C channels; R value heads to
each, H = G * R in all, of V channels. The convolution sees X positions, a position's own and Y
before it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.annotations import Array, Float, Int

CHUNK = 64  # positions
# exp(FADED) is zero in float32: nothing fades further.
FADED = -128.0
# Sums of 2^13 multiples of it, none below FADED * CHUNK, are exact in float32.
GRID = 2.0**-10


class Passes(NamedTuple):
    """Whether two positions of a chunk, or one and a state, are of one document."""

    within_NBQJ: jax.Array  # false if J is later
    before_NBQ: jax.Array  # the state before the chunk
    after_NBQ: jax.Array  # the state after the chunk
    kept_NB: jax.Array  # both states


class Sums(NamedTuple):
    """Sums of logarithms from a chunk's first position on, in two parts.

    The coarse ones are exact and the fine ones small, so that a difference of two long sums is as
    exact as a short sum.
    """

    coarse: jax.Array
    fine: jax.Array

    def share(self, of: Callable[[jax.Array], jax.Array], passes: Any = True) -> jax.Array:
        """Returns exp of a difference of sums, or 0 where nothing passes."""
        return jnp.exp(jnp.where(passes, of(self.coarse) + of(self.fine), -jnp.inf))


class HeadShares(NamedTuple):
    """What fading and borders of documents leave, where all channels of a head fade alike.

    In float32, by value heads: R of each of G key heads.

    Attributes:
      before_NBGRQ: share, in what Q reads, of the state before the chunk.
      after_NBGRQ: share of what Q wrote, in the state after the chunk.
      kept_NBGR11: share of the state before the chunk, in the state after it.
      within_NBGRQJ: share, in what Q reads, of what J wrote; 0 if J is later.
    """

    before_NBGRQ: jax.Array
    after_NBGRQ: jax.Array
    kept_NBGR11: jax.Array
    within_NBGRQJ: jax.Array


class Effect(NamedTuple):
    """What positions do to a head's state: state <- factor @ state + addend. In float32.

    Attributes:
      factor_CC: [..., C, C], or [..., 1, 1] where it is a number.
    """

    factor_CC: jax.Array
    addend_CV: jax.Array

    def on(self, state_CV: jax.Array) -> jax.Array:
        """Returns the state after the positions."""
        return self._times(state_CV) + self.addend_CV

    def then(self, later: "Effect") -> "Effect":
        """Returns the effect of these positions and of later ones behind them."""
        return Effect(later._times(self.factor_CC), later.on(self.addend_CV))

    def _times(self, x_CV: jax.Array) -> jax.Array:
        if self.factor_CC.shape[-2:] == (1, 1):
            return self.factor_CC * x_CV
        return jnp.matmul(self.factor_CC, x_CV, precision="highest")


# The state before positions, [B, H, C, V]; or what returns it, given their effect.
Before = jax.Array | Callable[[Effect], jax.Array] | None


def convolve(
    x_BTHC: Float[Array, "B T H C"],
    w_HCX: Float[Array, "H C X"],
    segment_BT: Int[Array, "B T"] | None = None,
    tail_BYHC: Float[Array, "B Y H C"] | None = None,
) -> Float[Array, "B T H C"]:
    """Returns each position's sum of the X positions up to its own, weighted, in float32.

    Args:
      w_HCX: in float32; the last weight is the position's own.
      segment_BT: document of each position; a sum stays inside it. None: all of one.
      tail_BYHC: the Y positions before the first, of its document; None: zeros.
    """
    T, X = x_BTHC.shape[1], w_HCX.shape[-1]
    if tail_BYHC is None:
        before = ((0, 0), (X - 1, 0), (0, 0), (0, 0))
        joined_BSHC = jnp.pad(x_BTHC, before)
    else:
        joined_BSHC = jnp.concatenate([tail_BYHC, x_BTHC], axis=1)
    y_BTHC = jnp.zeros((), jnp.float32)
    for back in range(X):
        # In float32 before the product, because the weight's gradient is a sum over positions.
        shifted_BTHC = joined_BSHC[:, X - 1 - back : X - 1 - back + T].astype(jnp.float32)
        if segment_BT is not None and back:
            earlier_BS = jnp.pad(segment_BT, ((0, 0), (back, 0)), mode="edge")
            own_BT = segment_BT == earlier_BS[:, :T]
            shifted_BTHC = jnp.where(own_BT[..., None, None], shifted_BTHC, 0)
        y_BTHC += shifted_BTHC * w_HCX[..., X - 1 - back]
    return y_BTHC


def next_tail(
    x_BTHC: Float[Array, "B T H C"],
    tail_BYHC: Float[Array, "B Y H C"],
    count_B: Int[Array, " B"],
) -> Float[Array, "B Y H C"]:
    """Returns the last positions of a tail and the first `count` positions behind it."""
    joined_BSHC = jnp.concatenate([tail_BYHC.astype(x_BTHC.dtype), x_BTHC], axis=1)
    place_BY = count_B[:, None] + jnp.arange(tail_BYHC.shape[1])
    return jnp.take_along_axis(joined_BSHC, place_BY[:, :, None, None], axis=1)


def cut(x_BTH: jax.Array, *, length: int) -> jax.Array:
    """Cuts positions into chunks, [N, B, H, Q, ...]; zeros fill the last one up."""
    B, T, H, *rest = x_BTH.shape
    missing = -T % length
    if missing:
        x_BTH = jnp.pad(x_BTH, ((0, 0), (0, missing), *((0, 0),) * (1 + len(rest))))
    return x_BTH.reshape(B, -1, length, H, *rest).swapaxes(0, 1).swapaxes(2, 3)


def documents(segment_BT: jax.Array, length: int) -> jax.Array:
    """Numbers the documents of each sequence from 0 in their order, [N, B, Q]."""
    begins_BT = segment_BT[:, 1:] != segment_BT[:, :-1]
    number_BT = jnp.cumsum(jnp.pad(begins_BT, ((0, 0), (1, 0))), axis=1)
    number_BT = jnp.pad(number_BT, ((0, 0), (0, -number_BT.shape[1] % length)), mode="edge")
    return number_BT.reshape(number_BT.shape[0], -1, length).swapaxes(0, 1)


def passes_of(number_NBQ: jax.Array) -> Passes:
    """Args: number_NBQ: the number of each position's document."""
    end_NB1 = number_NBQ[..., -1:]
    # The state before the first chunk is of the first document.
    before_NB1 = jnp.pad(end_NB1[:-1], ((1, 0), (0, 0), (0, 0)))
    place = jnp.arange(number_NBQ.shape[-1])
    within_NBQJ = number_NBQ[..., :, None] == number_NBQ[..., None, :]
    return Passes(
        within_NBQJ & (place[:, None] >= place),
        number_NBQ == before_NB1,
        number_NBQ == end_NB1,
        (end_NB1 == before_NB1)[..., 0],
    )


def sums_of(g: jax.Array, axis: int) -> Sums:
    """Adds logarithms up along the positions of chunks, which are an axis of g."""
    g = jnp.maximum(g, FADED)
    coarse = lax.stop_gradient(jnp.round(g / GRID) * GRID)
    return Sums(*(jnp.cumsum(x, axis=axis) for x in (coarse, g - coarse)))


def head_shares(g_NBHQ: jax.Array, passes: Passes, key_heads: int) -> HeadShares:
    """Returns the shares that are left where heads fade by logarithms g."""
    sums = sums_of(g_NBHQ, -1)
    within, before, after, kept = (x[:, :, None] for x in passes)
    shares = (
        sums.share(lambda x: x, before),
        sums.share(lambda x: x[..., -1:] - x, after),
        sums.share(lambda x: x[..., -1], kept)[..., None, None],
        sums.share(lambda x: x[..., :, None] - x[..., None, :], within),
    )
    return HeadShares(*(by_key_head(x, key_heads) for x in shares))


def by_key_head(x_NBH: jax.Array, heads: int) -> jax.Array:
    """Splits value heads into those of each key head, [N, B, G, R, ...]."""
    return x_NBH.reshape(*x_NBH.shape[:2], heads, -1, *x_NBH.shape[3:])


def times(share_Q: jax.Array | None, x_QV: jax.Array) -> jax.Array:
    """Returns x times a share of each position; x itself for None."""
    return x_QV if share_Q is None else share_Q[..., None] * x_QV


def dot(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns an einsum, added up in float32."""
    return jnp.einsum(form, x, y, preferred_element_type=jnp.float32)
