"""The experts: rows, sorted by expert, each through the gated MLP of its expert.

Per device. Legend: M rows, G groups (experts), D width, F hidden, U gate and up, W = U * F.

`benchmarks/cpu/ops.py` times the implementations beside each other.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.kernels.experts.activation import SWIGLU, Gate, activate, with_dots
from moejax.kernels.experts.blocked_mlp import MlpForm, blocked_mlp, blocked_mlp_adding
from moejax.kernels.experts.expert_weights import ExpertWeights, Factors, flat
from moejax.kernels.experts.grouped_matmul import (
    add_bias,
    grouped_matmul,
    schedule_experts,
    swiglu_mlp,
)
from moejax.kernels.experts.grouped_matmul_e4m3 import grouped_matmul_e4m3
from moejax.kernels.kept import GATE_AND_UP

# Implementations whose products round rows and weights to e4m3 first.
IN_E4M3 = {"mosaic_e4m3": "mosaic", "reference_e4m3": "reference"}
# Multiples of columns that kernels take: ranks of adapters are filled up to them.
RANKS = {"mosaic": 64, "tokamax": 64, "megablox": 128}

Biases = tuple[Float[Array, "G U F"], Float[Array, "G D"]]


def expert_mlp(
    x_MD: Float[Array, "M D"],
    w_in_GDUF: Float[Array, "G D U F"],
    w_out_GFD: Float[Array, "G F D"],
    sizes_G: Int[Array, " G"],
    *,
    implementation: str,
    biases: Biases | None = None,
    adapters: tuple[Factors | None, Factors | None] = (None, None),
    gate: Gate = SWIGLU,
    one_M1: Float[Array, "M 1"] | None = None,
    schedule: tuple[Int[Array, "C ..."], int] | None = None,
) -> Float[Array, "M D"]:
    """Returns `y_MD`; rows past the last group are zero.

    FLOPs: 6 * rows * D * F. With F sharded over tensor the results are partial sums.

    Args:
      x_MD: rows sorted by group; rows past the last group are ignored.
      sizes_G: rows of each group, summing to at most M.
      implementation: "mosaic", "blocked", one of `grouped_matmul`'s, or of `IN_E4M3`, whose forward
        products round both operands; see `kernels.select`.
      biases: float32, added to the first product before the activation, and to the second.
      adapters: adapters of both weights; weights and biases are then frozen. They are a [G, K, A]
        and b [G, A, ...] with products of their own, added to the weight's.
      gate: the activation.
      one_M1: ones, which are not multiplied. Their gradient is each row's result times the gradient
        of that result, float32: found from the hidden layer, without the results.
      schedule: schedules of all C chunks, from `schedule_experts`, and this chunk's number.
    """
    plain = biases is None and gate == SWIGLU and adapters == (None, None)
    if implementation == "mosaic" and plain:
        if schedule is None:
            schedule = schedule_experts(sizes_G, x_MD.shape[0])[None], 0
        return swiglu_mlp(x_MD, w_in_GDUF, w_out_GFD, one_M1, *schedule)
    weights = ExpertWeights(w_in_GDUF, w_out_GFD, *(biases or (None, None)), *adapters)
    if implementation == "blocked":
        return blocked_mlp(MlpForm(gate), x_MD, weights, sizes_G, one_M1)
    weights = flat(weights)
    multiply = partial(_multiply, sizes_G=sizes_G, implementation=implementation)
    # Backward keeps the activation's operand alone, instead of float32 values between.
    activated = jax.checkpoint(partial(activate, gate=gate), prevent_cse=False)
    h_MW = multiply(x_MD, weights.w_in, weights.in_adapter)
    if biases is not None:
        h_MW = add_bias(h_MW, weights.b_in, sizes_G)
    a_MF = activated(checkpoint_name(h_MW, GATE_AND_UP))
    if one_M1 is not None:
        a_MF = with_dots(a_MF, one_M1)
    y_MD = multiply(a_MF, weights.w_out, weights.out_adapter)
    return y_MD if biases is None else add_bias(y_MD, weights.b_out, sizes_G, one_M1)


def _multiply(
    x_MK: jax.Array,
    w_GKN: jax.Array,
    adapter: Factors | None,
    *,
    sizes_G: jax.Array,
    implementation: str,
) -> jax.Array:
    """Multiplies rows by the weight of their group, and by its adapter; in e4m3 by the weight."""
    plain = IN_E4M3.get(implementation, implementation)
    of_weight = grouped_matmul if plain == implementation else grouped_matmul_e4m3
    y_MN = of_weight(x_MK, w_GKN, sizes_G, implementation=plain)
    if adapter is None:
        return y_MN
    a_GKA, b_GAN = _padded(adapter, RANKS.get(plain, 1))
    z_MA = grouped_matmul(x_MK, a_GKA, sizes_G, implementation=plain)
    return y_MN + grouped_matmul(z_MA, b_GAN, sizes_G, implementation=plain)


def _padded(adapter: Factors, multiple: int) -> Factors:
    """Pads the rank with zeros to a multiple that a kernel takes."""
    missing = -adapter.a.shape[2] % multiple
    if not missing:
        return adapter
    return Factors(
        jnp.pad(adapter.a, ((0, 0), (0, 0), (0, missing))),
        jnp.pad(adapter.b, ((0, 0), (0, missing), (0, 0))),
    )


def expert_mlp_adding(
    x_MD: jax.Array,
    weights: ExpertWeights,
    sums: ExpertWeights,
    sizes_G: jax.Array,
    *,
    gate: Gate = SWIGLU,
    met: int | None = None,
    one_M1: jax.Array | None = None,
) -> tuple[jax.Array, ExpertWeights]:
    """Returns `y_MD` of the blocked form, and `sums` as they are.

    Weights have no gradient of their own: backward adds it in place to the gradient of the returned
    sums, and returns that as the gradient of `sums`. Calls in chunks so share one array of
    gradients, and each touches the groups that it has rows for.

    Args:
      weights: w_in_GDUF and w_out_GFD, biases and adapters.
      sums: sums for the trained weights (`ExpertWeights.split`), float32; their values are unread.
      met: groups that are likely to have rows, for the price; None for all.
      one_M1: as in `expert_mlp`.
    """
    return blocked_mlp_adding(MlpForm(gate, met), x_MD, weights, sums, sizes_G, one_M1)
