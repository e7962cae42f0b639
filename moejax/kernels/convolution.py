"""Short causal convolution along the positions, of each channel by itself, inside each document.

Per device. X counts the positions that a result sees: its own and Y before it.
"""

import jax.numpy as jnp

from moejax.annotations import Array, Float, Int


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
            own_BT = jnp.pad(segment_BT[:, back:] == segment_BT[:, :-back], ((0, 0), (back, 0)))
            shifted_BTHC = jnp.where(own_BT[:, :T, None, None], shifted_BTHC, 0)
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
