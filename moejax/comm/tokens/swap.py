"""The collective of one hop: bucket rows to peers, and results back.

Per device, inside shard_map. Buckets have a fixed number of rows, padded, because every
backend's all-to-all supports static shapes.

Letters: those of `comm.tokens`. A part's rows are M before an exchange (its Q slots) and after it.
Other dimensions may follow: `x_PIJ` is [P, I, J, ...].
"""

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec, Payload, pack, unpack
from moejax.comm.tokens.rows import encode
from moejax.layout.layout import Layout
from moejax.layout.route import Hop

# Steps into which a bucket's rows are divided when only filled rows travel.
PIECES = 128


def send(
    x_IM: jax.Array,
    hop: Hop,
    layout: Layout,
    *,
    gradient: bool = False,
    filled: jax.Array | None = None,
) -> jax.Array:
    """Sends bucket rows [I, M, ...], ordered by peer, over one hop; returns the rows that arrive.

    On hop 0 rows leave their source encoded, by `swap_encoded` (`hops`); here those of later hops,
    weights and expert numbers. The result has no remat tag: the pipeline tags rows that arrive.
    Wire per device: all_to_all (P - 1) / P of x's bytes, gather (n - 1) times x's bytes, sum
    nothing (a gradient: an all-reduce).

    Args:
      gradient: x is a gradient of results, not tokens.
      filled: rows of a bucket that travel; None for all.
    """
    if hop.kind == "gather":
        return wire.all_gather(x_IM, hop.axes, dim=1, tag=None)  # I M -> I n*M
    if hop.kind == "sum":
        return wire.all_reduce(x_IM, hop.axes, tag=None) if gradient else x_IM  # I M -> I M
    return by_part(swap(by_peer(x_IM, hop.peers(layout)), hop, filled))


def send_back(
    y_IM: jax.Array,
    hop: Hop,
    layout: Layout,
    *,
    gradient: bool = False,
    filled: jax.Array | None = None,
    codec: Codec | None = None,
) -> Payload:
    """Sends results back over one hop, the mirror of `send`: gathered rows are summed.

    The result of an all-to-all stays encoded.
    """
    if hop.kind == "gather":
        return wire.reduce_scatter(y_IM, hop.axes, dim=1, tag=None)  # I n*M -> I M
    if hop.kind == "sum":
        return y_IM if gradient else wire.all_reduce(y_IM, hop.axes, tag=None)  # I M -> I M
    payload = encode(codec, by_peer(y_IM, hop.peers(layout)))
    return jax.tree.map(by_part, swap_encoded(payload, hop, filled, codec))


def swap_encoded(
    payload: Payload, hop: Hop, filled: jax.Array | None, codec: Codec | None
) -> Payload:
    """The all-to-all of encoded rows: all arrays of a payload travel as one array of bytes."""
    if codec is None:
        return swap(payload, hop, filled)
    return unpack(swap(pack(payload, 3), hop, filled), payload)


def swap(x_PIJ: jax.Array, hop: Hop, filled: jax.Array | None) -> jax.Array:
    """The all-to-all; with `filled`, only filled rows of each bucket, in steps of J / PIECES rows.

    Shapes must be static, so the number of steps is split into powers of two, each an exchange
    under a conditional. Rows that are not sent arrive as zeros; nobody reads them.
    """
    if filled is None:
        return wire.all_to_all(x_PIJ, hop.axes, tag=None)  # P I J -> P I J
    step = -(-x_PIJ.shape[2] // PIECES)
    steps = -(-filled // step)
    y_PIJ, start = jnp.zeros_like(x_PIJ), jnp.int32(0)
    for digit in reversed(range(PIECES.bit_length())):
        size = step << digit
        if size > x_PIJ.shape[2]:
            continue

        def send_piece(y_PIJ: jax.Array, start=start, size=size) -> jax.Array:
            piece_PIj = lax.dynamic_slice_in_dim(x_PIJ, start, size, axis=2)
            piece_PIj = wire.all_to_all(piece_PIj, hop.axes, tag=None)  # P I j -> P I j
            return lax.dynamic_update_slice_in_dim(y_PIJ, piece_PIj, start, axis=2)

        is_sent = (steps >> digit) & 1 == 1
        y_PIJ = lax.cond(~is_sent, lambda y_PIJ: y_PIJ, send_piece, y_PIJ)
        start += jnp.where(is_sent, size, 0)
    return y_PIJ


def by_peer(x_IM: jax.Array, peers: int) -> jax.Array:
    """[I, P * J, ...] -> [P, I, J, ...]."""
    parts, rows = x_IM.shape[:2]
    return jnp.swapaxes(x_IM.reshape(parts, peers, rows // peers, *x_IM.shape[2:]), 0, 1)


def by_part(x_PIJ: jax.Array) -> jax.Array:
    """[P, I, J, ...] -> [I, P * J, ...]."""
    peers, parts, rows = x_PIJ.shape[:3]
    return jnp.swapaxes(x_PIJ, 0, 1).reshape(parts, peers * rows, *x_PIJ.shape[3:])
