import jax.numpy as jnp
import numpy as np
import pytest

from moejax.comm.weights.adapters import (
    Adapter,
    WithAdapter,
    adapter_dims,
    add_adapter,
    attach_adapters,
    factor_gradients,
)
from moejax.comm.weights.path import compressible
from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout

MATRICES = {
    "DHC": ("DA", "AHC"),
    "HCD": ("HCA", "AD"),
    "DUF": ("DA", "AUF"),
    "FD": ("FA", "AD"),
    "EDUF": ("EDA", "EAUF"),
    "EFD": ("EFA", "EAD"),
    "DE": ("DA", "AE"),
    "DZ": ("DA", "AZ"),
    "ZHC": ("ZA", "AHC"),
    "VD": ("VA", "AD"),
    "DV": ("DA", "AV"),
    "UDO": ("UDA", "AO"),
}
SIZES = dict(zip("DHCUFEZVOA", (6, 2, 3, 2, 5, 4, 7, 8, 6, 2), strict=True))


@pytest.mark.parametrize("dims", MATRICES)
def test_factors_have_the_inputs_and_the_outputs_of_their_matrix(dims):
    assert adapter_dims(dims) == MATRICES[dims]
    assert not any(map(compressible, MATRICES[dims]))


@pytest.mark.parametrize("expert_weights", ["hidden", "folded", "whole"])
@pytest.mark.parametrize("dims", MATRICES)
def test_factors_are_sharded_as_their_matrix(dims, expert_weights):
    """So a shard of the sum needs no other shards."""
    layout = build_layout(MeshConfig(2, 2, 2, 2, expert_weights=expert_weights))
    axes = dict(zip(dims, layout.param_axes(dims), strict=True)) | {"A": ()}
    for factor in adapter_dims(dims):
        assert layout.param_axes(factor) == tuple(axes[letter] for letter in factor)


@pytest.mark.parametrize("dims", ["D", "C", "H", "Z", "HC", "GC", "EUF", "ED"])
def test_scales_and_biases_are_no_matrices(dims):
    assert adapter_dims(dims) is None


def draw(dims, rng):
    return rng.normal(size=[SIZES[letter] for letter in dims]).astype(np.float32)


@pytest.mark.parametrize("dims", MATRICES)
def test_the_gradient_of_factors_is_the_slope_of_the_sum(dims):
    """Along a direction of each factor, the sum moves by the product with its gradient."""
    rng = np.random.default_rng(0)
    weight, gradient = draw(dims, rng), draw(dims, rng)
    adapter = Adapter(*(jnp.array(draw(factor, rng)) for factor in MATRICES[dims]))

    def along(adapter):
        return float(np.sum(gradient * add_adapter(WithAdapter(weight, adapter), dims, 0.5)))

    got = factor_gradients(jnp.array(gradient), adapter, dims, 0.5)
    for name, letters in zip("ab", MATRICES[dims], strict=True):
        step = draw(letters, rng)
        moved = adapter._replace(**{name: getattr(adapter, name) + step})
        # The sum is linear in each factor.
        slope = float(np.sum(step * getattr(got, name)))
        assert along(moved) - along(adapter) == pytest.approx(slope, rel=1e-3, abs=1e-3)


def test_a_bfloat16_weight_is_added_to_in_float32():
    weight = jnp.ones((1, 1), jnp.bfloat16)
    adapter = Adapter(jnp.full((1, 1), 2.0**-6), jnp.full((1, 1), 2.0**-6))
    assert float(add_adapter(WithAdapter(weight, adapter), "DV", 1.0)[0, 0]) == 1 + 2.0**-12


def test_weights_without_an_adapter_stay_as_they_are():
    frozen = {"norm": jnp.ones(2), "w": jnp.ones((2, 2))}
    adapter = Adapter(jnp.ones((2, 1)), jnp.ones((1, 2)))
    attached = attach_adapters(frozen, {"norm": None, "w": adapter})
    assert attached["norm"] is frozen["norm"]
    assert attached["w"].weight is frozen["w"]
    assert attached["w"].adapter is adapter
