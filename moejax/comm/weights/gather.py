"""Weights in, gradients out: the one function through which a parameter enters a layer.

Per device, inside shard_map. `enter` gathers a weight's shards; its transpose reduces the weight's
gradient (`reduce`). So the reduction happens inside the backward pass, layer by layer. What a codec
remembers enters beside the weight, and its next value leaves as its "gradient": state goes through
backward without side effects.
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
from moejax.comm.weights.path import class_of, compressible, path_of
from moejax.comm.weights.reduce import GatherSpec, reduce_gradient
from moejax.comm.weights.residuals import WithResidual, from_floats
from moejax.config.compression import Codecs
from moejax.layout.spec import StepSpec


def gather_weight(param: Any, spec: StepSpec, dtype: str | None = None) -> jax.Array:
    """Returns the weight as this device computes with it: gathered over fsdp, cast to `dtype`.

    Wire, forward: the gathered weight in `dtype`, or as its codec says where the gather crosses
    nodes. Backward: see `reduce_gradient`. The gradient that leaves has the dtype of the parameter.

    Args:
      param: an `nnx.Param` of this device's shard, alone or in a `WithResidual`; its metadata
        are the letters of its dimensions, e.g. dims="DHC". Tensor-sharded dimensions stay sharded.
      dtype: the dtype to compute in; the spec's unless given.
    """
    dims, w, codecs = param.get_metadata("dims"), param.get_value(), spec.codecs
    path = path_of(dims, spec.layout)
    how = GatherSpec(
        path,
        dtype or spec.dtype,
        spec.gradient_dtype,
        class_of(dims),
        micro_bytes=spec.micro_bytes,
        codec=_built(codecs, dims) if isinstance(w, WithResidual) else None,
        weights=build_plain_codec(codecs.weights if compressible(dims) else None)
        if spec.layout.between_nodes(path.gather)
        else None,
    )
    with jax.named_scope("weights"):
        return checkpoint_name(_enter(w, how), wire.WEIGHT_WIRE)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(w: jax.Array | WithResidual, how: GatherSpec) -> jax.Array:
    shard, path = w.weight if isinstance(w, WithResidual) else w, how.path
    if path.dim is None:
        return shard.astype(how.dtype)
    if how.weights is None:
        return wire.all_gather(
            shard.astype(how.dtype), path.gather, dim=path.dim, tag=wire.WEIGHT_WIRE
        )
    packed, payload = encode_packed(how.weights, shard.reshape(1, -1))
    packed = wire.all_gather(packed, path.gather, dim=0, tag=wire.WEIGHT_WIRE)
    shards = decode_packed(how.weights, packed, payload, shard.size, how.dtype)
    return jnp.concatenate(list(shards.reshape(-1, *shard.shape)), axis=path.dim)


def _enter_forward(w, how):
    if isinstance(w, WithResidual):
        return _enter(w, how), (jnp.zeros(0, w.weight.dtype), w.state, w.when)
    return _enter(w, how), (jnp.zeros(0, w.dtype), None, None)


def _enter_backward(how, kept, gradient):
    like, state, when = kept
    gradient = gradient.astype(how.gradient_dtype)
    if state is None:
        return (reduce_gradient(gradient, how, None, None)[0].astype(like.dtype),)
    total, state = reduce_gradient(gradient, how, state, from_floats(when))
    return (WithResidual(total.astype(like.dtype), state, jnp.zeros_like(when)),)


_enter.defvjp(_enter_forward, _enter_backward)


def _built(codecs: Codecs, dims: str) -> Codec | LowRank | None:
    spec = getattr(codecs, class_of(dims))
    return None if spec is None else build_codec(spec)
