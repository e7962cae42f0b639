"""Gradients summed over devices, hop by hop.

Per device, inside shard_map. Gradients are summed inside the node first, so that only sums cross
the slow link; then across nodes, through a codec if there is one; then gathered inside the node.
Every micro-batch takes the hops of `sum_shards`, and only the last one those of `sum_copies`.
Between the two a gradient is in `Parts`, in one of three forms:

    by shard    on one node: one array in the shape of the shard, or [m] for each piece
    by node     across nodes, if all hops across nodes are left (`_keeps_nodes`): [S, m] a piece
    by copy     across nodes otherwise, summed over the nodes of the shards: [C, n] a piece

Replicated parameters (norm scales) are too small for a collective each: `reduce_replicated` sums
their gradients in one all-reduce at the end.

Letters: a weight is sharded over S nodes with F devices each; its shard has C copies across nodes
and c copies inside each. A shard has m values, a part of it for one copy has n. Where dimensions
stay apart, a gradient is [M, N] and its shard [M / F, N].
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from moejax.comm import wire
from moejax.comm.weights.compressed import ReduceState, reduce_parts
from moejax.comm.weights.path import GatherSpec
from moejax.layout.layout import Axes, Layout

# What `sum_shards` leaves of the gradient of one weight on this device.
Parts = tuple[jax.Array, ...]


def sum_shards(gradient: jax.Array, spec: GatherSpec) -> Parts:
    """Sums the gradient of a gathered weight over the devices that hold its shards.

    Each device keeps its shard's gradient, not yet summed over copies, in pieces of at most
    `micro_bytes`. Micro-batches add these up, and `sum_copies` takes the other hops.

    Wire, on one node: reduce-scatter over the gather axes. Across nodes: reduce-scatter inside the
    node over the gather axes; and if shards lie across nodes and there is no codec, reduce-scatter
    inside the node over the copies, so that only sums cross nodes, and across nodes.

    Returns:
      The parts by shard, by node or by copy, as the module's docstring lists them.
    """
    path = spec.path
    with jax.named_scope(spec.traffic):
        if not path.slow and spec.micro_bytes is None:
            if path.dim is not None:
                # M N -> M/F N
                gradient = wire.reduce_scatter(gradient, path.gather, dim=path.dim)
            return (gradient,)
        slow, fast = path.split(path.gather)
        pieces = _pieces(gradient, spec, wire.size(slow), wire.size(fast))
        return tuple(_sum_shard_piece(piece, spec) for piece in pieces)


def sum_copies(
    parts: Parts,
    shape: tuple[int, ...],
    spec: GatherSpec,
    state: ReduceState | None,
    step: jax.Array | None,
) -> tuple[jax.Array, ReduceState | None]:
    """Sums the parts of `sum_shards` over the copies.

    Returns the shard's gradient, summed over all devices, and the next state of the codec.

    Wire, on one node: all-reduce over the copies. Across nodes: the reduce-scatters that
    `sum_shards` left; all-reduce over the copies across nodes (with a codec: `reduce_parts`);
    all-gather over the copies inside the node.

    Args:
      shape: of the shard.
    """
    path, size = spec.path, math.prod(shape)
    with jax.named_scope(spec.traffic):
        if not path.slow and spec.micro_bytes is None:
            return wire.all_reduce(parts[0], path.copies), state  # M/F N -> M/F N
        if spec.gradient_codec is not None and state is not None and step is not None:
            (slow, _), (slow_copies, fast_copies) = path.split(path.gather), path.split(path.copies)
            x_SCn = _split_copies(parts[0], wire.size(slow_copies), fast_copies)
            x_Cn, state = reduce_parts(x_SCn, slow, slow_copies, spec.gradient_codec, state, step)
            summed = [_join_copies(x_Cn, fast_copies, size)]
        else:
            ends = [*_cuts(size, spec), size]
            sizes = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
            summed = [_sum_piece(part, n, spec) for part, n in zip(parts, sizes, strict=True)]
        total = jnp.concatenate(summed)
    if path.dim is None:
        return total.reshape(shape), state
    first = (shape[path.dim], *shape[: path.dim], *shape[path.dim + 1 :])
    return jnp.moveaxis(total.reshape(first), 0, path.dim), state


# There can be thousands of equal pieces: jitted, they are traced once, and `inline` leaves no call.
@partial(jax.jit, static_argnames="spec", inline=True)
def _sum_shard_piece(piece: jax.Array, spec: GatherSpec) -> jax.Array:
    """Takes the hops of `sum_shards` for a piece [S, F, ...]."""
    path = spec.path
    (slow, fast), (slow_copies, fast_copies) = path.split(path.gather), path.split(path.copies)
    x_Sm = _scatter(piece, fast, spec)
    if not path.slow:
        return x_Sm.reshape(-1)
    if _keeps_nodes(spec):
        return x_Sm.reshape(x_Sm.shape[0], -1)
    if spec.rows and wire.size(path.copies) == 1:
        return _scatter(x_Sm[None], slow, spec).reshape(1, -1)
    x_Sm = x_Sm.reshape(x_Sm.shape[0], -1)
    x_SCn = _split_copies(x_Sm, wire.size(slow_copies), fast_copies)
    return wire.reduce_scatter(x_SCn, slow, dim=0)[0]  # S C n -> 1 C n


def _pieces(gradient: jax.Array, spec: GatherSpec, S: int, F: int) -> list[jax.Array]:
    """Returns the shards of a gradient, [S, F, ...] in their own shape, or pieces [S, F, n]."""
    dim = spec.path.dim
    if dim is None:
        x = gradient.reshape(1, 1, -1)
    else:
        rows = jnp.moveaxis(gradient, dim, 0)
        x = rows.reshape(S, F, -1, *rows.shape[1:])
    cuts = _cuts(x.size // (S * F), spec)
    return jnp.split(x.reshape(S, F, -1), cuts, axis=2) if cuts else [x]


def _scatter(x: jax.Array, axes: Axes, spec: GatherSpec) -> jax.Array:
    """Sums [S, F, ...] over the F devices along `axes`; each keeps its part, [S, ...] or [S, n].

    As rows, parts of the first dimension are scattered, many of its rows each. XLA for TPUs turns a
    reduce-scatter whose parts are single rows of a tile into an all-reduce, which sends twice as
    much and is waited for.
    """
    S, F, *inner = x.shape
    if not spec.rows:
        x_SFm = x.reshape(S, F, -1)
        return wire.reduce_scatter(x_SFm, axes, dim=1).reshape(S, -1)  # S F m -> S 1 m
    rows = jnp.moveaxis(x, 1, 0).reshape(F * S * inner[0], *inner[1:])
    return wire.reduce_scatter(rows, axes, dim=0).reshape(S, *inner)  # F*S*r N -> S*r N, r rows


def _keeps_nodes(spec: GatherSpec) -> bool:
    """Whether all hops across nodes are left to `sum_copies`.

    Without a codec every micro-batch sums shards across nodes: to leave that hop, it would keep as
    many times its shard as there are nodes. It keeps that much where weights cross nodes once a
    step.
    """
    slow, _ = spec.path.split(spec.path.gather)
    return spec.gradient_codec is not None or not slow or spec.across == "step"


def _cuts(size: int, spec: GatherSpec) -> list[int]:
    """Positions that cut `size` values of a shard into equal pieces of at most `micro_bytes`.

    A piece's bytes are those of all shards. With a codec there is one piece.
    """
    if spec.micro_bytes is None or spec.gradient_codec is not None:
        return []
    bytes_each = wire.size(spec.path.gather) * jnp.dtype(spec.gradient_dtype).itemsize
    pieces = -(-size * bytes_each // spec.micro_bytes)
    step = -(-size // min(pieces, size))
    return list(range(step, size, step))


@partial(jax.jit, static_argnames=("size", "spec"), inline=True)
def _sum_piece(part: jax.Array, size: int, spec: GatherSpec) -> jax.Array:
    """Sums a piece over the copies; returns [m]."""
    path = spec.path
    (slow, _), (slow_copies, fast_copies) = path.split(path.gather), path.split(path.copies)
    if not path.slow:
        return wire.all_reduce(part, fast_copies)  # m -> m
    if _keeps_nodes(spec):
        x_SCn = _split_copies(part, wire.size(slow_copies), fast_copies)
        part = wire.reduce_scatter(x_SCn, slow, dim=0)[0]  # S C n -> 1 C n
    total_Cn = wire.all_reduce(part, slow_copies)  # C n -> C n
    return _join_copies(total_Cn, fast_copies, size)


def _split_copies(x_Sm: jax.Array, num_slow: int, fast_copies: Axes) -> jax.Array:
    """Sums over the copies inside the node; each keeps its part for each copy across, [S, C, n]."""
    S, c = x_Sm.shape[0], wire.size(fast_copies)
    x_Sm = jnp.pad(x_Sm, ((0, 0), (0, -x_Sm.shape[1] % (num_slow * c))))
    # S c C*n -> S 1 C*n
    x_S1m = wire.reduce_scatter(x_Sm.reshape(S, c, -1), fast_copies, dim=1)
    return x_S1m.reshape(S, num_slow, -1)


def _join_copies(x_Cn: jax.Array, fast_copies: Axes, size: int) -> jax.Array:
    """Gathers the parts of the copies inside the node; returns [m]."""
    x_cm = wire.all_gather(x_Cn.reshape(1, -1), fast_copies, dim=0)  # 1 C*n -> c C*n
    return x_cm.reshape(-1)[:size]


def reduce_replicated(gradients: list[jax.Array], layout: Layout) -> list[jax.Array]:
    """Sums the gradients of replicated parameters over all devices, in one all-reduce."""
    if not gradients:
        return []
    flat, apart = ravel_pytree(gradients)
    with jax.named_scope("dense_gradient"):
        return apart(wire.all_reduce(flat, layout.mesh_axes))  # n -> n, of all parameters
