"""Multiplies rows, sorted by group, each by its group's matrix.

Per device. Legend: M rows, K in, N out, G groups. `lax.ragged_dot` costs G times the FLOPs on CPU
(and on CUDA without a kernel of its own), so on CPU each group is cut into blocks of rows and only
blocks that hold rows are computed.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels import reference

BLOCK_ROWS = 256


def grouped_matmul(
    x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, *, implementation: str
) -> jax.Array:
    """Returns `y_MN`; rows past the last group are zero.

    Args:
      x_MK: rows sorted by group; what lies past the last group is ignored.
      sizes_G: rows of each group (int32), summing to at most M.
      implementation: "blocked", "ragged_dot" or "reference"; see `kernels.select`.
    """
    if implementation == "reference":
        return reference.grouped_matmul(x_MK, w_GKN, sizes_G)
    if implementation == "ragged_dot":
        return lax.ragged_dot(x_MK, w_GKN, sizes_G)
    assert implementation == "blocked", implementation
    return _blocked(x_MK, w_GKN, sizes_G)


@jax.custom_vjp
def _blocked(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return _multiply(x_MK, w_GKN, sizes_G, "MK,KN->MN")


def _blocked_forward(x_MK, w_GKN, sizes_G):
    return _blocked(x_MK, w_GKN, sizes_G), (x_MK, w_GKN, sizes_G)


def _blocked_backward(saved, dy_MN):
    x_MK, w_GKN, sizes_G = saved
    dx_MK = _multiply(dy_MN, w_GKN, sizes_G, "MN,KN->MK")
    return dx_MK, _weight_gradient(x_MK, dy_MN, sizes_G), None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _padded(x_MK: jax.Array) -> jax.Array:
    """Adds rows so that the last block of the last group stays inside the buffer."""
    return jnp.pad(x_MK, ((0, BLOCK_ROWS), (0, 0)))


def _block(x_MK: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """Rows start .. start + BLOCK_ROWS; those from `end` on are zero."""
    rows_BK = lax.dynamic_slice_in_dim(x_MK, start, BLOCK_ROWS)
    inside_B = start + jnp.arange(BLOCK_ROWS) < end
    return jnp.where(inside_B[:, None], rows_BK, 0)


def _multiply(x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, product: str) -> jax.Array:
    """Every group's blocks in order; a block's surplus rows are overwritten by the next group."""
    M, G = x_MK.shape[0], w_GKN.shape[0]
    N = w_GKN.shape[2] if product.endswith("N") else w_GKN.shape[1]
    x_MK = _padded(x_MK)
    ends_G = jnp.cumsum(sizes_G)

    def group(g, y_MN):
        w_KN, end = w_GKN[g], ends_G[g]

        def block(carry):
            start, y_MN = carry
            y_BN = jnp.einsum(product, _block(x_MK, start, end), w_KN)
            return start + BLOCK_ROWS, lax.dynamic_update_slice_in_dim(y_MN, y_BN, start, 0)

        return lax.while_loop(lambda c: c[0] < end, block, (end - sizes_G[g], y_MN))[1]

    y_MN = jnp.zeros((M + BLOCK_ROWS, N), x_MK.dtype)
    return lax.fori_loop(0, G, group, y_MN)[:M]


@partial(jax.named_call, name="weight_gradient")
def _weight_gradient(x_MK: jax.Array, dy_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Sums over each group's rows the outer products, block by block, in float32."""
    x_MK, dy_MN = _padded(x_MK), _padded(dy_MN)
    shape = (x_MK.shape[1], dy_MN.shape[1])
    ends_G = jnp.cumsum(sizes_G)

    def group(_, bounds):
        start, end = bounds

        def block(carry):
            start, dw_KN = carry
            x_BK = _block(x_MK, start, end)
            dy_BN = lax.dynamic_slice_in_dim(dy_MN, start, BLOCK_ROWS)
            product = jnp.einsum("MK,MN->KN", x_BK, dy_BN, preferred_element_type=jnp.float32)
            return start + BLOCK_ROWS, dw_KN + product

        zeros = jnp.zeros(shape, jnp.float32)
        dw_KN = lax.while_loop(lambda c: c[0] < end, block, (start, zeros))[1]
        return None, dw_KN.astype(x_MK.dtype)

    return lax.scan(group, None, (ends_G - sizes_G, ends_G))[1]
