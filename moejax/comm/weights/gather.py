"""Weights in, gradients out: `gather_weight`, through which every parameter enters a layer.

Per device, inside shard_map. `gather_weight` gathers a weight's shards; its transpose reduces the
weight's gradient (`comm.weights.reduce`), so reduction happens in the backward pass, layer by
layer. A parameter is a `Shard`, which has all that this needs beside the weight.

A frozen weight is gathered with the factors of its adapter, and a layer gets the three apart.
Backward reduces the gradients of the two factors, and makes none of the weight's size.

From a layer to the collectives:

    gather_weight, gather_float32   a parameter in the dtype of compute, or in float32
      _gather_param                 its weight, and the factors of its adapter
        _gather_tagged              one of these; tagged for remat
          gather_shard, _gather     with `_reduce` as backward
            _gather_now             the collective, or `_gather_across` and then `_gather_inside`

Letters: a weight [M, N] is sharded along M over P devices: over S nodes, with F devices in each. A
shard is [m, N], encoded e bytes.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec, pack, unpack
from moejax.comm.host import is_on_host, to_device, zeros_by_layer
from moejax.comm.weights.adapters import (
    AdaptedWeight,
    Adapter,
    Weight,
    add_adapter,
    factors_of,
    scaled,
)
from moejax.comm.weights.path import (
    GatherSpec,
    build_gather_spec,
    crosses_nodes_once,
    is_gathered_once,
)
from moejax.comm.weights.reduce import Parts, sum_copies, sum_shards
from moejax.comm.weights.residuals import Residual
from moejax.comm.weights.shard import Shard, as_shard
from moejax.layout.layout import Axes
from moejax.layout.spec import StepSpec


def gather_weight(param: Any, spec: StepSpec) -> Weight:
    """Returns the weight as this device computes with it: gathered over fsdp, in the spec's dtype.

    Wire, forward: the gathered weight in that dtype, or encoded by its codec if the gather crosses
    nodes; nothing if it was gathered once a step (`Shard.gathered`). Of an adapter both factors.
    Backward: see `comm.weights.reduce`. The gradient has the dtype of the parameter.

    Args:
      param: an `nnx.Param` that holds this device's shard, an array or a `Shard`. Its metadata
        `dims` has the letters of its dimensions, e.g. dims="DHC". Tensor-sharded dimensions stay
        sharded.
    """
    return _gather_param(param, spec, spec.dtype)


def gather_float32(param: Any, spec: StepSpec) -> jax.Array:
    """As `gather_weight`, in float32; an adapter is added to its weight, which rounds nothing."""
    w = _gather_param(param, spec, "float32")
    return add_adapter(w, param.get_metadata("dims")) if isinstance(w, AdaptedWeight) else w


def replicated_weight(param: Any) -> jax.Array:
    """Returns a weight that every device holds all of, as it is stored.

    Sends nothing: `reduce_replicated` sums the gradients of all such weights at the end of a step.

    Args:
      param: an `nnx.Param` that holds an array, or a `Shard` with at most a total beside it.
    """
    shard = as_shard(param.get_value())
    return shard.weight if shard.total is None else _replicated(shard)


def _gather_param(param: Any, spec: StepSpec, dtype: str) -> Weight:
    """Gathers a parameter; its factors are gathered in `dtype` too."""
    dims, shard = param.get_metadata("dims"), as_shard(param.get_value())
    weight = _gather_tagged(replace(shard, adapter=None), dims, spec, dtype)
    if shard.adapter is None:
        return weight
    pairs = zip(map(as_shard, shard.adapter), factors_of(dims), strict=True)
    adapter = Adapter(*(_gather_tagged(own, letters, spec, dtype) for own, letters in pairs))
    return AdaptedWeight(weight, scaled(adapter, spec.adapter_scale, dtype))


def _gather_tagged(shard: Shard, dims: str, spec: StepSpec, dtype: str) -> jax.Array:
    if shard.weight is None:
        return shard.gathered
    with jax.named_scope("weights"):
        # Out here, so that what a micro-batch adds returns to the host. `MoE.fetch` has the weight.
        shard = replace(shard, total=jax.tree.map(to_device, shard.total))
        return checkpoint_name(gather_shard(shard, dims, spec, dtype), wire.WEIGHT_WIRE)


def gather_shard(shard: Shard, dims: str, spec: StepSpec, dtype: str) -> jax.Array:
    """Returns the gathered weight of a shard without an adapter."""
    return _gather(shard, build_gather_spec(dims, spec, dtype))


def reduce_gradient(gradient: jax.Array, shard: Shard, dims: str, spec: StepSpec) -> Shard:
    """The transpose of `gather_shard`: returns the gradients of a shard's fields.

    Args:
      gradient: of the gathered weight, on this device, in any dtype.
    """
    return _reduce(gradient, _saved(shard), build_gather_spec(dims, spec))


def gather_once(params: Any, dims: Any, spec: StepSpec) -> Any:
    """Gathers weights before the first micro-batch. Returns `Shard.gathered` of each, or None.

    If `mesh.gather_dense` is "step": dense matrices, all layers of a stack at once. Micro-batches
    add up their gradients in the shape of the gathered weight, and the last one reduces the sums.

    If `mesh.gather_across` is "step": all other matrices with shards across nodes, across nodes
    alone, [S, m, N]. `gather_weight` then gathers them inside the node. Micro-batches add up
    gradients that are summed inside the node, and the last one sends the sums to other nodes.

    Args:
      params: this device's shards; layers may be stacked.
      dims: the dimension letters of each parameter.
    """

    def gather(param: jax.Array, letters: str) -> jax.Array | None:
        once = is_gathered_once(letters, spec)
        if not (once or crosses_nodes_once(letters, spec)):
            return None

        def one(shard: jax.Array) -> jax.Array:
            own = build_gather_spec(letters, spec)
            return _gather(Shard(shard), own) if once else _gather_across(shard, own)

        for _ in range(param.ndim - len(letters)):
            one = jax.vmap(one)
        return one(param)

    with jax.named_scope("weights"):
        return jax.tree.map(gather, params, dims)


def empty_totals(params: Any, dims: Any, spec: StepSpec) -> Any:
    """Returns `Shard.total` before the first micro-batch: zeros in float32.

    Args:
      params: this device's shards; layers may be stacked.
      dims: the dimension letters of each parameter.
    """

    def empty(param: jax.Array, letters: str) -> Parts:
        gather_spec = build_gather_spec(letters, spec)
        layers = param.shape[: param.ndim - len(letters)]
        shape = list(param.shape[len(layers) :])
        if gather_spec.path.dim is not None:
            shape[gather_spec.path.dim] *= wire.size(gather_spec.path.gather)
        gradient = jax.ShapeDtypeStruct(shape, gather_spec.gradient_dtype)
        parts = jax.eval_shape(lambda gradient: _to_add_up(gradient, gather_spec), gradient)
        zeros = zeros_by_layer if is_on_host(param) else jnp.zeros
        return tuple(zeros((*layers, *part.shape), jnp.float32) for part in parts)

    return jax.tree.map(empty, params, dims)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(shard: Shard, spec: GatherSpec) -> jax.Array:
    return _gather_now(shard, spec)


def _gather_now(shard: Shard, spec: GatherSpec) -> jax.Array:
    if shard.gathered is not None:
        once = spec.unsharded_total
        return shard.gathered if once else _gather_inside(shard.gathered, spec)
    w_mN, path = shard.weight, spec.path
    if path.dim is None:
        return w_mN.astype(spec.dtype)
    if spec.across != "flat":
        return _gather_inside(_gather_across(w_mN, spec), spec)
    if spec.weight_codec is None:
        # M/P N -> M N
        return wire.all_gather(
            w_mN.astype(spec.dtype), path.gather, dim=path.dim, tag=wire.WEIGHT_WIRE
        )
    w_PmN = _gather_encoded(w_mN, path.gather, spec.weight_codec, spec.dtype)
    return jnp.concatenate(list(w_PmN), axis=path.dim)


def _gather_across(w_mN: jax.Array, spec: GatherSpec) -> jax.Array:
    """Returns the shards of the devices of equal place on all S nodes, [S, m, N]."""
    slow, _ = spec.path.split(spec.path.gather)
    if spec.weight_codec is None:
        x_1mN = w_mN.astype(spec.dtype)[None]
        return wire.all_gather(x_1mN, slow, dim=0, tag=wire.NODE_WIRE)  # 1 m N -> S m N
    w_SmN = _gather_encoded(w_mN, slow, spec.weight_codec, spec.dtype)
    return checkpoint_name(w_SmN, wire.NODE_WIRE)


def _gather_inside(w_SmN: jax.Array, spec: GatherSpec) -> jax.Array:
    """Returns the gathered weight [M, N]; each device of a node has shards of all S nodes."""
    _, fast = spec.path.split(spec.path.gather)
    dim = spec.path.dim
    assert dim is not None, "gathered across nodes"
    # 1 S m N -> F S m N
    w_FSmN = wire.all_gather(w_SmN[None], fast, dim=0, tag=wire.WEIGHT_WIRE)
    # Shards are counted over nodes first.
    apart = jnp.moveaxis(w_FSmN, (1, 0), (dim, dim + 1))
    shape = list(w_SmN.shape[1:])
    shape[dim] *= w_FSmN.shape[0] * w_FSmN.shape[1]
    return apart.reshape(shape)


def _gather_encoded(w_mN: jax.Array, axes: Axes, codec: Codec, dtype: str) -> jax.Array:
    """Returns the shards of the P devices along the axes, [P, m, N], decoded; own ones too."""
    payload = codec.encode_once(w_mN.reshape(1, -1))
    packed_Pe = wire.all_gather(pack(payload), axes, dim=0, tag=wire.WEIGHT_WIRE)  # 1 e -> P e
    shards = codec.decode_as(unpack(packed_Pe, payload), w_mN.size, dtype)
    return shards.reshape(-1, *w_mN.shape)


def _gather_forward(shard, spec):
    return _gather_now(shard, spec), _saved(shard)  # so that remat policies see the names inside


def _gather_backward(spec, saved, gradient):
    return (_reduce(gradient, saved, spec),)


_gather.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def _replicated(shard: Shard) -> jax.Array:
    return shard.weight


def _replicated_forward(shard):
    return shard.weight, _saved(shard)


def _replicated_backward(saved, gradient):
    if saved.last:
        summed = saved.total[0] + gradient
        return (Shard(summed, total=(jnp.zeros_like(gradient),)),)
    return (Shard(jnp.zeros_like(gradient), total=(gradient,), last=False),)


_replicated.defvjp(_replicated_forward, _replicated_backward)


def _saved(shard: Shard) -> Shard:
    """Returns what backward needs of a shard: of the weight itself the dtype alone."""
    total = shard.total if shard.last or shard.total is None else ()
    empty = jnp.zeros(0, shard.weight.dtype)
    return replace(shard, weight=empty, total=total, gathered=None)


def _reduce(gradient: jax.Array, saved: Shard, spec: GatherSpec) -> Shard:
    """Returns the gradients of a shard's fields.

    Args:
      gradient: of the gathered weight, [M, N], on this device.
      saved: `_saved` of the shard.
    """
    path, shape = spec.path, list(gradient.shape)
    if path.dim is not None:
        shape[path.dim] //= wire.size(path.gather)
    gradient = gradient.astype(spec.gradient_dtype)
    if saved.total is None:
        return _reduce_over_copies(sum_shards(gradient, spec), tuple(shape), saved, spec)
    parts = _to_add_up(gradient, spec)
    if not saved.last:
        own = tuple(part.astype(jnp.float32) for part in parts)
        return Shard(jnp.zeros(shape, saved.weight.dtype), total=own, last=False)
    pairs = zip(saved.total, parts, strict=True)
    total = tuple((earlier + own).astype(spec.gradient_dtype) for earlier, own in pairs)
    total = sum_shards(total[0], spec) if spec.unsharded_total else total
    reduced = _reduce_over_copies(total, tuple(shape), saved, spec)
    return replace(reduced, total=jax.tree.map(jnp.zeros_like, saved.total))


def _to_add_up(gradient: jax.Array, spec: GatherSpec) -> Parts:
    """Returns the parts of a gradient [M, N] that micro-batches add up."""
    return (gradient,) if spec.unsharded_total else sum_shards(gradient, spec)


def _reduce_over_copies(
    parts: Parts, shape: tuple[int, ...], saved: Shard, spec: GatherSpec
) -> Shard:
    """Returns the gradient of a shard, and the next state of its codec."""
    residual, dtype = saved.residual, saved.weight.dtype
    if residual is None:
        return Shard(sum_copies(parts, shape, spec, None, None)[0].astype(dtype))
    step = residual.step.astype(jnp.int32)
    total, state = sum_copies(parts, shape, spec, residual.state, step)
    return Shard(total.astype(dtype), Residual(state, jnp.zeros_like(residual.step)))
