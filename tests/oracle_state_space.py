"""Mamba-2 of the oracle: position by position, in any dtype.

Letters: B sequences, T positions, G groups (key heads), H heads, C channels of a state's keys, V of
its values.
"""

import jax
import jax.numpy as jnp


def states_by_position(q, k, v, g, segment_BT, state=None):
    """Returns what each position reads, and the state after the last one, of `state_space`."""
    B, _, H, V = v.shape
    q, k = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q, k))
    if state is None:
        state = jnp.zeros((B, H, k.shape[-1], V), v.dtype)
    begins_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)))

    def position(state, now):
        q, k, v, g, begins = now
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        state = state * jnp.exp(g)[..., None, None] + jnp.einsum("BHC,BHV->BHCV", k, v)
        return state, jnp.einsum("BHC,BHCV->BHV", q, state)

    steps = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, begins_BT))
    state, y = jax.lax.scan(position, state, steps)
    return jnp.moveaxis(y, 0, 1), state
