"""The loss: next-token cross-entropy over a vocabulary sharded on the tensor axis."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.comm import wire
from moejax.dims import Axes, Layout
from moejax.moe.layer import MoEStats


class LossParts(NamedTuple):
    """Per device; each sums over all devices to the value its name says."""

    nll: Float[Array, ""]  # mean negative log-likelihood of the valid targets, nats
    balance: Float[Array, ""]  # mean over expert layers of the unweighted balance loss
    load_LE: Int[Array, "L E"]  # assignments to each expert of each expert layer
    dropped_L: Int[Array, " L"]  # assignments dropped in each expert layer


def next_token_loss(
    logits_BTv: Float[Array, "B T v"],
    target_BT: Int[Array, "B T"],
    stats: MoEStats | None,
    *,
    num_targets: jax.Array,
    layout: Layout,
) -> tuple[Float[Array, ""], LossParts]:
    """This device's share of the loss, and its parts. The sum over all devices is the loss.

    Args:
      target_BT: -1 where there is nothing to predict.
      num_targets: valid targets of the whole step, over all devices and micro-batches.
    """
    nll_BT = token_nll(logits_BTv, target_BT, layout)
    # All tensor ranks hold the same nll: each gives its share.
    nll = jnp.sum(nll_BT) / num_targets / layout.size(layout.tensor)
    if stats is None:
        empty = jnp.zeros((0,), jnp.int32)
        return nll, LossParts(nll, jnp.zeros(()), empty[:, None], empty)
    parts = LossParts(nll, jnp.mean(stats.balance), stats.load_E, stats.dropped)
    return nll + jnp.sum(stats.loss), parts


def token_nll(
    logits_BTv: Float[Array, "B T v"], target_BT: Int[Array, "B T"], layout: Layout
) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target in nats, the same on all tensor ranks; 0 for -1.

    Wire: three float32 per position over tensor, none in backward.
    """
    v = logits_BTv.shape[-1]
    first = wire.index(layout.tensor) * v if layout.size(layout.tensor) > 1 else 0
    return _nll(logits_BTv, target_BT - first, target_BT >= 0, layout.tensor)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _nll(logits_BTv, local_BT, valid_BT, tensor: Axes):
    return _nll_forward(logits_BTv, local_BT, valid_BT, tensor)[0]


def _nll_forward(logits_BTv, local_BT, valid_BT, tensor: Axes):
    v = logits_BTv.shape[-1]
    here_BT = (local_BT >= 0) & (local_BT < v)
    safe_BT = jnp.where(here_BT, local_BT, 0)
    chosen_BT = jnp.take_along_axis(logits_BTv, safe_BT[..., None], axis=-1)[..., 0]
    chosen_BT = wire.all_reduce(jnp.where(here_BT, chosen_BT, 0), tensor)
    top_BT = wire.all_max(jnp.max(logits_BTv, axis=-1), tensor)
    total_BT = jnp.sum(jnp.exp(logits_BTv - top_BT[..., None]), axis=-1)
    log_total_BT = jnp.log(wire.all_reduce(total_BT, tensor)) + top_BT
    nll_BT = jnp.where(valid_BT, log_total_BT - chosen_BT, 0)
    return nll_BT, (logits_BTv, local_BT, valid_BT, log_total_BT)


def _nll_backward(tensor: Axes, saved, gradient_BT):
    """Every tensor rank's copy of the result depends on these logits: the ranks' shares add up.

    They are equal, because each rank takes the same share of the same nll; so the sum needs no
    communication.
    """
    logits_BTv, local_BT, valid_BT, log_total_BT = saved
    scale_BT = jnp.where(valid_BT, gradient_BT, 0) * wire.size(tensor)
    target_BTv = local_BT[..., None] == jnp.arange(logits_BTv.shape[-1])
    softmax_BTv = jnp.exp(logits_BTv - log_total_BT[..., None])
    return (softmax_BTv - target_BTv) * scale_BT[..., None], None, None


_nll.defvjp(_nll_forward, _nll_backward)
