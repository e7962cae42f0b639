"""Weights in, gradients out: the one function through which a parameter enters a layer.

Per device, inside shard_map. `enter` gathers a weight's shards; its transpose reduces the weight's
gradient, hop by hop: inside the node first, so that what crosses the slow link is already a sum,
then across nodes, then back inside the node. So the reduction happens inside the backward pass,
layer by layer. Parameters that every device holds whole (norm scales) are too small for a
collective each: `reduce_whole` sums them all in one at the end.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.comm import wire
from moejax.dims import Axes, Layout
from moejax.program import Program


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

    Wire, forward: the gathered weight in `dtype`. Backward: see `_reduced`, in `gradient_dtype`.
    The gradient that leaves has the dtype of the parameter.

    Args:
      param: an `nnx.Param` that holds this device's shard and, as metadata, the letters of its
        dimensions, e.g. dims="DHC". Tensor-sharded dimensions stay sharded.
      dtype: the dtype to compute in; the program's unless given.
    """
    way, w = way_of(param.get_metadata("dims"), program.layout), param[...]
    dtypes = (dtype or program.dtype, program.gradient_dtype, str(w.dtype))
    return checkpoint_name(_enter(w, way, *dtypes), wire.WEIGHT_WIRE)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _enter(w, way, dtype, gradient_dtype, master_dtype):
    if way.dim is None:
        return w.astype(dtype)
    return wire.all_gather(w.astype(dtype), way.gather, dim=way.dim, tag=wire.WEIGHT_WIRE)


def _enter_forward(w, *plan):
    return _enter(w, *plan), None


def _enter_backward(way, dtype, gradient_dtype, master_dtype, _, gradient):
    return (_reduced(gradient.astype(gradient_dtype), way).astype(master_dtype),)


_enter.defvjp(_enter_forward, _enter_backward)


def _reduced(gradient: jax.Array, way: Way) -> jax.Array:
    """The gradient of the whole weight, summed; each device keeps its shard.

    Wire inside a node: reduce-scatter over the axes it was gathered on and, where nodes are
    crossed, over the axes with copies, with an all-gather at the end. Across nodes: reduce-scatter
    and all-reduce of what is left, the shard over the number of copies inside.
    """
    if not way.slow:
        if way.dim is not None:
            gradient = wire.reduce_scatter(gradient, way.gather, dim=way.dim)
        return wire.all_reduce(gradient, way.copies)
    (slow, fast), (slow_copies, fast_copies) = way.split(way.gather), way.split(way.copies)
    S, F, C = (wire.size(axes) for axes in (slow, fast, fast_copies))
    moved = gradient[None] if way.dim is None else jnp.moveaxis(gradient, way.dim, 0)
    shape = (moved.shape[0] // (S * F), *moved.shape[1:])
    size = math.prod(shape)
    x_Sm = wire.reduce_scatter(moved.reshape(S, F, size), fast, dim=1).reshape(S, size)
    x_Sm = jnp.pad(x_Sm, ((0, 0), (0, -size % C)))
    x_Sn = wire.reduce_scatter(x_Sm.reshape(S, C, -1), fast_copies, dim=1).reshape(S, -1)
    x_n = wire.all_reduce(wire.reduce_scatter(x_Sn, slow, dim=0), slow_copies)
    x_m = wire.all_gather(x_n.reshape(1, -1), fast_copies, dim=0).reshape(-1)[:size]
    shard = x_m.reshape(shape)
    return shard[0] if way.dim is None else jnp.moveaxis(shard, 0, way.dim)


def reduce_whole(gradients: list[jax.Array], layout: Layout) -> list[jax.Array]:
    """Sums the gradients of parameters that every device holds whole, in one all-reduce."""
    if not gradients:
        return []
    flat = jnp.concatenate([g.reshape(-1) for g in gradients])
    flat = wire.all_reduce(flat, layout.mesh_axes)
    ends = [int(sum(g.size for g in gradients[: i + 1])) for i in range(len(gradients))]
    parts = jnp.split(flat, ends[:-1])
    return [part.reshape(g.shape) for part, g in zip(parts, gradients, strict=True)]
