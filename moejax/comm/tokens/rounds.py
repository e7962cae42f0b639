"""Overflow rounds: rows that do not fit the buckets follow the others in rounds.

Per device, inside shard_map. Rows that fit take the layer's route. Each round then dispatches,
computes and combines a share of the rest, in small buckets of one size, so memory does not grow
with skew. Every device runs the same number of rounds, agreed on beforehand; mostly none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Named scope of overflow rounds in the program.
ROUNDS = "rounds"

# (operands, constants) -> the result of the rows that fit.
Usual = Callable[[Any, Any], jax.Array]
# (number of the round, operands, constants) -> this round's share of the result.
Round = Callable[[jax.Array, Any, Any], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_rounds(
    run_usual: Usual, run_round: Round, count: jax.Array, operands: Any, constants: Any
) -> jax.Array:
    """Returns `run_usual(...)`, and added to it `run_round(r, ...)` for r < count, in that order.

    If there are rounds, they are added up in float32, and rounded once. Nothing of a round is saved
    for backward: it repeats each round, with its communication.

    Args:
      operands: differentiated; `constants` are not.
    """
    y = run_usual(operands, constants)
    return _add_rounds(run_round, count, y, operands, constants)


def _add_rounds(
    run_round: Round, count: jax.Array, y: jax.Array, operands: Any, constants: Any
) -> jax.Array:
    def add(y: jax.Array, operands: Any, constants: Any) -> jax.Array:
        def one(r: jax.Array, total: jax.Array) -> jax.Array:
            return total + run_round(r, operands, constants)

        with jax.named_scope(ROUNDS):
            total = lax.fori_loop(0, count, one, y.astype(jnp.float32))
        return total.astype(y.dtype)

    return lax.cond(count > 0, add, lambda y, *_: y, y, operands, constants)


def _forward(run_usual, run_round, count, operands, constants):
    y, pull = jax.vjp(lambda operands: run_usual(operands, constants), operands)
    y = _add_rounds(run_round, count, y, operands, constants)
    return y, (pull, count, operands, constants)


def _backward(run_usual, run_round, saved, gradient):
    pull, count, operands, constants = saved
    (gradients,) = pull(gradient)

    def add(gradients: Any, gradient: jax.Array, operands: Any, constants: Any) -> Any:
        def one(r: jax.Array, total: Any) -> Any:
            vjp = jax.vjp(lambda operands: run_round(r, operands, constants), operands)[1]
            return jax.tree.map(jnp.add, total, vjp(gradient)[0])

        with jax.named_scope(ROUNDS):
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), gradients)
            total = lax.fori_loop(0, count, one, wide)
        return jax.tree.map(lambda g, x: g.astype(x.dtype), total, gradients)

    arguments = (gradients, gradient, operands, constants)
    return None, lax.cond(count > 0, add, lambda gradients, *_: gradients, *arguments), None


with_rounds.defvjp(_forward, _backward)
