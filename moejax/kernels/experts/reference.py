"""The specification of each kernel: slow, obvious, differentiable.

Legend of products: M rows sorted by group, G groups, K summed over, N columns. Legend of rows: N
tokens, K choices of a token, M rows, D width.
"""

import jax
import jax.numpy as jnp


def group_of_row(sizes_G: jax.Array, num_rows: int) -> jax.Array:
    """The group of each row of a buffer sorted by group; G for rows past the last group."""
    return jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(num_rows), side="right")


def grouped_matmul(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Multiplies each row by the matrix of its group. G times the FLOPs of the real thing."""
    group_M = group_of_row(sizes_G, x_MK.shape[0])
    y_GMN = jnp.einsum("MK,GKN->GMN", x_MK, w_GKN)
    chosen_GM = group_M[None, :] == jnp.arange(w_GKN.shape[0])[:, None]
    return jnp.sum(jnp.where(chosen_GM[:, :, None], y_GMN, 0), axis=0)


def permute(x_ND: jax.Array, source_M: jax.Array, slot_NK: jax.Array) -> jax.Array:
    """Copies rows; index N gives zeros. The inverse, `slot_NK`, is not needed here."""
    return jnp.concatenate([x_ND, jnp.zeros_like(x_ND[:1])])[source_M]


def weighted_sum(
    y_MD: jax.Array, weight_NK: jax.Array, slot_NK: jax.Array, assignment_M: jax.Array
) -> jax.Array:
    """Weights and sums each token's K results; a slot of M counts as zero."""
    y_NKD = jnp.concatenate([y_MD, jnp.zeros_like(y_MD[:1])])[slot_NK].astype(jnp.float32)
    return jnp.einsum("NK,NKD->ND", weight_NK, y_NKD).astype(y_MD.dtype)
