"""What does not fit its buckets goes in rounds: as often as needed, in the same memory.

Per device, inside shard_map. Every device runs the same number of rounds, agreed on beforehand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The scope in which rounds stand in the program.
ROUNDS = "rounds"

# (number of the round, operands, integers) -> its share of the result.
Round = Callable[[jax.Array, Any, Any], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_rounds(one: Round, count: jax.Array, operands: Any, integers: Any) -> jax.Array:
    """Returns the sum of `one(r, operands, integers)` over r < count, added up in float32.

    Backward repeats each round, its communication too: rounds are for skew that is rare, and
    keep no memory of their own.
    """
    shape = jax.eval_shape(one, count, operands, integers)
    start = jnp.zeros(shape.shape, jnp.float32)
    with jax.named_scope(ROUNDS):
        total = lax.fori_loop(0, count, lambda r, total: total + one(r, operands, integers), start)
    return total.astype(shape.dtype)


def _forward(one, count, operands, integers):
    return in_rounds(one, count, operands, integers), (count, operands, integers)


def _backward(one, saved, gradient):
    count, operands, integers = saved

    def add(r: jax.Array, total: Any) -> Any:
        pull = jax.vjp(lambda operands: one(r, operands, integers), operands)[1]
        return jax.tree.map(jnp.add, total, pull(gradient)[0])

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)
    with jax.named_scope(ROUNDS):
        total = lax.fori_loop(0, count, add, start)
    total = jax.tree.map(lambda g, x: g.astype(x.dtype), total, operands)
    return None, total, None


in_rounds.defvjp(_forward, _backward)
