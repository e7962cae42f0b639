"""Weights of experts, and of their adapters, which have products of their own.

Per device. Legend: G groups (experts), D width, F hidden, A rank of an adapter; B rows of one
group, X and Y columns of two arrays of rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Factors(NamedTuple):
    """Factors of an adapter, of all groups or of one: x @ a @ b is added to x @ w."""

    a: jax.Array  # [X, A]
    b: jax.Array  # [A, Y]; of `ExpertWeights.in_adapter` [A, 2, F]


class ExpertWeights(NamedTuple):
    """Weights of all groups (G in front), or of one; their gradients.

    With an adapter all but adapters are frozen, and have no gradients: None stands for them.
    """

    w_in: Any  # [D, 2, F]
    w_out: Any  # [F, D]
    b_in: jax.Array | None = None  # [2, F], float32
    b_out: jax.Array | None = None  # [D], float32
    in_adapter: Factors | None = None
    out_adapter: Factors | None = None

    def split(self) -> "tuple[ExpertWeights, ExpertWeights]":
        """Returns the trained weights, and the frozen ones; None stands for the others."""
        adapters = ExpertWeights(None, None, None, None, self.in_adapter, self.out_adapter)
        if self.adapters == (None, None):
            return self, adapters
        return adapters, self._replace(in_adapter=None, out_adapter=None)

    @property
    def biases(self) -> tuple[jax.Array, jax.Array] | None:
        """Biases of both products."""
        return None if self.b_in is None or self.b_out is None else (self.b_in, self.b_out)

    @property
    def adapters(self) -> tuple[Factors | None, Factors | None]:
        """Adapters of both products."""
        return self.in_adapter, self.out_adapter

    def joined(self, others: "ExpertWeights") -> "ExpertWeights":
        """The inverse of `split`."""
        return ExpertWeights._make(x if y is None else y for x, y in zip(self, others, strict=True))


def flat(weights: ExpertWeights) -> ExpertWeights:
    """Weights of all groups or of one, with gate and up in one dimension."""

    def joined(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-2], -1)

    b_in, adapter = weights.b_in, weights.in_adapter
    return weights._replace(
        w_in=joined(weights.w_in),
        b_in=None if b_in is None else joined(b_in),
        in_adapter=None if adapter is None else adapter._replace(b=joined(adapter.b)),
    )


def times(x_BX: jax.Array, w_XY: jax.Array, adapter: Factors | None) -> jax.Array:
    """Returns x @ w, plus x @ a @ b if there is an adapter."""
    y_BY = x_BX @ w_XY
    return y_BY if adapter is None else y_BY + (x_BX @ adapter.a) @ adapter.b


def times_transposed(dy_BY: jax.Array, w_XY: jax.Array, adapter: Factors | None) -> jax.Array:
    """Returns the gradient of x in `times`."""
    dx_BX = dy_BY @ w_XY.T
    return dx_BX if adapter is None else dx_BX + (dy_BY @ adapter.b.T) @ adapter.a.T


def weight_gradients(w: ExpertWeights, x_BD, dh_BW, a_BF, dy_BD) -> ExpertWeights:
    """Returns the trained weights' gradients from these rows, float32.

    Args:
      x_BD, a_BF: operands of the two products.
      dh_BW, dy_BD: gradients of their results.
    """
    if w.adapters != (None, None):
        in_adapter = _factor_gradients(x_BD, dh_BW, w.in_adapter)
        out_adapter = _factor_gradients(a_BF, dy_BD, w.out_adapter)
        return ExpertWeights(None, None, None, None, in_adapter, out_adapter)
    part = ExpertWeights(_outer(x_BD, dh_BW), _outer(a_BF, dy_BD))
    if w.b_in is None:
        return part
    return part._replace(b_in=_sum_rows(dh_BW), b_out=_sum_rows(dy_BD))


def _factor_gradients(x_BX: jax.Array, dy_BY: jax.Array, adapter: Factors | None) -> Factors | None:
    """Returns the gradients of an adapter's factors in `times`, float32."""
    if adapter is None:
        return None
    return Factors(_outer(x_BX, dy_BY @ adapter.b.T), _outer(x_BX @ adapter.a, dy_BY))


def _outer(x_BX: jax.Array, y_BY: jax.Array) -> jax.Array:
    """Sums the rows' outer products in float32."""
    dims = (((0,), (0,)), ((), ()))
    return lax.dot_general(x_BX, y_BY, dims, preferred_element_type=jnp.float32)


def _sum_rows(x_BN: jax.Array) -> jax.Array:
    """Sums rows in float32."""
    return jnp.sum(x_BN.astype(jnp.float32), axis=0)
