"""Adapters of frozen weights (LoRA): factors `a` and `b` whose product is added to a weight.

Per device, inside shard_map. An adapter travels beside its weight (`WithAdapter`), as shards and as
gathered arrays, and `product` multiplies by both. The factors are parameters with dimensions of
their own. `a` has the weight's input dimensions and A, `b` has A and the output dimensions; experts
lead in both. Each dimension is sharded as in the weight, and A is not sharded. So a device has the
factors that belong to its part of the weight.

Letters: A the rank; K what a product sums over, N its results, flattened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.layout.layout import RANK, is_product


class Adapter(NamedTuple):
    """The two factors of an adapter: arrays, or what describes them."""

    a: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclass
class WithAdapter:
    """A frozen weight with its adapter's factors: shards, or what was gathered of them.

    Gathered, they are in the dtype of their products, and `b` has the adapter's scale in it.
    """

    weight: Any  # an array; Any because JAX builds trees of other leaves too
    adapter: Any  # an `Adapter`


def adapter_dims(dims: str) -> Adapter | None:
    """The letters of the factors of a weight's adapter; None if the weight is no matrix.

    A matrix maps the model's width (D) or a latent (Z) to other dimensions, or others to D or O.
    "DHC" has the factors "DA" and "AHC", "HCD" has "HCA" and "AD", "EDUF" has "EDA" and "EAUF".
    """
    if not is_product(dims):
        return None
    experts, rest = ("E", dims[1:]) if dims[0] == "E" else ("", dims)
    inputs = 1 if rest[0] in "DZ" else len(rest) - 1
    return Adapter(experts + rest[:inputs] + RANK, experts + RANK + rest[inputs:])


def attach_adapters(
    frozen: Any, adapters: Any, is_weight: Callable[[Any], bool] | None = None
) -> Any:
    """Puts adapters beside the weights that they adapt.

    Args:
      adapters: an `Adapter` or None for each frozen weight.
      is_weight: tells a weight that is a tree itself.
    """
    return jax.tree.map(
        lambda weight, adapter: weight if adapter is None else WithAdapter(weight, adapter),
        frozen,
        adapters,
        is_leaf=is_weight,
    )


def shape_of(w: jax.Array | WithAdapter) -> tuple[int, ...]:
    """Returns the shape of a weight, or of the weight that has an adapter."""
    return (w.weight if isinstance(w, WithAdapter) else w).shape


def product(x_K: jax.Array, w: jax.Array | WithAdapter) -> jax.Array:
    """Returns x @ w for each row, [..., N]; of an adapted weight x @ w + (x @ a) @ b.

    The adapter has products of its own, so that what it adds is rounded by its own size: added to
    the weight in bfloat16, a young adapter would vanish in the weight's rounding.

    Args:
      x_K: [..., K], where K are the dimensions that w sums over, flattened.
      w: gathered, with its other dimensions, flattened to N, after those.
    """
    K = x_K.shape[-1]
    if not isinstance(w, WithAdapter):
        return x_K @ w.reshape(K, -1)
    z_A = x_K @ w.adapter.a.reshape(K, -1)
    return product(x_K, w.weight) + product(z_A, w.adapter.b)


def transposed(w: jax.Array | WithAdapter) -> jax.Array | WithAdapter:
    """Returns a matrix of two dimensions, transposed with its adapter."""
    if not isinstance(w, WithAdapter):
        return w.T
    return WithAdapter(w.weight.T, Adapter(w.adapter.b.T, w.adapter.a.T))


def add_adapter(w: WithAdapter, dims: str) -> jax.Array:
    """Returns the sum of a gathered weight and its adapter, in float32. Layers may be stacked."""
    a_dims, b_dims = _factors(dims)
    a, b = (factor.astype(jnp.float32) for factor in w.adapter)
    return w.weight.astype(jnp.float32) + jnp.einsum(f"...{a_dims},...{b_dims}->...{dims}", a, b)


def scaled(adapter: Adapter, scale: float, dtype: str) -> Adapter:
    """Returns the factors in the dtype of their products, with the adapter's scale in b."""
    return Adapter(adapter.a.astype(dtype), (scale * adapter.b).astype(dtype))


def _factors(dims: str) -> Adapter:
    factors = adapter_dims(dims)
    assert factors is not None, f"{dims} is no matrix"
    return factors
