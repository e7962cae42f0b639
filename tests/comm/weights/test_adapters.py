import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.comm.weights.adapters import (
    AdaptedWeight,
    Adapter,
    adapter_dims,
    add_adapter,
    product,
    scaled,
    transposed,
)
from moejax.comm.weights.path import compressible
from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout
from moejax.model.layers import logits, rows_of

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
SIZES = dict(zip("DHCUFEZVOAT", (6, 2, 3, 2, 5, 4, 7, 8, 6, 2, 9), strict=True))
SCALE = 0.5


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


INPUTS = {"DHC": "D", "HCD": "HC", "DUF": "D", "FD": "F", "DZ": "D", "ZHC": "Z", "DV": "D"}
INPUTS |= {"VD": "V", "UDO": "UD"}


@pytest.mark.parametrize("dims", INPUTS)
def test_a_product_is_that_with_the_sum_of_weight_and_adapter(dims):
    """Value and gradients of rows and factors, against NumPy."""
    rng, inputs = np.random.default_rng(0), INPUTS[dims]
    weight, (a, b) = draw(dims, rng), (draw(factor, rng) for factor in MATRICES[dims])
    x = draw("TD".replace("D", inputs), rng) if len(inputs) == 1 else draw("T" + inputs, rng)
    x = x.reshape(len(x), -1)
    whole = weight + SCALE * np.einsum(f"{MATRICES[dims][0]},{MATRICES[dims][1]}->{dims}", a, b)
    whole = whole.reshape(x.shape[1], -1).astype(np.float64)

    def run(x, adapter):
        return product(x, AdaptedWeight(jnp.asarray(weight), scaled(adapter, SCALE, "float32")))

    y, pull = jax.vjp(run, jnp.asarray(x), Adapter(jnp.asarray(a), jnp.asarray(b)))
    np.testing.assert_allclose(y, x @ whole, rtol=1e-4, atol=1e-4)
    dy = rng.normal(size=y.shape).astype(np.float32)
    dx, (da, db) = pull(jnp.asarray(dy))
    a, b, dw = a.reshape(x.shape[1], -1), b.reshape(b.shape[0], -1), x.T @ dy
    np.testing.assert_allclose(dx, dy @ whole.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(da.reshape(a.shape), SCALE * dw @ b.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(db.reshape(b.shape), SCALE * a.T @ dw, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs"), [((1024,), (4, 64)), ((8, 128), (256,))])
def test_what_a_young_adapter_adds_in_bfloat16_is_right(inputs, outputs):
    """As it is after ten steps of Adam; added to the weight before rounding it is 23 % off."""
    x, w, adapter, wanted = young()
    a, b = adapter.a.reshape(*inputs, -1), adapter.b.reshape(-1, *outputs)
    both = scaled(Adapter(a, b), 2.0, "bfloat16")
    got = product(x, AdaptedWeight(w.reshape(*inputs, *outputs), both))
    assert error(got, wanted) < 0.005


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_rows_of_a_young_adapter_are_right(tied):
    x, w, adapter, wanted = young()
    both = AdaptedWeight(w, scaled(adapter, 2.0, "bfloat16"))
    if tied:
        both = transposed(transposed(both))
    assert error(logits(x, both), wanted) < 0.005
    # The table is zero, so only the rows of its adapter are left.
    table = AdaptedWeight(jnp.zeros_like(w), both.adapter)
    a, b = (np.asarray(factor, np.float64) for factor in adapter)
    assert error(rows_of(table, jnp.arange(9)[None]), 2 * a[:9] @ b) < 0.005


def young():
    """Rows, a weight, an adapter after ten steps, and what it adds to the rows' product.

    The halves of rows are equal and those of the weight are opposites, so that the product without
    the adapter is zero, and its rounding hides nothing.
    """
    rng = np.random.default_rng(0)
    x = np.tile(rng.normal(size=(64, 512)), 2)
    w = 0.02 * rng.normal(size=(512, 256))
    a = rng.uniform(-1, 1, (1024, 16)) / 1024**0.5
    b = 1e-3 * rng.choice([-1, 1], (16, 256)) * rng.uniform(0.5, 1, (16, 256))
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(np.concatenate([w, -w]), jnp.bfloat16)
    wanted = 2 * np.asarray(x, np.float64) @ a @ b
    return x, w, Adapter(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)), wanted


def error(got, wanted):
    """Root mean square of the difference, over that of what is wanted."""
    got = np.asarray(got, np.float64).reshape(wanted.shape)
    return np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2))


def test_the_sum_of_a_weight_and_its_adapter_is_float32():
    weight = jnp.ones((1, 1), jnp.bfloat16)
    adapter = Adapter(jnp.full((1, 1), 2.0**-6), jnp.full((1, 1), 2.0**-6))
    assert float(add_adapter(AdaptedWeight(weight, adapter), "DV")[0, 0]) == 1 + 2.0**-12
