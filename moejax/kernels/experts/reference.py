"""The specification of products of groups: slow, obvious, differentiable.

Legend: M rows sorted by group, G groups, K summed over, N columns.
"""

import jax
import jax.numpy as jnp


def grouped_matmul(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Multiplies each row by the matrix of its group. G times the FLOPs of the real thing."""
    M, G = x_MK.shape[0], w_GKN.shape[0]
    # G for rows past the last group.
    group_M = jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(M), side="right")
    y_GMN = jnp.einsum("MK,GKN->GMN", x_MK, w_GKN)
    chosen_GM = group_M[None, :] == jnp.arange(G)[:, None]
    return jnp.sum(jnp.where(chosen_GM[:, :, None], y_GMN, 0), axis=0)
