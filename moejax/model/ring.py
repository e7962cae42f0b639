"""Attention along a ring: keys and values travel from device to device, a hop at a time.

Per device, inside shard_map. It holds the keys of one other device at a time, and each hop stands
behind the attention of the one before. Source: ring attention (Liu et al. 2023). One loop is traced
over the hops: unrolled, XLA runs many of them one after the other.

Letters as in `comm.context`; X the channels of a key and its value together.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.comm import context, wire
from moejax.kernels.attention.blocked import MASKED
from moejax.kernels.attention.ranged import (
    IMPLEMENTATIONS,
    Extent,
    PartialAttention,
    join_sinks,
    merge,
    ranges,
    sink_gradient,
)
from moejax.kernels.kept import ATTENDED
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec


class Ring(NamedTuple):
    """The static arguments."""

    layout: Layout
    window: int | None
    implementation: str
    scale: float
    gradient_dtype: str  # of the sums of gradients that travel
    inside: float  # as of `Extent`


def attend(
    q_BTHC: Float[Array, "B T H C"],
    k_BTGC: Float[Array, "B T G C"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    segment: Int[Array, "B _"],
    window: int | None,
    spec: StepSpec,
    scale: float,
    sinks_H: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H V"]:
    """Returns the attention of this device's queries to all keys of their sequences.

    Wire: keys and values of a device, c - 1 times; in backward again, and sums of their gradients
    c times.

    Args:
      segment: document of each position of the sequences.
    """
    kinds = spec.attention, scale, spec.gradient_dtype, spec.documents
    ring = Ring(spec.layout, window, *kinds)
    return _attend(ring, q_BTHC, jnp.concatenate([k_BTGC, v_BTGV], axis=-1), segment, sinks_H)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, q_BTHC, kv_BTGX, segment_BS, sinks_H):
    return _forward(ring, q_BTHC, kv_BTGX, segment_BS, sinks_H)[0]


def _forward(ring: Ring, q_BTHC, kv_BTGX, segment_BS, sinks_H):
    kernel, C = IMPLEMENTATIONS[ring.implementation], q_BTHC.shape[-1]

    def see(kv_BTGX, merged: PartialAttention, hop):
        keys, extent = _keys(ring, kv_BTGX, segment_BS, hop, C)
        found = PartialAttention(*kernel.forward(q_BTHC, *keys, scale=ring.scale, extent=extent))
        return merge([merged, found])

    def see_and_pass(carry, hop):
        kv_BTGX, merged = carry
        return (_pass_on(ring, kv_BTGX), see(kv_BTGX, merged, hop)), None

    last = _devices(ring) - 1
    y_BTHV = jnp.zeros((*q_BTHC.shape[:3], kv_BTGX.shape[-1] - C), jnp.float32)
    nothing = PartialAttention(y_BTHV, jnp.full(q_BTHC.shape[:3], MASKED))
    carry, _ = lax.scan(see_and_pass, (kv_BTGX, nothing), jnp.arange(last))
    y_BTHV, log_BTH = join_sinks(see(*carry, last), sinks_H)
    y_BTHV, log_BTH = (
        checkpoint_name(x, ATTENDED) for x in (y_BTHV.astype(kv_BTGX.dtype), log_BTH)
    )
    return y_BTHV, (q_BTHC, kv_BTGX, segment_BS, sinks_H, y_BTHV, log_BTH)


def _backward(ring: Ring, saved, dy_BTHV):
    """Each device's keys pass on, and behind them, a hop later, the sum of their gradients so far.

    So neither waits for the products of its own hop.
    """
    q_BTHC, kv_BTGX, segment_BS, sinks_H, y_BTHV, log_BTH = saved
    kernel, C = IMPLEMENTATIONS[ring.implementation], q_BTHC.shape[-1]

    def gradients(kv_BTGX, hop):
        keys, extent = _keys(ring, kv_BTGX, segment_BS, hop, C)
        whole = y_BTHV, log_BTH, dy_BTHV
        dq, dk, dv = kernel.gradients(q_BTHC, *keys, *whole, scale=ring.scale, extent=extent)
        own_BTGX = jnp.concatenate([dk, dv], axis=-1).astype(ring.gradient_dtype)
        return own_BTGX, dq.astype(jnp.float32)

    def add(kv_BTGX, dkv_BTGX, dq_BTHC, hop):
        arrived_BTGX, (own_BTGX, dq) = _pass_on(ring, dkv_BTGX), gradients(kv_BTGX, hop)
        return arrived_BTGX + own_BTGX, dq_BTHC + dq

    def add_and_pass(carry, hop):
        kv_BTGX, dkv_BTGX, dq_BTHC = carry
        sums = add(kv_BTGX, dkv_BTGX, dq_BTHC, hop)
        return (_pass_on(ring, kv_BTGX), *sums), None

    last = _devices(ring) - 1
    carry = _pass_on(ring, kv_BTGX), *gradients(kv_BTGX, 0)
    carry, _ = lax.scan(add_and_pass, carry, jnp.arange(1, last))
    kv_BTGX, dkv_BTGX, dq_BTHC = carry
    dkv_BTGX, dq_BTHC = add(kv_BTGX, dkv_BTGX, dq_BTHC, last)
    dkv_BTGX = _pass_on(ring, dkv_BTGX).astype(kv_BTGX.dtype)  # home again
    dsinks_H = sink_gradient(sinks_H, y_BTHV, log_BTH, dy_BTHV)
    return dq_BTHC.astype(q_BTHC.dtype), dkv_BTGX, None, dsinks_H


_attend.defvjp(_forward, _backward)


def _devices(ring: Ring) -> int:
    return ring.layout.size(ring.layout.context)


def _keys(ring: Ring, kv_BTGX, segment_BS, hop, width: int) -> tuple[tuple[Any, ...], Extent]:
    """Keys, values and ranges of the device that is `hop` before this one; and what is known."""
    layout, S, c = ring.layout, segment_BS.shape[1], _devices(ring)
    owner = (wire.index(layout.context) - hop) % c
    first_BT, last_BT = ranges(segment_BS, context.positions(S, layout), ring.window)
    seen = (
        context.keys_before(first_BT, owner, layout),
        context.keys_before(last_BT + 1, owner, layout) - 1,
    )
    starts = tuple(start // c for start in range(0, S, layout.stripe))
    window = None if ring.window is None else -(-ring.window // c)
    facts = {"before": True, "run": layout.stripe, "inside": ring.inside}
    extent = Extent(starts, window, ring.window, **facts)
    return (*jnp.split(kv_BTGX, [width], axis=-1), *seen), extent


def _pass_on(ring: Ring, x: jax.Array) -> jax.Array:
    """Sends an array to the next device, and that of the last to the first.

    A chain, and a permute of its own for the way around: see `comm.links`.
    """
    axes, last = ring.layout.context, _devices(ring) - 1
    with jax.named_scope(context.CONTEXT):
        moved = wire.ppermute(x, axes, [(i, i + 1) for i in range(last)])
        around = wire.ppermute(x, axes, [(last, 0)])
        return jnp.where(wire.index(axes) == 0, around, moved)
