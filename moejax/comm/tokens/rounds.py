"""Overflow rounds: when rows do not fit the buckets, the layer runs in several rounds.

Per device, inside shard_map. Each round dispatches, computes and combines a share of the rows, in
buckets of the same size, so memory does not grow with skew. Every device runs the same number of
rounds, agreed on beforehand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Named scope of overflow rounds in the program.
ROUNDS = "rounds"

# (number of the round, operands, integers) -> this round's share of the result, which is like the
# first operand.
Round = Callable[[jax.Array, Any, Any], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_rounds(run_round: Round, count: jax.Array, operands: Any, integers: Any) -> jax.Array:
    """Returns the sum of `run_round(r, operands, integers)` over r < count, added up in float32.

    Nothing is saved for backward: it repeats each round, with its communication. Overflow is rare.

    Args:
      operands: differentiated; `integers` are not.
    """
    start = jnp.zeros(operands[0].shape, jnp.float32)
    with jax.named_scope(ROUNDS):
        total = lax.fori_loop(
            0, count, lambda r, total: total + run_round(r, operands, integers), start
        )
    return total.astype(operands[0].dtype)


def _forward(run_round, count, operands, integers):
    return in_rounds(run_round, count, operands, integers), (count, operands, integers)


def _backward(run_round, saved, gradient):
    count, operands, integers = saved

    def add(r: jax.Array, total: Any) -> Any:
        vjp = jax.vjp(lambda operands: run_round(r, operands, integers), operands)[1]
        return jax.tree.map(jnp.add, total, vjp(gradient)[0])

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)
    with jax.named_scope(ROUNDS):
        total = lax.fori_loop(0, count, add, start)
    total = jax.tree.map(lambda g, x: g.astype(x.dtype), total, operands)
    return None, total, None


in_rounds.defvjp(_forward, _backward)
