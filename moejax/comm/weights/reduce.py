"""Gradients summed hop by hop.

Per device, inside shard_map. Inside the node first, so that what crosses the slow link is already a
sum; then across nodes, where a codec may stand; then back inside the node.

Parameters that every device holds whole (norm scales) are too small for a collective each:
`reduce_whole` sums them all in one at the end.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec, EncodeContext
from moejax.comm.codecs.low_rank import LowRank
from moejax.comm.weights.compressed import ReduceState, reduce_parts
from moejax.comm.weights.path import ParamPath
from moejax.layout.layout import Layout


@dataclass(frozen=True)
class GatherSpec:
    """What is done to one parameter, forward and backward; static."""

    path: ParamPath
    dtype: str
    gradient_dtype: str
    kind: str = "dense_gradient"  # class of traffic of the gradient
    micro_bytes: int | None = None
    codec: Codec | LowRank | None = None  # of the gradient
    weights: Codec | None = None


def reduce_gradient(
    gradient: jax.Array, how: GatherSpec, state: ReduceState | None, context: EncodeContext | None
) -> tuple[jax.Array, ReduceState | None]:
    """The gradient of the whole weight, summed; each device keeps its shard.

    Wire, inside a node: reduce-scatter over the axes it was gathered on, and where nodes are
    crossed over the axes with copies, followed by an all-gather. Across nodes: reduce-scatter and
    all-reduce, or what `reduce_parts` says, of what is left: the shard over the copies inside.
    Without a codec in micro-operations: one after the other, each of at most so many bytes.
    """
    with jax.named_scope(how.kind):
        return _summed(gradient, how, state, context)


def _summed(
    gradient: jax.Array, how: GatherSpec, state: ReduceState | None, context: EncodeContext | None
) -> tuple[jax.Array, ReduceState | None]:
    path = how.path
    if not path.slow and how.micro_bytes is None:
        if path.dim is not None:
            gradient = wire.reduce_scatter(gradient, path.gather, dim=path.dim)
        return wire.all_reduce(gradient, path.copies), state
    slow, fast = path.split(path.gather)
    S, F = wire.size(slow), wire.size(fast)
    moved = gradient[None] if path.dim is None else jnp.moveaxis(gradient, path.dim, 0)
    shape = (moved.shape[0] // (S * F), *moved.shape[1:])
    x_SFm = moved.reshape(S, F, math.prod(shape))
    if how.codec is not None and state is not None and context is not None:
        shard, state = _hops(x_SFm, path, how.codec, state, context)
    else:
        starts = _cuts(x_SFm.shape[2], S * F * x_SFm.dtype.itemsize, how.micro_bytes)
        shard = jnp.concatenate(
            [_hops(piece, path)[0] for piece in jnp.split(x_SFm, starts, axis=2)]
        )
    shard = shard.reshape(shape)
    return (shard[0] if path.dim is None else jnp.moveaxis(shard, 0, path.dim)), state


def _cuts(size: int, bytes_each: int, limit: int | None) -> list[int]:
    """Where to cut `size` values in equal pieces of at most `limit` bytes."""
    if limit is None:
        return []
    pieces = -(-size * bytes_each // limit)
    step = -(-size // min(pieces, size))
    return list(range(step, size, step))


def _hops(
    x_SFm: jax.Array,
    path: ParamPath,
    codec: Codec | LowRank | None = None,
    state: ReduceState | None = None,
    context: EncodeContext | None = None,
) -> tuple[jax.Array, ReduceState | None]:
    """Sums some values of a gradient; [m] of the shard that this device keeps."""
    (slow, fast), (slow_copies, fast_copies) = path.split(path.gather), path.split(path.copies)
    S, size = x_SFm.shape[0], x_SFm.shape[2]
    if not path.slow:
        shard = wire.reduce_scatter(x_SFm, fast, dim=1).reshape(size)
        return wire.all_reduce(shard, fast_copies), state
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
