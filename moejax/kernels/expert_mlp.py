"""The experts: rows, sorted by expert, each through the gated MLP of its expert.

Per device. Legend: M rows, G groups (experts), D width, F hidden, U gate and up, W = 2 F.

`benchmarks/cpu/ops.py` times the implementations beside each other.
"""

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.kernels.activation import activate, with_dots
from moejax.kernels.blocked_mlp import Form, Weights, blocked_mlp, blocked_mlp_adding, flat
from moejax.kernels.grouped_matmul import (
    add_bias,
    grouped_matmul,
    schedule_experts,
    swiglu_mlp,
)
from moejax.kernels.grouped_matmul_e4m3 import grouped_matmul_e4m3
from moejax.kernels.kept import GATE_AND_UP

# Implementations whose products round rows and weights to e4m3 first.
IN_E4M3 = {"mosaic_e4m3": "mosaic", "reference_e4m3": "reference"}

Params = tuple[jax.Array, ...]
Biases = tuple[Float[Array, "G 2 F"], Float[Array, "G D"]]


def expert_mlp(
    x_MD: Float[Array, "M D"],
    w_in_GDUF: Float[Array, "G D 2 F"],
    w_out_GFD: Float[Array, "G F D"],
    sizes_G: Int[Array, " G"],
    *,
    implementation: str,
    biases: Biases | None = None,
    limit: float | None = None,
    one_M1: Float[Array, "M 1"] | None = None,
    schedule: tuple[Int[Array, "C ..."], int] | None = None,
) -> Float[Array, "M D"]:
    """Returns `y_MD`; rows past the last group are zero.

    FLOPs: 6 * rows * D * F. With F sharded over tensor the results are partial sums.

    Args:
      x_MD: rows sorted by group; what lies past the last group is ignored.
      sizes_G: rows of each group, summing to at most M.
      implementation: "mosaic", "blocked", one of `grouped_matmul`'s, or of `IN_E4M3`, whose forward
        products round what they multiply; see `kernels.select`.
      biases: float32, added to the first product before the activation, and to the second.
      limit: of clamped SwiGLU; None for SwiGLU.
      one_M1: ones, which are not multiplied. Their gradient is each row's result times the gradient
        of that result, float32: found from the hidden layer, without the results.
      schedule: of all C chunks, from `schedule_experts`, and the number of this one; None for none.
    """
    if implementation == "mosaic" and biases is None and limit is None:
        if schedule is None:
            schedule = schedule_experts(sizes_G, x_MD.shape[0])[None], 0
        return swiglu_mlp(x_MD, w_in_GDUF, w_out_GFD, one_M1, *schedule)
    weights = Weights(w_in_GDUF, w_out_GFD, *(biases or ()))
    if implementation == "blocked":
        return blocked_mlp(Form(limit), x_MD, weights, sizes_G, one_M1)
    weights = flat(weights)
    if implementation in IN_E4M3:
        multiply = partial(grouped_matmul_e4m3, implementation=IN_E4M3[implementation])
    else:
        multiply = partial(grouped_matmul, implementation=implementation)
    # Backward keeps the activation's operand alone, instead of float32 values between.
    activated = jax.checkpoint(partial(activate, limit=limit), prevent_cse=False)
    h_MW = multiply(x_MD, weights.w_in, sizes_G)
    if biases is not None:
        h_MW = add_bias(h_MW, weights.b_in, sizes_G)
    a_MF = activated(checkpoint_name(h_MW, GATE_AND_UP))
    if one_M1 is not None:
        a_MF = with_dots(a_MF, one_M1)
    y_MD = multiply(a_MF, weights.w_out, sizes_G)
    return y_MD if biases is None else add_bias(y_MD, weights.b_out, sizes_G, one_M1)


def expert_mlp_adding(
    x_MD: jax.Array,
    params: Params,
    sums: Params,
    sizes_G: jax.Array,
    *,
    limit: float | None = None,
    met: int | None = None,
    one_M1: jax.Array | None = None,
) -> tuple[jax.Array, Params]:
    """Returns `y_MD` of the blocked form, and `sums` as they are.

    Params have no gradient of their own: backward adds it in place to the gradient of the returned
    sums, and returns that as the gradient of `sums`. Calls in chunks so share one array of
    gradients, and each touches the groups that it has rows for.

    Args:
      params: w_in_GDUF and w_out_GFD; if experts have biases, b_in_GUF and b_out_GD follow.
      sums: of the params' shapes, float32. Their values are never read.
      met: groups that are likely to have rows, for the price; None for all.
      one_M1: as in `expert_mlp`.
    """
    form = Form(limit, met)
    flat_sums = Weights(*sums)
    y_MD, same = blocked_mlp_adding(form, x_MD, Weights(*params), flat_sums, sizes_G, one_M1)
    return y_MD, tuple(x for x in same if x is not None)
