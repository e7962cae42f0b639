"""The gradients of `dequantize_combine` against autodiff of the plain operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.permute import weighted_sum
from moejax.kernels.quantize import FORMATS, dequantize
from moejax.kernels.quantized_rows import dequantize_combine, permute_quantize
from tests.kernels.test_permute import placement


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("D", [32, 70])
def test_gradients_of_scales_and_weights_are_those_of_the_plain_operations(name, D):
    N, K, M, block = 6, 3, 13, 16
    rng = np.random.default_rng(0)
    place, assignment = placement(N, K, M, seed=0)
    x = jnp.asarray(rng.standard_normal((N, D)), jnp.float32)
    weight = jnp.asarray(rng.random((N, K)), jnp.float32)
    gradient = jnp.asarray(rng.standard_normal((N, D)), jnp.float32)
    q = permute_quantize(x, assignment // K, name, block=block)

    def fused(scale, weight):
        part = q._replace(scale=scale)
        return dequantize_combine(part, weight, place, assignment, name, D)

    def plain(scale, weight):
        return weighted_sum(dequantize(q._replace(scale=scale), name, D), weight, place, assignment)

    for have, want in zip(
        jax.vjp(fused, q.scale, weight)[1](gradient),
        jax.vjp(plain, q.scale, weight)[1](gradient),
        strict=True,
    ):
        top = np.abs(want).max()
        np.testing.assert_allclose(have, want, atol=2 * D * np.finfo(np.float32).eps * top)
