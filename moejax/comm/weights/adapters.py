"""Adapters of frozen weights (LoRA): factors `a` and `b` whose product is added to a weight.

Per device, inside shard_map. An adapter's shards enter beside its weight's (`Shard.adapter`). All
are gathered, and a layer gets an `AdaptedWeight`, by which `product` multiplies. The factors are
parameters with dimensions of their own. `a` has the weight's input dimensions and A, `b` has A and
the output dimensions; experts lead in both. Each dimension is sharded as in the weight, and A is
not sharded. So a device has the factors that belong to its part of the weight.

Letters: A the rank; K the dimensions that a product sums over and N the others, each flattened.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.layout.layout import RANK, is_product


class Adapter(NamedTuple):
    """The two factors of an adapter: arrays, `Shard`s, shapes, or dimension letters."""

    a: Any
    b: Any


class AdaptedWeight(NamedTuple):
    """A frozen weight and its adapter, gathered, as a layer multiplies by them."""

    weight: jax.Array
    adapter: Adapter  # in the dtype of its products, and `b` has the adapter's scale in it


# As a layer multiplies by it.
Weight = jax.Array | AdaptedWeight


def adapter_dims(dims: str) -> Adapter | None:
    """Returns the letters of the factors of a weight's adapter; None if the weight is no matrix.

    A matrix maps the model's width (D) or a latent (Z) to other dimensions, or others to D or O.
    "DHC" has the factors "DA" and "AHC", "HCD" has "HCA" and "AD", "EDUF" has "EDA" and "EAUF".
    """
    if not is_product(dims):
        return None
    experts, rest = ("E", dims[1:]) if dims[0] == "E" else ("", dims)
    inputs = 1 if rest[0] in "DZ" else len(rest) - 1
    return Adapter(experts + rest[:inputs] + RANK, experts + RANK + rest[inputs:])


def shape_of(w: Weight) -> tuple[int, ...]:
    """Returns the shape of a weight, or of the weight that has an adapter."""
    return (w.weight if isinstance(w, AdaptedWeight) else w).shape


def product(x_K: jax.Array, w: Weight) -> jax.Array:
    """Returns x @ w for each row, [..., N]; of an adapted weight x @ w + (x @ a) @ b.

    The adapter has products of its own, so that its part is rounded by its own size: added to the
    weight in bfloat16, a young adapter would vanish in the weight's rounding.

    Args:
      x_K: [..., K].
      w: gathered; the dimensions of K come first.
    """
    K = x_K.shape[-1]
    if not isinstance(w, AdaptedWeight):
        return x_K @ w.reshape(K, -1)
    z_A = x_K @ w.adapter.a.reshape(K, -1)
    return product(x_K, w.weight) + product(z_A, w.adapter.b)


def transposed(w: Weight) -> Weight:
    """Returns a matrix of two dimensions, transposed with its adapter."""
    if not isinstance(w, AdaptedWeight):
        return w.T
    return AdaptedWeight(w.weight.T, Adapter(w.adapter.b.T, w.adapter.a.T))


def add_adapter(w: AdaptedWeight, dims: str) -> jax.Array:
    """Returns the sum of a gathered weight and its adapter, in float32. Layers may be stacked."""
    a_dims, b_dims = factors_of(dims)
    a, b = (factor.astype(jnp.float32) for factor in w.adapter)
    return w.weight.astype(jnp.float32) + jnp.einsum(f"...{a_dims},...{b_dims}->...{dims}", a, b)


def scaled(adapter: Adapter, scale: float, dtype: str) -> Adapter:
    """Returns the factors in the dtype of their products, with the adapter's scale in b."""
    return Adapter(adapter.a.astype(dtype), (scale * adapter.b).astype(dtype))


def factors_of(dims: str) -> Adapter:
    """Returns `adapter_dims` of a matrix."""
    factors = adapter_dims(dims)
    assert factors is not None, f"{dims} is no matrix"
    return factors
