"""Weights in, gradients out: `gather_weight`, through which every parameter enters a layer.

Per device, inside shard_map. `gather_weight` gathers a weight's shards; its transpose reduces the
weight's gradient (`comm.weights.reduce`), so reduction happens in the backward pass, layer by
layer. The codec's state enters beside the weight (`WithResidual`), and the next state leaves as its
"gradient": state passes through backward without side effects.

A frozen weight enters with its adapter (`WithAdapter`). The adapter is added to the weight's shard,
so that one gather brings the sum. Backward reduces the gradients of the two factors, and none of
the weight's size.
"""

from dataclasses import dataclass
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
    factor_gradients,
)
from moejax.comm.weights.path import GatherSpec, class_of, compressible, path_of
from moejax.comm.weights.reduce import reduce_gradient
from moejax.comm.weights.residuals import WithResidual, from_floats
from moejax.config.compression import Codecs
from moejax.layout.spec import StepSpec


def gather_weight(param: Any, spec: StepSpec, dtype: str | None = None) -> jax.Array:
    """Returns the weight as this device computes with it: gathered over fsdp, cast to `dtype`.

    Wire, forward: the gathered weight in `dtype`, or encoded by its codec if the gather crosses
    nodes. Backward: see `reduce_gradient`. The returned gradient has the dtype of the parameter.

    Args:
      param: an `nnx.Param` that holds this device's shard, as an array, a `WithResidual` or a
        `WithAdapter`. Its metadata `dims` has the letters of its dimensions, e.g. dims="DHC".
        Tensor-sharded dimensions stay sharded.
      dtype: the dtype to compute in; None for the spec's.
    """
    dims, shard = param.get_metadata("dims"), param.get_value()
    gather_spec = _spec_of(dims, spec, dtype, remembers=isinstance(shard, WithResidual))
    with jax.named_scope("weights"):
        if isinstance(shard, WithAdapter):
            factors = adapter_dims(dims)
            assert factors is not None, f"{dims} is no matrix"
            a, b = (_spec_of(letters, spec, dtype) for letters in factors)
            whole = _gather_adapted(shard, AdaptedSpec(dims, spec.adapter_scale, gather_spec, a, b))
        else:
            whole = _gather(shard, gather_spec)
        return checkpoint_name(whole, wire.WEIGHT_WIRE)


def _spec_of(
    dims: str, spec: StepSpec, dtype: str | None, *, remembers: bool = False
) -> GatherSpec:
    """How a parameter with these dimension letters is gathered and its gradient reduced.

    Args:
      remembers: whether its gradient has a codec.
    """
    codecs, path = spec.codecs, path_of(dims, spec.layout)
    return GatherSpec(
        path,
        dtype or spec.dtype,
        spec.gradient_dtype,
        class_of(dims),
        micro_bytes=spec.micro_bytes,
        gradient_codec=_gradient_codec(codecs, dims) if remembers else None,
        weight_codec=build_plain_codec(codecs.weights if compressible(dims) else None)
        if spec.layout.between_nodes(path.gather)
        else None,
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(w: jax.Array | WithResidual, spec: GatherSpec) -> jax.Array:
    shard, path = w.weight if isinstance(w, WithResidual) else w, spec.path
    if path.dim is None:
        return shard.astype(spec.dtype)
    if spec.weight_codec is None:
        return wire.all_gather(
            shard.astype(spec.dtype), path.gather, dim=path.dim, tag=wire.WEIGHT_WIRE
        )
    packed, payload = encode_packed(spec.weight_codec, shard.reshape(1, -1))
    packed = wire.all_gather(packed, path.gather, dim=0, tag=wire.WEIGHT_WIRE)
    shards = decode_packed(spec.weight_codec, packed, payload, shard.size, spec.dtype)
    return jnp.concatenate(list(shards.reshape(-1, *shard.shape)), axis=path.dim)


def _gather_forward(w, spec):
    if isinstance(w, WithResidual):
        return _gather(w, spec), (jnp.zeros(0, w.weight.dtype), w.state, w.context)
    return _gather(w, spec), (jnp.zeros(0, w.dtype), None, None)


def _gather_backward(spec, saved, gradient):
    like, state, context = saved
    gradient = gradient.astype(spec.gradient_dtype)
    if state is None:
        return (reduce_gradient(gradient, spec, None, None)[0].astype(like.dtype),)
    total, state = reduce_gradient(gradient, spec, state, from_floats(context))
    return (WithResidual(total.astype(like.dtype), state, jnp.zeros_like(context)),)


_gather.defvjp(_gather_forward, _gather_backward)


@dataclass(frozen=True)
class AdaptedSpec:
    """How a frozen weight with an adapter is gathered, and the adapter's gradients reduced."""

    dims: str  # of the weight
    scale: float  # of the adapter
    weight: GatherSpec
    a: GatherSpec
    b: GatherSpec


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_adapted(w: WithAdapter, spec: AdaptedSpec) -> jax.Array:
    return _gather(add_adapter(w, spec.dims, spec.scale), spec.weight)


def _gather_adapted_forward(w, spec):
    return _gather_adapted(w, spec), w.adapter


def _gather_adapted_backward(spec, adapter, gradient):
    """Returns the gradients of the factors; that of the weight is None.

    Wire: the factor that shares the weight's gathered dimension, and both reductions.
    """
    with jax.named_scope("weights"):
        whole = Adapter(_gather(adapter.a, spec.a), _gather(adapter.b, spec.b))
    own = factor_gradients(gradient, whole, spec.dims, spec.scale)

    def reduced(gradient: jax.Array, factor: jax.Array, spec: GatherSpec) -> jax.Array:
        gradient = gradient.astype(spec.gradient_dtype)
        return reduce_gradient(gradient, spec, None, None)[0].astype(factor.dtype)

    factors = Adapter(reduced(own.a, adapter.a, spec.a), reduced(own.b, adapter.b, spec.b))
    return (WithAdapter(None, factors),)


_gather_adapted.defvjp(_gather_adapted_forward, _gather_adapted_backward)


def _gradient_codec(codecs: Codecs, dims: str) -> Codec | LowRank | None:
    """The codec of the gradient of a parameter with these dimension letters."""
    spec = getattr(codecs, class_of(dims))
    return None if spec is None else build_codec(spec)
