"""Gradients summed over devices, hop by hop.

Per device, inside shard_map. Gradients are summed inside the node first, so that only sums cross
the slow link; then across nodes, through a codec if there is one; then gathered inside the node.

Parameters that every device holds whole (norm scales) are too small for a collective each:
`reduce_whole` sums their gradients in one all-reduce at the end.

Letters: a gradient is gathered over S slow and F fast devices; its shard has C copies across nodes
and c copies inside each. A shard has m values, a part of it for one copy has n.
"""

import math

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec, EncodeContext
from moejax.comm.codecs.low_rank import LowRank
from moejax.comm.weights.compressed import ReduceState, reduce_parts
from moejax.comm.weights.path import GatherSpec, ParamPath
from moejax.layout.layout import Layout


def reduce_gradient(
    gradient: jax.Array, spec: GatherSpec, state: ReduceState | None, context: EncodeContext | None
) -> tuple[jax.Array, ReduceState | None]:
    """Sums the gradient of a gathered weight over all devices; each device keeps its shard.

    Returns the shard's gradient and the next state of the codec.

    Wire, on one node: reduce-scatter over the gather axes, all-reduce over the copies. Across
    nodes, in this order: reduce-scatter inside the node over gather axes and copies; reduce-scatter
    and all-reduce across nodes (with a codec: `reduce_parts`); all-gather over the copies inside
    the node. Without a codec the gradient is reduced in pieces of at most `micro_bytes`.
    """
    with jax.named_scope(spec.traffic):
        return _reduce_in_pieces(gradient, spec, state, context)


def _reduce_in_pieces(
    gradient: jax.Array, spec: GatherSpec, state: ReduceState | None, context: EncodeContext | None
) -> tuple[jax.Array, ReduceState | None]:
    """`reduce_gradient`, in whole or in pieces."""
    path = spec.path
    if not path.slow and spec.micro_bytes is None:
        if path.dim is not None:
            gradient = wire.reduce_scatter(gradient, path.gather, dim=path.dim)
        return wire.all_reduce(gradient, path.copies), state
    slow, fast = path.split(path.gather)
    S, F = wire.size(slow), wire.size(fast)
    transposed = gradient[None] if path.dim is None else jnp.moveaxis(gradient, path.dim, 0)
    shape = (transposed.shape[0] // (S * F), *transposed.shape[1:])
    x_SFm = transposed.reshape(S, F, math.prod(shape))
    if spec.gradient_codec is not None and state is not None and context is not None:
        shard, state = _reduce_piece(x_SFm, path, spec.gradient_codec, state, context)
    else:
        starts = _cuts(x_SFm.shape[2], S * F * x_SFm.dtype.itemsize, spec.micro_bytes)
        shard = jnp.concatenate(
            [_reduce_piece(piece, path)[0] for piece in jnp.split(x_SFm, starts, axis=2)]
        )
    shard = shard.reshape(shape)
    return (shard[0] if path.dim is None else jnp.moveaxis(shard, 0, path.dim)), state


def _cuts(size: int, bytes_each: int, limit: int | None) -> list[int]:
    """Positions that cut `size` values into equal pieces of at most `limit` bytes."""
    if limit is None:
        return []
    pieces = -(-size * bytes_each // limit)
    step = -(-size // min(pieces, size))
    return list(range(step, size, step))


def _reduce_piece(
    x_SFm: jax.Array,
    path: ParamPath,
    codec: Codec | LowRank | None = None,
    state: ReduceState | None = None,
    context: EncodeContext | None = None,
) -> tuple[jax.Array, ReduceState | None]:
    """Sums a piece of a gradient over all hops; returns [m], this device's shard of it."""
    (slow, fast), (slow_copies, fast_copies) = path.split(path.gather), path.split(path.copies)
    S, size = x_SFm.shape[0], x_SFm.shape[2]
    if not path.slow:
        shard_m = wire.reduce_scatter(x_SFm, fast, dim=1).reshape(size)
        return wire.all_reduce(shard_m, fast_copies), state
    C, c = wire.size(slow_copies), wire.size(fast_copies)
    x_Sm = wire.reduce_scatter(x_SFm, fast, dim=1).reshape(S, size)
    x_Sm = jnp.pad(x_Sm, ((0, 0), (0, -size % (C * c))))
    x_SCn = wire.reduce_scatter(x_Sm.reshape(S, c, -1), fast_copies, dim=1).reshape(S, C, -1)
    if codec is None:
        x_Cn = wire.all_reduce(wire.reduce_scatter(x_SCn, slow, dim=0)[0], slow_copies)
    else:
        assert state is not None and context is not None  # noqa: PT018
        x_Cn, state = reduce_parts(x_SCn, slow, slow_copies, codec, state, context)
    x_m = wire.all_gather(x_Cn.reshape(1, -1), fast_copies, dim=0).reshape(-1)
    return x_m[:size], state


def reduce_whole(gradients: list[jax.Array], layout: Layout) -> list[jax.Array]:
    """Sums the gradients of parameters that every device holds whole, in one all-reduce."""
    if not gradients:
        return []
    flat = jnp.concatenate([g.reshape(-1) for g in gradients])
    with jax.named_scope("dense_gradient"):
        flat = wire.all_reduce(flat, layout.mesh_axes)
    ends = [int(sum(g.size for g in gradients[: i + 1])) for i in range(len(gradients))]
    parts = jnp.split(flat, ends[:-1])
    return [part.reshape(g.shape) for part, g in zip(parts, gradients, strict=True)]
