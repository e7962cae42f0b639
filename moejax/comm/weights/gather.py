"""Weights in, gradients out: `gather_weight`, through which every parameter enters a layer.

Per device, inside shard_map. `gather_weight` gathers a weight's shards; its transpose reduces the
weight's gradient (`comm.weights.reduce`), so reduction happens in the backward pass, layer by
layer. The codec's state enters beside the weight (`WithResidual`), and the next state leaves as its
"gradient": state passes through backward without side effects.

A frozen weight enters with its adapter (`WithAdapter`): the weight and both factors are gathered,
and reach the layer apart. Backward reduces the gradients of the two factors, and none of the
weight's size.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.comm import wire
from moejax.comm.codecs.build import build_codec, build_plain_codec
from moejax.comm.codecs.codec import Codec
from moejax.comm.codecs.low_rank import LowRank
from moejax.comm.codecs.pack import decode_packed, encode_packed
from moejax.comm.weights.adapters import (
    Adapter,
    WithAdapter,
    adapter_dims,
    add_adapter,
    scaled,
)
from moejax.comm.weights.path import GatherSpec, class_of, compressible, path_of
from moejax.comm.weights.reduce import Parts, sum_copies, sum_shards
from moejax.comm.weights.residuals import WithResidual, from_floats
from moejax.comm.weights.totals import WithTotal
from moejax.comm.weights.whole import WithWhole, gather_whole, is_kept_whole
from moejax.config.compression import Codecs
from moejax.layout.layout import Axes
from moejax.layout.spec import StepSpec


@jax.tree_util.register_dataclass
@dataclass
class Entered:
    """A weight that entered for a whole step: gathered, in the dtype of its product."""

    whole: Any


# As a layer multiplies by it: an array, or one with its adapter's factors.
Weight = jax.Array | WithAdapter


def gather_weight(param: Any, spec: StepSpec) -> Weight:
    """Returns the weight as this device computes with it: gathered over fsdp, in the spec's dtype.

    Wire, forward: the gathered weight in that dtype, or encoded by its codec if the gather crosses
    nodes; nothing if it was gathered before (`WithWhole`). Of an adapter both factors. Backward:
    see `comm.weights.reduce`. The gradient has the dtype of the parameter.

    Args:
      param: an `nnx.Param` that holds this device's shard, as an array, a `WithResidual`, a
        `WithTotal`, a `WithWhole` or a `WithAdapter`; or `Entered`, the weight. Its metadata `dims`
        has the letters of its dimensions, e.g. dims="DHC". Tensor-sharded dimensions stay sharded.
    """
    return _gather_param(param, spec, spec.dtype)


def gather_float32(param: Any, spec: StepSpec) -> jax.Array:
    """As `gather_weight`, in float32; an adapter is added to its weight, which rounds nothing."""
    w = _gather_param(param, spec, "float32")
    return add_adapter(w, param.get_metadata("dims")) if isinstance(w, WithAdapter) else w


def _gather_param(param: Any, spec: StepSpec, dtype: str) -> Weight:
    """Gathers a parameter; its factors are gathered in `dtype` too."""
    dims, entry = param.get_metadata("dims"), param.get_value()
    if not isinstance(entry, WithAdapter):
        return _gather_entry(entry, dims, spec, dtype)
    factors = adapter_dims(dims)
    assert factors is not None, f"{dims} is no matrix"
    weight = _gather_entry(entry.weight, dims, spec, dtype)
    pairs = zip(entry.adapter, factors, strict=True)
    adapter = Adapter(*(_gather_entry(own, letters, spec, dtype) for own, letters in pairs))
    return WithAdapter(weight, scaled(adapter, spec.adapter_scale, dtype))


def _gather_entry(entry: Any, dims: str, spec: StepSpec, dtype: str) -> jax.Array:
    if isinstance(entry, Entered):
        return entry.whole
    with jax.named_scope("weights"):
        return checkpoint_name(gathered(entry, dims, spec, dtype), wire.WEIGHT_WIRE)


def gathered(shard: Any, dims: str, spec: StepSpec, dtype: str | None) -> jax.Array:
    """The gathered weight of a shard, in any of its forms without an adapter."""
    return _gather(shard, _spec_of(dims, spec, dtype))


def reduced(gradient: jax.Array, entry: Any, dims: str, spec: StepSpec) -> Any:
    """The transpose of `gathered`: the gradient of an entry.

    Args:
      gradient: of the gathered weight, on this device, in any dtype.
    """
    return _reduced(gradient, _beside(entry), _spec_of(dims, spec))


def whole_weight(param: Any) -> jax.Array:
    """Returns a weight of which every device holds all, as it is stored.

    Sends nothing: `reduce_whole` sums the gradients of all such weights at the end of a step.

    Args:
      param: an `nnx.Param` that holds an array or a `WithTotal`.
    """
    w = param.get_value()
    return _whole(w) if isinstance(w, WithTotal) else w


def _spec_of(dims: str, spec: StepSpec, dtype: str | None = None) -> GatherSpec:
    """How a parameter with these dimension letters is gathered and its gradient reduced."""
    codecs, path = spec.codecs, path_of(dims, spec.layout)
    return GatherSpec(
        path,
        dtype or spec.dtype,
        spec.gradient_dtype,
        class_of(dims),
        # What every device holds whole is summed by `reduce_whole`, in one piece.
        micro_bytes=None if spec.layout.is_whole(dims) else spec.micro_bytes,
        rows=spec.scatter_rows,
        gradient_codec=_gradient_codec(codecs, dims) if path.slow and compressible(dims) else None,
        weight_codec=build_plain_codec(codecs.weights if compressible(dims) else None)
        if spec.layout.between_nodes(path.gather)
        else None,
        whole_total=is_kept_whole(dims, spec),
        across=spec.gather_across if path.gathers_across else "flat",
    )


def weights_of_step(params: Any, dims: Any, spec: StepSpec) -> Any:
    """Returns the weights that are gathered once a step, for `attach_whole`; None for others.

    Whole, or across nodes alone: [S, ...], the shards of devices of equal place on S nodes.
    """

    def gather(shard: jax.Array, letters: str) -> jax.Array:
        own = _spec_of(letters, spec)
        return _gather(shard, own) if own.whole_total else _gather_across(shard, own)

    return gather_whole(params, dims, spec, gather)


# A parameter's shard as it enters: an array, a `WithResidual`, a `WithTotal` or a `WithWhole`.
Entry = Any


def shard_of(w: Entry) -> jax.Array:
    """The array inside."""
    while not isinstance(w, jax.Array):
        w = w.weight
    return w


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(w: Entry, spec: GatherSpec) -> jax.Array:
    return _gather_now(w, spec)


def _gather_now(w: Entry, spec: GatherSpec) -> jax.Array:
    if isinstance(w, WithWhole):
        return w.whole if spec.whole_total else _gather_inside(w.whole, spec)
    shard, path = shard_of(w), spec.path
    if path.dim is None:
        return shard.astype(spec.dtype)
    if spec.across != "flat":
        return _gather_inside(_gather_across(shard, spec), spec)
    if spec.weight_codec is None:
        return wire.all_gather(
            shard.astype(spec.dtype), path.gather, dim=path.dim, tag=wire.WEIGHT_WIRE
        )
    shards = _gather_encoded(shard, path.gather, spec.weight_codec, spec.dtype)
    return jnp.concatenate(list(shards), axis=path.dim)


def _gather_across(shard: jax.Array, spec: GatherSpec) -> jax.Array:
    """Returns the shards of the devices of equal place on all S nodes, [S, ...]."""
    slow, _ = spec.path.split(spec.path.gather)
    if spec.weight_codec is None:
        x = shard.astype(spec.dtype)[None]
        return wire.all_gather(x, slow, dim=0, tag=wire.NODE_WIRE)
    shards = _gather_encoded(shard, slow, spec.weight_codec, spec.dtype)
    return checkpoint_name(shards, wire.NODE_WIRE)


def _gather_inside(x_S: jax.Array, spec: GatherSpec) -> jax.Array:
    """Returns the whole weight from what the devices of a node have of it, each [S, ...]."""
    _, fast = spec.path.split(spec.path.gather)
    x_FS, dim = wire.all_gather(x_S[None], fast, dim=0, tag=wire.WEIGHT_WIRE), spec.path.dim
    assert dim is not None, "gathered across nodes"
    # Shards are counted over nodes first.
    apart = jnp.moveaxis(x_FS, (1, 0), (dim, dim + 1))
    shape = list(x_S.shape[1:])
    shape[dim] *= x_FS.shape[0] * x_FS.shape[1]
    return apart.reshape(shape)


def _gather_encoded(shard: jax.Array, axes: Axes, codec: Codec, dtype: str) -> jax.Array:
    """Returns the shards of the devices along the axes, [P, ...], decoded; own ones too."""
    packed, payload = encode_packed(codec, shard.reshape(1, -1))
    packed = wire.all_gather(packed, axes, dim=0, tag=wire.WEIGHT_WIRE)
    shards = decode_packed(codec, packed, payload, shard.size, dtype)
    return shards.reshape(-1, *shard.shape)


def _gather_forward(w, spec):
    return _gather_now(w, spec), _beside(w)  # so that remat policies see the names inside


def _gather_backward(spec, beside, gradient):
    return (_reduced(gradient, beside, spec),)


_gather.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def _whole(w: WithTotal) -> jax.Array:
    return w.weight


def _whole_forward(w):
    return w.weight, _beside(w)


def _whole_backward(w, gradient):
    if w.last:
        return (WithTotal(w.total[0] + gradient, (jnp.zeros_like(gradient),), last=True),)
    return (WithTotal(jnp.zeros_like(gradient), (gradient,), last=False),)


_whole.defvjp(_whole_forward, _whole_backward)


def _beside(w: Entry) -> Entry:
    """What stands beside a shard; of the shard itself only the dtype."""
    if isinstance(w, WithWhole):
        return WithWhole(_beside(w.weight), None)
    if isinstance(w, WithTotal):
        return replace(w, weight=_beside(w.weight), total=w.total if w.last else ())
    if isinstance(w, WithResidual):
        return replace(w, weight=_beside(w.weight))
    return jnp.zeros(0, w.dtype)


def _reduced(gradient: jax.Array, w: Entry, spec: GatherSpec) -> Entry:
    """The gradient of a shard and of what stands beside it.

    Args:
      gradient: of the gathered weight, on this device.
      w: `_beside` of the shard.
    """
    if isinstance(w, WithWhole):
        return WithWhole(_reduced(gradient, w.weight, spec), None)
    path = spec.path
    shape = list(gradient.shape)
    if path.dim is not None:
        shape[path.dim] //= wire.size(path.gather)
    gradient = gradient.astype(spec.gradient_dtype)
    if not isinstance(w, WithTotal):
        return _over_copies(sum_shards(gradient, spec), tuple(shape), w, spec)
    parts = _to_add_up(gradient, spec)
    if not w.last:
        own = tuple(part.astype(jnp.float32) for part in parts)
        return WithTotal(jnp.zeros(shape, w.weight.dtype), own, last=False)
    pairs = zip(w.total, parts, strict=True)
    total = tuple((earlier + own).astype(spec.gradient_dtype) for earlier, own in pairs)
    total = sum_shards(total[0], spec) if spec.whole_total else total
    whole = _over_copies(total, tuple(shape), w.weight, spec)
    return WithTotal(whole, jax.tree.map(jnp.zeros_like, w.total), last=True)


def _to_add_up(gradient: jax.Array, spec: GatherSpec) -> Parts:
    """What micro-batches add up of the gradient of a gathered weight."""
    return (gradient,) if spec.whole_total else sum_shards(gradient, spec)


def _over_copies(parts: Parts, shape: tuple[int, ...], w: Entry, spec: GatherSpec) -> Entry:
    """The gradient of a shard, and the next state of its codec."""
    if not isinstance(w, WithResidual):
        return sum_copies(parts, shape, spec, None, None)[0].astype(w.dtype)
    total, state = sum_copies(parts, shape, spec, w.state, from_floats(w.context))
    return WithResidual(total.astype(w.weight.dtype), state, jnp.zeros_like(w.context))


def empty_totals(params: Any, dims: Any, spec: StepSpec) -> Any:
    """The sums before the first micro-batch, for `attach_totals`: zeros in float32.

    Args:
      params: this device's shards; layers may be stacked.
      dims: the dimension letters of each parameter.
    """

    def empty(param: jax.Array, letters: str) -> Parts:
        gather_spec = _spec_of(letters, spec)
        layers = param.shape[: param.ndim - len(letters)]
        shape = list(param.shape[len(layers) :])
        if gather_spec.path.dim is not None:
            shape[gather_spec.path.dim] *= wire.size(gather_spec.path.gather)
        whole = jax.ShapeDtypeStruct(shape, gather_spec.gradient_dtype)
        parts = jax.eval_shape(lambda gradient: _to_add_up(gradient, gather_spec), whole)
        return tuple(jnp.zeros((*layers, *part.shape), jnp.float32) for part in parts)

    return jax.tree.map(empty, params, dims)


def _gradient_codec(codecs: Codecs, dims: str) -> Codec | LowRank | None:
    """The codec of the gradient of a parameter with these dimension letters."""
    spec = getattr(codecs, class_of(dims))
    return None if spec is None else build_codec(spec)
