"""Weights in, gradients out: the one function through which a parameter enters a layer.

Per device, inside shard_map. `enter` gathers a weight's shards; its transpose reduces the weight's
gradient: reduce-scatter over the axes it was gathered on, then a sum over the axes that hold
copies. So the reduction happens inside the backward pass, layer by layer. Parameters that every
device holds whole (norm scales) are too small for a collective each: `reduce_whole` sums
them all in one at the end.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.comm import wire
from moejax.dims import Axes, Layout
from moejax.program import Program

Gathers = tuple[tuple[int, Axes], ...]


def enter(param: Any, program: Program, dtype: str | None = None) -> jax.Array:
    """Returns the weight as this device computes with it: gathered over fsdp, cast to `dtype`.

    Wire, forward: the gathered weight in `dtype`. Backward: the same in `gradient_dtype`, and for
    axes with copies twice the shard. The gradient that leaves has the dtype of the parameter.

    Args:
      param: an `nnx.Param` that holds this device's shard and, as metadata, the letters of its
        dimensions, e.g. dims="DHC". Tensor-sharded dimensions stay sharded.
      dtype: the dtype to compute in; the program's unless given.
    """
    gathers, copies = _plan(param.get_metadata("dims"), program.layout)
    w = param[...]
    dtypes = (dtype or program.dtype, program.gradient_dtype, str(w.dtype))
    return checkpoint_name(_enter(w, gathers, copies, *dtypes), wire.WEIGHT_WIRE)


def _plan(dims: str, layout: Layout) -> tuple[Gathers, Axes]:
    """What to gather (dimension, axes) and over which axes the parameter has copies."""
    axes_by_dim = layout.param_axes(dims)
    kept = layout.expert_owner_axes if dims[0] == "E" else ()
    kept += layout.tensor
    gathers = []
    for dim, axes in enumerate(axes_by_dim):
        gathered = tuple(axis for axis in axes if axis not in kept and layout.size((axis,)) > 1)
        if gathered:
            gathers.append((dim, gathered))
    held = {axis for axes in axes_by_dim for axis in axes}
    copies = tuple(a for a in layout.mesh_axes if a not in held and layout.size((a,)) > 1)
    return tuple(gathers), copies if held else ()


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _enter(w, gathers, copies, dtype, gradient_dtype, master_dtype):
    w = w.astype(dtype)
    for dim, axes in gathers:
        w = wire.all_gather(w, axes, dim=dim, tag=wire.WEIGHT_WIRE)
    return w


def _enter_forward(w, *plan):
    return _enter(w, *plan), None


def _enter_backward(gathers, copies, dtype, gradient_dtype, master_dtype, _, gradient):
    gradient = gradient.astype(gradient_dtype)
    for dim, axes in reversed(gathers):
        gradient = wire.reduce_scatter(gradient, axes, dim=dim)
    gradient = wire.all_reduce(gradient, copies)
    return (gradient.astype(master_dtype),)


_enter.defvjp(_enter_forward, _enter_backward)


def reduce_whole(gradients: list[jax.Array], layout: Layout) -> list[jax.Array]:
    """Sums the gradients of parameters that every device holds whole, in one all-reduce."""
    if not gradients:
        return []
    flat = jnp.concatenate([g.reshape(-1) for g in gradients])
    flat = wire.all_reduce(flat, layout.mesh_axes)
    ends = [int(sum(g.size for g in gradients[: i + 1])) for i in range(len(gradients))]
    parts = jnp.split(flat, ends[:-1])
    return [part.reshape(g.shape) for part, g in zip(parts, gradients, strict=True)]
