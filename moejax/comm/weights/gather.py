"""Weights in, gradients out: `gather_weight`, through which every parameter enters a layer.

Per device, inside shard_map. `gather_weight` gathers a weight's shards; its transpose reduces the
weight's gradient (`comm.weights.reduce`), so reduction happens in the backward pass, layer by
layer. The codec's state enters beside the weight (`WithResidual`), and the next state leaves as its
"gradient": state passes through backward without side effects.
"""

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
      param: an `nnx.Param` that holds this device's shard, as an array or a `WithResidual`. Its
        metadata `dims` has the letters of its dimensions, e.g. dims="DHC". Tensor-sharded
        dimensions stay sharded.
      dtype: the dtype to compute in; None for the spec's.
    """
    dims, shard, codecs = param.get_metadata("dims"), param.get_value(), spec.codecs
    path = path_of(dims, spec.layout)
    gather_spec = GatherSpec(
        path,
        dtype or spec.dtype,
        spec.gradient_dtype,
        class_of(dims),
        micro_bytes=spec.micro_bytes,
        gradient_codec=_gradient_codec(codecs, dims) if isinstance(shard, WithResidual) else None,
        weight_codec=build_plain_codec(codecs.weights if compressible(dims) else None)
        if spec.layout.between_nodes(path.gather)
        else None,
    )
    with jax.named_scope("weights"):
        return checkpoint_name(_gather(shard, gather_spec), wire.WEIGHT_WIRE)


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


def _gradient_codec(codecs: Codecs, dims: str) -> Codec | LowRank | None:
    """The codec of the gradient of a parameter with these dimension letters."""
    spec = getattr(codecs, class_of(dims))
    return None if spec is None else build_codec(spec)
