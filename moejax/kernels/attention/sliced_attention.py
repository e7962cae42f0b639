"""Attention of a slice of a sequence to itself and to the slices before it.

Per device. Legend as in `kernels.attention.blocked`; S positions of the sequence in N slices of
T.

Devices work on different slices at a time, so each slice has a branch of its own, over the keys
that it may see: all slices together visit about as many pairs of positions as a whole sequence.
Backward takes the keys and values of earlier slices from its inputs, so they are not stored twice.
Source of the idea: TeraPipe (Li et al. 2021).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.kernels.attention.blocked import attention, blocked, blocked_gradients
from moejax.kernels.kept import ATTENDED


class Form(NamedTuple):
    """The static arguments of a branch, as in `attention`, and the slices that have one."""

    window: int | None
    scale: float
    implementation: str
    numbers: range

    @property
    def of_attention(self) -> dict[str, Any]:
        """The arguments of `attention`."""
        return {"window": self.window, "scale": self.scale, "implementation": self.implementation}

    def ends(self, length: int) -> list[int]:
        """Returns the number of positions that each slice, of `length` positions, may see."""
        return [(number + 1) * length for number in self.numbers]


def sliced_attention(
    q_BTHC: Float[Array, "B T H C"],
    k_BTGC: Float[Array, "B T G C"],
    v_BTGV: Float[Array, "B T G V"],
    past: tuple[Float[Array, "B S G C"], Float[Array, "B S G V"]],
    segment_BS: Int[Array, "B S"],
    number: Int[Array, ""],
    *,
    window: int | None,
    implementation: str,
    scale: float,
    sinks_H: Float[Array, " H"] | None = None,
    numbers: range | None = None,
) -> Float[Array, "B T H V"]:
    """Returns the result of `attention` for the queries of slice `number`.

    Args:
      past: keys and values of earlier slices, at their positions; all others count for nothing, and
        have gradients of zero.
      numbers: possible values of `number`; None: all.
    """
    numbers = numbers or range(segment_BS.shape[1] // q_BTHC.shape[1])
    form = Form(window, scale, implementation, numbers)
    return _sliced(form, q_BTHC, k_BTGC, v_BTGV, past, segment_BS, number, sinks_H)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sliced(form: Form, q_BTHC, k_BTGC, v_BTGV, past, segment_BS, number, sinks_H):
    return _forward(form, q_BTHC, k_BTGC, v_BTGV, past, segment_BS, number, sinks_H)[0]


def _forward(form: Form, q_BTHC, k_BTGC, v_BTGV, past, segment_BS, number, sinks_H):
    keys = _joined(past, (k_BTGC, v_BTGV), number)

    def branch(end: int, q_BTHC, keys, segment_BS, sinks_H):
        k_BSGC, v_BSGV = (x[:, :end] for x in keys)
        arrays = q_BTHC, k_BSGC, v_BSGV, segment_BS[:, :end]
        if form.implementation == "blocked":
            return blocked(*arrays, sinks_H, form.window, form.scale)
        return attention(*arrays, sinks_H=sinks_H, **form.of_attention), None

    branches = [partial(branch, end) for end in form.ends(q_BTHC.shape[1])]
    results = _of_slice(number - form.numbers[0], branches, q_BTHC, keys, segment_BS, sinks_H)
    results = jax.tree.map(lambda x: checkpoint_name(x, ATTENDED), results)
    saved = q_BTHC, k_BTGC, v_BTGV, past, segment_BS, number, sinks_H, results
    return results[0], saved


def _backward(form: Form, saved, dy_BTHV):
    q_BTHC, k_BTGC, v_BTGV, past, segment_BS, number, sinks_H, results = saved
    keys, T, S = _joined(past, (k_BTGC, v_BTGV), number), q_BTHC.shape[1], segment_BS.shape[1]

    def branch(end: int, q_BTHC, keys, segment_BS, sinks_H, results, dy_BTHV):
        k_BSGC, v_BSGV = (x[:, :end] for x in keys)
        arrays, segment_BS = (q_BTHC, k_BSGC, v_BSGV), segment_BS[:, :end]
        if form.implementation == "blocked":
            kept = *arrays, segment_BS, sinks_H, *results
            gradients = blocked_gradients(form.window, form.scale, kept, dy_BTHV)
        else:
            attend = partial(attention, segment_BS=segment_BS, **form.of_attention)
            pull = jax.vjp(lambda *x: attend(*x[:3], sinks_H=x[3]), *arrays, sinks_H)[1]
            gradients = pull(dy_BTHV)
        dq_BTHC, *of_keys, dsinks_H = gradients
        return dq_BTHC, [_widened(x, S) for x in of_keys], dsinks_H

    branches = [partial(branch, end) for end in form.ends(T)]
    arrays = q_BTHC, keys, segment_BS, sinks_H, results, dy_BTHV
    dq_BTHC, of_keys, dsinks_H = _of_slice(number - form.numbers[0], branches, *arrays)
    own = [lax.dynamic_slice_in_dim(x, number * T, T, axis=1) for x in of_keys]
    before = [
        lax.dynamic_update_slice_in_dim(x, jnp.zeros_like(part), number * T, axis=1)
        for x, part in zip(of_keys, own, strict=True)
    ]
    return dq_BTHC, *own, tuple(before), None, None, dsinks_H


_sliced.defvjp(_forward, _backward)


def _joined(past: Any, own: Any, number: jax.Array) -> tuple[jax.Array, ...]:
    """Returns keys and values with the slice's own at their positions."""
    first = number * own[0].shape[1]
    update = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
    return tuple(update(x, y) for x, y in zip(past, own, strict=True))


def _widened(x_BSGC: jax.Array, length: int) -> jax.Array:
    """Appends positions of zeros."""
    return jnp.pad(x_BSGC, ((0, 0), (0, length - x_BSGC.shape[1]), (0, 0), (0, 0)))


def _of_slice(number: jax.Array, branches: list[Any], *arrays: Any) -> Any:
    """Calls the branch of a slice. The middle slice's branch comes first: the planner prices it."""
    count = len(branches)
    order = [(n + count // 2) % count for n in range(count)]
    return lax.switch((number - count // 2) % count, [branches[n] for n in order], *arrays)
