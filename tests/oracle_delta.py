"""The gated delta rule position by position, and its convolution, in NumPy's or JAX's float64.

Letters: B sequences, T positions, G key heads, H value heads, C and V channels of them.
"""

import jax
import jax.numpy as jnp


def delta_by_position(q, k, v, g, beta, segment_BT, state=None):
    """Returns what each position reads, and the state after the last one, of `gated_delta`."""
    B, T, H, V = v.shape
    q, k = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q, k))
    if state is None:
        state = jnp.zeros((B, H, k.shape[-1], V), v.dtype)
    begins_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)))

    def position(state, now):
        q, k, v, g, beta, begins = now
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        state = state * jnp.exp(g)[..., None, None]
        held = jnp.einsum("BHC,BHCV->BHV", k, state)
        state = state + jnp.einsum("BHC,BHV->BHCV", k, beta[..., None] * (v - held))
        return state, jnp.einsum("BHC,BHCV->BHV", q, state)

    steps = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, begins_BT))
    state, y = jax.lax.scan(position, state, steps)
    return jnp.moveaxis(y, 0, 1), state


def convolve_by_position(x_BTX, w_XK, segment_BT):
    """Returns the sum of each position and those right before it, of its document, weighted."""
    T, width = x_BTX.shape[1], w_XK.shape[-1]
    rows = []
    for t in range(T):
        total = 0.0
        for back in range(width):
            if t - back < 0:
                break
            same = (segment_BT[:, t] == segment_BT[:, t - back])[:, None]
            total = total + jnp.where(same, x_BTX[:, t - back] * w_XK[:, width - 1 - back], 0)
        rows.append(total)
    return jnp.stack(rows, axis=1)
