"""Weights in, gradients out: the one function through which a parameter enters a layer.

Per device, inside shard_map. `enter` gathers a weight's shards; its transpose reduces the weight's
gradient, hop by hop: inside the node first, so that what crosses the slow link is already a sum;
then across nodes, where a codec may stand; then back inside the node. So the reduction
happens inside the backward pass, layer by layer. What a codec remembers enters beside the weight,
and its next value leaves as its "gradient": state goes through backward without side effects.

Parameters that every device holds whole (norm scales) are too small for a collective each:
`reduce_whole` sums them all in one at the end.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from moejax.comm import wire
from moejax.comm.codecs.adaptive import Ladder
from moejax.comm.codecs.build import build_codec, build_plain_codec
from moejax.comm.codecs.codec import Codec, Moment
from moejax.comm.codecs.low_rank import LowRank
from moejax.comm.codecs.pack import decode_packed, encode_packed
from moejax.comm.weights.compressed import ReduceState, first_state, reduce_parts
from moejax.comm.weights.residuals import Carried, from_floats
from moejax.config.compression import Codecs
from moejax.layout.layout import Axes, Layout
from moejax.layout.spec import Program


@dataclass(frozen=True)
class Way:
    """How a parameter is gathered and its gradient reduced; static.

    Attributes:
      dim: the dimension whose shards are gathered; None if this device's shard is all it needs.
      gather: mesh axes that shard it.
      copies: mesh axes whose devices hold copies.
      slow: of all those, what crosses nodes.
    """

    dim: int | None
    gather: Axes
    copies: Axes
    slow: Axes

    def split(self, axes: Axes) -> tuple[Axes, Axes]:
        """Axes across nodes, axes inside."""
        inside = tuple(axis for axis in axes if axis not in self.slow)
        return tuple(axis for axis in axes if axis in self.slow), inside


def way_of(dims: str, layout: Layout) -> Way:
    """The way of a parameter that is named by the letters of its dimensions."""
    by_dim = layout.param_axes(dims)
    kept = layout.tensor + (layout.expert_owner_axes if dims[0] == "E" else ())
    gathers = {
        dim: tuple(axis for axis in axes if axis not in kept and layout.size((axis,)) > 1)
        for dim, axes in enumerate(by_dim)
    }
    dim, gather = next(((d, axes) for d, axes in gathers.items() if axes), (None, ()))
    held = {axis for axes in by_dim for axis in axes}
    copies = tuple(a for a in layout.mesh_axes if a not in held and layout.size((a,)) > 1)
    copies = copies if held else ()
    return Way(dim, gather, copies, layout.between_nodes(gather + copies))


def enter(param: Any, program: Program, dtype: str | None = None) -> jax.Array:
    """Returns the weight as this device computes with it: gathered over fsdp, cast to `dtype`.

    Wire, forward: the gathered weight in `dtype`, or as its codec says where the gather crosses
    nodes. Backward: see `_reduced`. The gradient that leaves has the dtype of the parameter.

    Args:
      param: an `nnx.Param` that holds this device's shard, alone or in a `Carried`, and as metadata
        the letters of its dimensions, e.g. dims="DHC". Tensor-sharded dimensions stay sharded.
      dtype: the dtype to compute in; the program's unless given.
    """
    dims, w, codecs = param.get_metadata("dims"), param.get_value(), program.codecs
    way = way_of(dims, program.layout)
    how = How(
        way,
        dtype or program.dtype,
        program.gradient_dtype,
        class_of(dims),
        micro_bytes=program.micro_bytes,
        codec=_built(codecs, dims) if isinstance(w, Carried) else None,
        weights=build_plain_codec(codecs.weights if compressible(dims) else None)
        if program.layout.between_nodes(way.gather)
        else None,
    )
    with jax.named_scope("weights"):
        return checkpoint_name(_enter(w, how), wire.WEIGHT_WIRE)


def class_of(dims: str) -> str:
    """The class of traffic that a parameter's gradient belongs to."""
    return "expert_gradient" if dims[0] == "E" else "dense_gradient"


