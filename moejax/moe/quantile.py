"""Quantile balancing: the selection biases with which every expert gets an even load.

A token chooses an expert if score plus bias exceeds the token's cut, the (K + 1)-th largest of
these sums. So an expert needs a bias above cut - score for each token that shall choose it. The
K / E quantile of that difference over a step's tokens is the bias with which K / E of them do. It
is read from a histogram, which adds up over micro-batches and devices.

Bins are even in asinh(E * x), not in x as in the report: softmax scores are near 1 / E, and a
thousand even bins would hold most of them in a few.

Per device, in float32. No gradient passes. Letters: N tokens, E experts, K choices a token, Q bins,
L layers.

Source: Kimi K3 technical report (2026), section 2.3.3 and appendices C and D; Su (2026),
kexue.fm/archives/11619. In trainers: Megatron-LM#6637, torchtitan#4577, Marin#7279.
"""

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Float, Int


def count_needed(
    score_NE: Float[Array, "N E"], cut_N1: Float[Array, "N 1"], bias_E: Float[Array, " E"], Q: int
) -> Int[Array, "E Q"]:
    """Counts for each expert the tokens by the bias that they need to choose it.

    Args:
      cut_N1: the (K + 1)-th largest sum of score and bias of each token (`router.route`).
      bias_E: the biases of that choice, which decide the bins' range.
      Q: number of bins.
    """
    E = bias_E.shape[0]
    needed_NE = jax.lax.stop_gradient(cut_N1 - score_NE)
    first, last = _ends(bias_E)
    place_NE = (jnp.arcsinh(E * needed_NE) - first) / (last - first) * Q
    bin_NE = jnp.clip(place_NE.astype(jnp.int32), 0, Q - 1)
    return jnp.zeros((E, Q), jnp.int32).at[jnp.arange(E), bin_NE].add(1)


def balanced_bias(
    count_LEQ: Int[Array, "L E Q"], bias_LE: Float[Array, "L E"], *, k: int
) -> Float[Array, "L E"]:
    """Returns the next selection biases: the k / E quantiles, less their mean over the experts.

    Inside a bin tokens count as evenly spread.

    Args:
      count_LEQ: counts of `count_needed`, summed over a step's micro-batches and all devices.
      bias_LE: the biases that the step used.
    """
    E, Q = count_LEQ.shape[1:]
    first_L11, last_L11 = _ends(bias_LE[..., None], axis=1)
    sum_LEQ = jnp.cumsum(count_LEQ, axis=2)
    wanted_LE1 = sum_LEQ[:, :, -1:].astype(jnp.float32) * (k / E)
    bin_LE1 = jnp.argmax(sum_LEQ >= wanted_LE1, axis=2, keepdims=True)
    count_LE1, sum_LE1 = (jnp.take_along_axis(x, bin_LE1, axis=2) for x in (count_LEQ, sum_LEQ))
    place_LE1 = bin_LE1 + 1 - (sum_LE1 - wanted_LE1) / count_LE1
    needed_LE1 = jnp.sinh(first_L11 + place_LE1 / Q * (last_L11 - first_L11)) / E
    return (needed_LE1 - jnp.mean(needed_LE1, axis=1, keepdims=True))[..., 0]


def _ends(bias: jax.Array, axis: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns the ends of the bins: scores lie in 0 .. 1, so no difference is outside."""
    E = bias.shape[axis]
    lowest = jnp.min(bias, axis=axis, keepdims=axis > 0) - 1
    highest = jnp.max(bias, axis=axis, keepdims=axis > 0) + 1
    return jnp.arcsinh(E * lowest), jnp.arcsinh(E * highest)
