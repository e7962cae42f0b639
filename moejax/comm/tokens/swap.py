"""One hop of a route: bucket rows to peers, and what becomes of them back.

Per device, inside shard_map. Buckets have a fixed number of rows, padded with zeros: static shapes
are what every backend's all-to-all supports.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec, Payload
from moejax.comm.codecs.pack import pack, unpack
from moejax.comm.tokens.rows import decode, encode
from moejax.layout.layout import Layout
from moejax.layout.route import Hop

# Into how many equal steps a bucket's rows are counted when only the filled ones travel.
PIECES = 128


def send(
    x_IM: jax.Array,
    hop: Hop,
    layout: Layout,
    *,
    gradient: bool = False,
    filled: jax.Array | None = None,
) -> jax.Array:
    """One hop dispatch_hop: array [I, M, ...] of bucket rows, peer by peer, to what arrives.

    Its results are not tagged for remat: the pipeline tags them where its steps end.
    Wire per device: all_to_all (P - 1) / P of x's bytes (a share of them with `split`, several
    times with `copies`), gather (n - 1) times x's bytes, sum nothing (a gradient: an all-reduce).
    """
    if hop.kind == "gather":
        return wire.all_gather(x_IM, hop.axes, dim=1, tag=None)
    if hop.kind == "sum":
        return wire.all_reduce(x_IM, hop.axes, tag=None) if gradient else x_IM
    x_PIJ = for_peers(by_peer(x_IM, hop.peers(layout)), hop, layout)
    return by_part(swap(x_PIJ, hop, filled))


def send_back(
    y_IM: jax.Array,
    hop: Hop,
    layout: Layout,
    *,
    gradient: bool = False,
    filled: jax.Array | None = None,
    codec: Codec | None = None,
) -> Payload:
    """One hop combine_hop, the mirror of `send`: what was copied or gathered comes back summed.

    What arrives is as a codec left it, but where copies are summed or shares are joined.
    """
    if hop.kind == "gather":
        return wire.reduce_scatter(y_IM, hop.axes, dim=1, tag=None)
    if hop.kind == "sum":
        return y_IM if gradient else wire.all_reduce(y_IM, hop.axes, tag=None)
    payload = encode(codec, by_peer(y_IM, layout.size(hop.axes)))
    payload = swap_encoded(payload, hop, filled, codec)
    if not (hop.copies or hop.split):
        return jax.tree.map(by_part, payload)
    y_PIJ = decode(codec, payload, y_IM.shape[-1], y_IM.dtype)
    if hop.copies:
        by_copy = y_PIJ.reshape(-1, layout.size(hop.copies), *y_PIJ.shape[1:])
        y_PIJ = jnp.sum(by_copy.astype(jnp.float32), axis=1).astype(y_PIJ.dtype)
    if hop.split and gradient:
        y_PIJ = _only_share(y_PIJ, hop.split, dim=2)
    elif hop.split:
        y_PIJ = wire.all_gather(y_PIJ, hop.split, dim=2, tag=None)
    return by_part(y_PIJ)


def swap_encoded(
    payload: Payload, hop: Hop, filled: jax.Array | None, codec: Codec | None
) -> Payload:
    """The all-to-all, of rows [P, I, J] as a codec left them: all of a row as one, in bytes."""
    if codec is None:
        return swap(payload, hop, filled)
    return unpack(swap(pack(payload, 3), hop, filled), payload)


def swap(x_PIJ: jax.Array, hop: Hop, filled: jax.Array | None) -> jax.Array:
    """The all-to-all; of each bucket's J rows only as many as are filled, in steps of J / PIECES.

    Shapes must be static, so the number of steps travels as its binary digits: one exchange for
    each digit that is set. Rows that stay behind arrive as zeros, which is what they are.
    """
    if filled is None:
        return wire.all_to_all(x_PIJ, hop.axes, tag=None)
    step = -(-x_PIJ.shape[2] // PIECES)
    steps = -(-filled // step)
    y_PIJ, start = jnp.zeros_like(x_PIJ), jnp.int32(0)
    for digit in reversed(range(PIECES.bit_length())):
        size = step << digit
        if size > x_PIJ.shape[2]:
            continue

        def send_piece(y_PIJ: jax.Array, start=start, size=size) -> jax.Array:
            piece = lax.dynamic_slice_in_dim(x_PIJ, start, size, axis=2)
            piece = wire.all_to_all(piece, hop.axes, tag=None)
            return lax.dynamic_update_slice_in_dim(y_PIJ, piece, start, axis=2)

        goes = (steps >> digit) & 1 == 1
        y_PIJ = lax.cond(~goes, lambda y_PIJ: y_PIJ, send_piece, y_PIJ)
        start += jnp.where(goes, size, 0)
    return y_PIJ


def by_peer(x_IM: jax.Array, peers: int) -> jax.Array:
    """[I, P * J, ...] -> [P, I, J, ...]."""
    parts, rows = x_IM.shape[:2]
    return jnp.swapaxes(x_IM.reshape(parts, peers, rows // peers, *x_IM.shape[2:]), 0, 1)


def by_part(x_PIJ: jax.Array) -> jax.Array:
    """[P, I, J, ...] -> [I, P * J, ...]."""
    peers, parts, rows = x_PIJ.shape[:3]
    return jnp.swapaxes(x_PIJ, 0, 1).reshape(parts, peers * rows, *x_PIJ.shape[3:])


def for_peers(x_PIJ: jax.Array, hop: Hop, layout: Layout) -> jax.Array:
    """Buckets as they travel: a share of those that others hold too; a copy for each device."""
    if hop.split:
        return _own_share(x_PIJ, hop.split, dim=2)
    return jnp.repeat(x_PIJ, layout.size(hop.copies), axis=0) if hop.copies else x_PIJ


def _own_share(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    size = x.shape[dim] // wire.size(axes)
    return lax.dynamic_slice_in_dim(x, wire.index(axes) * size, size, axis=dim)


def _only_share(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """The transpose of `_own_share`: zeros where the other devices' shares are."""
    size = x.shape[dim]
    shape = (*x.shape[:dim], size * wire.size(axes), *x.shape[dim + 1 :])
    return lax.dynamic_update_slice_in_dim(
        jnp.zeros(shape, x.dtype), x, wire.index(axes) * size, axis=dim
    )
