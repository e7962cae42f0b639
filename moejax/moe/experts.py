"""The experts: each row through the SwiGLU of its expert, as two grouped matrix products."""

import jax
from jaxtyping import Array, Float, Int

from moejax.kernels.grouped_matmul import grouped_matmul


def apply_experts(
    x_RD: Float[Array, "R D"],
    w_in_eDUF: Float[Array, "e D 2 F"],
    w_out_eFD: Float[Array, "e F D"],
    sizes_e: Int[Array, " e"],
    *,
    implementation: str,
) -> Float[Array, "R D"]:
    """Returns `y_RD`; rows past `sum(sizes_e)` are zero.

    Per device. FLOPs: 6 * rows * D * F. With F sharded over tensor the results are partial sums.
    """
    e, D, _, F = w_in_eDUF.shape
    h_RH = grouped_matmul(x_RD, w_in_eDUF.reshape(e, D, 2 * F), sizes_e, implementation=implementation)
    a_RF = jax.nn.silu(h_RH[:, :F]) * h_RH[:, F:]
    return grouped_matmul(a_RF, w_out_eFD, sizes_e, implementation=implementation)