def compressible(dims: str) -> bool:
    """The router is never compressed; biases and norm scales are too small to gain."""
    return "D" in dims and len(dims) > 1 and dims != "DE"


def _built(codecs: Codecs, dims: str) -> Codec | LowRank | None:
    spec = getattr(codecs, class_of(dims))
    return None if spec is None else build_codec(spec)


def parts_shape(size: int, dims: str, layout: Layout) -> tuple[int, int, int]:
    """[S, C, n] of what crosses nodes of a gradient of `size` values.

    One part of n values to each of S shards of the weight and C copies of a shard.
    """
    way = way_of(dims, layout)
    (scatter, _), (copies, inside) = way.split(way.gather), way.split(way.copies)
    shards = layout.size(tuple(axis for axes in layout.param_axes(dims) for axis in axes))
    n = -(-size // shards // layout.size(copies + inside))
    return layout.size(scatter), layout.size(copies), n


def describe_state(program: Program, param: Any, dims: str) -> Any:
    """Shapes of what codecs of a parameter's gradient remember, or None; see `TrainState`."""
    layout, policy = program.layout, program.compression
    way = way_of(dims, layout)
    codecs = [build_codec(spec) for spec in policy.all_of(class_of(dims))]
    if not codecs or not way.slow or not compressible(dims):
        return None
    stack = param.ndim - len(dims)
    shape = parts_shape(math.prod(param.shape[stack:]), dims, layout)
    state = jax.eval_shape(lambda: first_state(codecs, *shape))
    ahead = (*param.shape[:stack], layout.size(layout.mesh_axes))
    return jax.tree.map(
        # None for nothing: checkpoints hold no empty arrays.
        lambda s: jax.ShapeDtypeStruct(ahead + s.shape, s.dtype) if s.size else None,
        state,
    )


def state_specs(states: Any, params: Any, dims: Any, layout: Layout) -> Any:
    """How `describe_state`'s arrays are sharded: each device holds its own."""

    def spec(param: Any, letters: str, state: Any) -> Any:
        ahead = [None] * (param.ndim - len(letters))
        return jax.tree.map(lambda _: PartitionSpec(*ahead, layout.mesh_axes), state)

    return jax.tree.map(spec, params, dims, states)


def sum_energies(ladder: Codec | LowRank, states: Any, dims: Any, kind: str) -> jax.Array:
    """What this device's senders of one class noted when they measured; see `codec.Ladder`."""
    assert isinstance(ladder, Ladder)
    found = []

    def add(letters: str, state: ReduceState | None) -> None:
        if state is not None and class_of(letters) == kind:
            found.append(ladder.energies(state.parts))  # type: ignore[arg-type]

    jax.tree.map(add, dims, states)
    return jnp.sum(jnp.stack(found), axis=0) if found else jnp.zeros(len(ladder.rungs) + 1)


@dataclass(frozen=True)
class How:
    """What `_enter` does to one parameter; static."""

    way: Way
    dtype: str
    gradient_dtype: str
    kind: str = "dense_gradient"  # class of traffic of the gradient
    micro_bytes: int | None = None
    codec: Codec | LowRank | None = None  # of the gradient
    weights: Codec | None = None


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(w: jax.Array | Carried, how: How) -> jax.Array:
    shard, way = w.weight if isinstance(w, Carried) else w, how.way
    if way.dim is None:
        return shard.astype(how.dtype)
    if how.weights is None:
        return wire.all_gather(
            shard.astype(how.dtype), way.gather, dim=way.dim, tag=wire.WEIGHT_WIRE
        )
    packed, payload = encode_packed(how.weights, shard.reshape(1, -1))
    packed = wire.all_gather(packed, way.gather, dim=0, tag=wire.WEIGHT_WIRE)
    shards = decode_packed(how.weights, packed, payload, shard.size, how.dtype)
    return jnp.concatenate(list(shards.reshape(-1, *shard.shape)), axis=way.dim)


def _enter_forward(w, how):
    if isinstance(w, Carried):
        return _enter(w, how), (jnp.zeros(0, w.weight.dtype), w.state, w.when)
    return _enter(w, how), (jnp.zeros(0, w.dtype), None, None)


def _enter_backward(how, kept, gradient):
    like, state, when = kept
    gradient = gradient.astype(how.gradient_dtype)
    if state is None:
        return (_reduced(gradient, how, None, None)[0].astype(like.dtype),)
    reduced, state = _reduced(gradient, how, state, from_floats(when))
    return (Carried(reduced.astype(like.dtype), state, jnp.zeros_like(when)),)


_enter.defvjp(_enter_forward, _enter_backward)


def _reduced(
    gradient: jax.Array, how: How, state: ReduceState | None, moment: Moment | None
) -> tuple[jax.Array, ReduceState | None]:
    """The gradient of the whole weight, summed; each device keeps its shard.

    Wire, inside a node: reduce-scatter over the axes it was gathered on, and where nodes are
    crossed over the axes with copies, followed by an all-gather. Across nodes: reduce-scatter and
    all-reduce, or what `reduce_parts` says, of what is left: the shard over the copies inside.
    Without a codec in micro-operations: one after the other, each of at most so many bytes.
    """
    with jax.named_scope(how.kind):
        return _summed(gradient, how, state, moment)


def _summed(
    gradient: jax.Array, how: How, state: ReduceState | None, moment: Moment | None
) -> tuple[jax.Array, ReduceState | None]:
    way = how.way
    if not way.slow and how.micro_bytes is None:
        if way.dim is not None:
            gradient = wire.reduce_scatter(gradient, way.gather, dim=way.dim)
        return wire.all_reduce(gradient, way.copies), state
    slow, fast = way.split(way.gather)
    S, F = wire.size(slow), wire.size(fast)
    moved = gradient[None] if way.dim is None else jnp.moveaxis(gradient, way.dim, 0)
    shape = (moved.shape[0] // (S * F), *moved.shape[1:])
    x_SFm = moved.reshape(S, F, math.prod(shape))
    if how.codec is not None and state is not None and moment is not None:
        shard, state = _hops(x_SFm, way, how.codec, state, moment)
    else:
        starts = _cuts(x_SFm.shape[2], S * F * x_SFm.dtype.itemsize, how.micro_bytes)
        shard = jnp.concatenate(
            [_hops(piece, way)[0] for piece in jnp.split(x_SFm, starts, axis=2)]
        )
    shard = shard.reshape(shape)
    return (shard[0] if way.dim is None else jnp.moveaxis(shard, 0, way.dim)), state


def _cuts(size: int, bytes_each: int, limit: int | None) -> list[int]:
    """Where to cut `size` values in equal pieces of at most `limit` bytes."""
    if limit is None:
        return []
    pieces = -(-size * bytes_each // limit)
    step = -(-size // min(pieces, size))
    return list(range(step, size, step))


def _hops(
    x_SFm: jax.Array,
    way: Way,
    codec: Codec | LowRank | None = None,
    state: ReduceState | None = None,
    moment: Moment | None = None,
) -> tuple[jax.Array, ReduceState | None]:
    """Sums some values of a gradient; [m] of the shard that this device keeps."""
    (slow, fast), (slow_copies, fast_copies) = way.split(way.gather), way.split(way.copies)
    S, size = x_SFm.shape[0], x_SFm.shape[2]
    if not way.slow:
        shard = wire.reduce_scatter(x_SFm, fast, dim=1).reshape(size)
        return wire.all_reduce(shard, fast_copies), state
    C, c = wire.size(slow_copies), wire.size(fast_copies)
    x_Sm = wire.reduce_scatter(x_SFm, fast, dim=1).reshape(S, size)
    x_Sm = jnp.pad(x_Sm, ((0, 0), (0, -size % (C * c))))
    x_SCn = wire.reduce_scatter(x_Sm.reshape(S, c, -1), fast_copies, dim=1).reshape(S, C, -1)
    if codec is None:
        x_Cn = wire.all_reduce(wire.reduce_scatter(x_SCn, slow, dim=0)[0], slow_copies)
    else:
        assert state is not None and moment is not None  # noqa: PT018
        x_Cn, state = reduce_parts(x_SCn, slow, slow_copies, codec, state, moment)
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
