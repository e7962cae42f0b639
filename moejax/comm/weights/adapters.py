"""Adapters of frozen weights (LoRA): factors `a` and `b` whose product is added to a weight.

Per device, inside shard_map. An adapter travels beside its weight (`WithAdapter`), so a layer sees
one weight: the sum. The factors are parameters with dimensions of their own. `a` has the weight's
input dimensions and A, `b` has A and the output dimensions; experts lead in both. Each dimension is
sharded as in the weight, and A is not sharded. So a shard of the sum needs no other shards.
"""

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
    """A frozen weight's shard with the shards of its adapter's factors, on this device."""

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


def attach_adapters(frozen: Any, adapters: Any) -> Any:
    """Puts adapters beside the weights that they adapt.

    Args:
      adapters: an `Adapter` or None for each frozen weight.
    """
    return jax.tree.map(
        lambda weight, adapter: weight if adapter is None else WithAdapter(weight, adapter),
        frozen,
        adapters,
    )


def add_adapter(w: WithAdapter, dims: str, scale: float) -> jax.Array:
    """Returns the adapted weight's shard in float32: w + scale * a b. Layers may be stacked."""
    a_dims, b_dims = _factors(dims)
    product = jnp.einsum(f"...{a_dims},...{b_dims}->...{dims}", *w.adapter)
    return w.weight.astype(jnp.float32) + scale * product


def factor_gradients(gradient: jax.Array, w: Adapter, dims: str, scale: float) -> Adapter:
    """Returns the gradients of the factors in float32, from the gradient of the adapted weight.

    Args:
      w: the factors that belong to all of `gradient`, in its dtype.
    """
    a_dims, b_dims = _factors(dims)

    def product(formula: str, *operands: jax.Array) -> jax.Array:
        return scale * jnp.einsum(formula, *operands, preferred_element_type=jnp.float32)

    return Adapter(
        product(f"{dims},{b_dims}->{a_dims}", gradient, w.b),
        product(f"{a_dims},{dims}->{b_dims}", w.a, gradient),
    )


def _factors(dims: str) -> Adapter:
    factors = adapter_dims(dims)
    assert factors is not None, f"{dims} is no matrix"
    return factors
