"""Payloads as bytes, so that all arrays of a payload travel in one message.

Per device; nothing here communicates.
"""

import math

import jax
import jax.numpy as jnp

from moejax.comm.codecs.codec import Payload


def pack(payload: Payload, lead: int = 1) -> jax.Array:
    """Joins all arrays of a payload as bytes [..., m]; keeps `lead` dimensions."""
    rows = [_bytes(leaf).reshape(*leaf.shape[:lead], -1) for leaf in jax.tree.leaves(payload)]
    return jnp.concatenate(rows, axis=-1)


def unpack(packed: jax.Array, like: Payload) -> Payload:
    """The inverse of `pack`; leading sizes may differ from `like`'s."""
    leaves, tree = jax.tree.flatten(like)
    lead, start, arrays = packed.ndim - 1, 0, []
    for leaf in leaves:
        itemsize = (leaf.dtype.itemsize,) if leaf.dtype.itemsize > 1 else ()
        shape = (*leaf.shape[lead:], *itemsize)
        piece, start = packed[..., start : start + math.prod(shape)], start + math.prod(shape)
        piece = piece.reshape(*packed.shape[:-1], *shape)
        dtype = leaf.dtype
        arrays.append(piece if dtype == jnp.uint8 else jax.lax.bitcast_convert_type(piece, dtype))
    return jax.tree.unflatten(tree, arrays)


def _bytes(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)
