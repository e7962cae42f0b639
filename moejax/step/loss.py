"""The loss: next-token cross-entropy over a vocabulary sharded on the tensor axis.

Logits are the largest array of a small model and of any with a large vocabulary, so they never
exist as a whole: one chunk of tokens at a time is projected, and differentiated while it is in
cache. That is possible because the loss is a plain sum over tokens.

Letters as in `layout.layout`; S counts spans of the balance loss (`moe.router`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.weights.adapters import AdaptedWeight, Weight
from moejax.config.schema import MoEConfig
from moejax.layout.layout import Axes, Layout
from moejax.model.layers import capped, logits
from moejax.moe.layer import MoEStats
from moejax.moe.router import balance_loss


class LossParts(NamedTuple):
    """Parts of the loss. `nll`, `balance` and `entropy` are a device's shares, yet to be summed."""

    nll: Float[Array, ""]  # mean negative log-likelihood of the valid targets, nats
    balance: Float[Array, ""]  # mean over expert layers of the unweighted balance loss
    entropy: Float[Array, ""]  # mean over expert layers of the router's entropy; not in the loss
    load_LE: Int[Array, "L E"]  # assignments to each expert of each expert layer, over all devices
    # By expert layer, over all devices: assignments dropped, those in overflow rounds, rounds.
    uneven_L3: Int[Array, "L 3"]
    # As `nll`, of the targets that `model.predict_ahead` predicts; None without.
    ahead: Float[Array, ""] | None = None
    # `MoEStats.needed_EQ` of this device's layers and tokens, yet to be summed; None without.
    needed_LEQ: Int[Array, "L E Q"] | None = None
    # `MoEStats.replayed_2` of each expert layer, over all devices; None without recorded experts.
    replayed_L2: Int[Array, "L 2"] | None = None


class AheadTargets(NamedTuple):
    """The terms that multi-token prediction adds to a loss.

    Attributes:
      x_BTD: hidden states that predict the token after the next.
      target_BT: its targets; -1 for none.
      num_targets: valid targets of the step, over all devices and micro-batches.
      coefficient: factor of their mean in the loss.
    """

    x_BTD: Float[Array, "B T D"]
    target_BT: Int[Array, "B T"]
    num_targets: jax.Array
    coefficient: float


def next_token_loss(
    x_BTD: Float[Array, "B T D"],
    w_Dv: Weight,
    target_BT: Int[Array, "B T"],
    stats: MoEStats | None,
    *,
    moe: MoEConfig,
    num_targets: jax.Array,
    micro_batches: int,
    layout: Layout,
    chunk_tokens: int,
    cap: float | None = None,
    ahead: AheadTargets | None = None,
) -> tuple[Float[Array, ""], LossParts]:
    """Returns this device's share of the loss, and its parts. The sum over devices is the loss.

    Args:
      x_BTD: final hidden states, all positions on every tensor rank.
      w_Dv: this tensor rank's slice [D, v] of the output projection.
      target_BT: targets; -1 for none.
      stats: statistics of the expert layers, stacked; None without experts.
      num_targets: valid targets of the step, over all devices and micro-batches.
      micro_batches: number of micro-batches in a step.
      chunk_tokens: maximum number of tokens whose logits exist at one time.
      cap: `model.logit_cap`.
      ahead: terms of multi-token prediction, by the same output projection.
    """

    def mean(x_BTD: jax.Array, target_BT: jax.Array, num_targets: jax.Array) -> jax.Array:
        total = sum_nll(x_BTD, w_Dv, target_BT, layout, chunk_tokens=chunk_tokens, cap=cap)
        # All tensor ranks hold the same sum: each contributes a share.
        return total / num_targets / layout.size(layout.tensor)

    loss = nll = mean(x_BTD, target_BT, num_targets)
    ahead_nll = None
    if ahead is not None:
        ahead_nll = mean(ahead.x_BTD, ahead.target_BT, ahead.num_targets)
        loss = nll + ahead.coefficient * ahead_nll
    if stats is None:
        load_LE, uneven_L3 = jnp.zeros((0, 1), jnp.int32), jnp.zeros((0, 3), jnp.int32)
        return loss, LossParts(nll, jnp.zeros(()), jnp.zeros(()), load_LE, uneven_L3, ahead_nll)
    router_loss, balance, load_LE, uneven_L3, replayed_L2 = router_losses(stats, moe, layout)
    entropy = jnp.mean(stats.entropy) / micro_batches
    balance, counted = balance / micro_batches, (stats.needed_EQ, replayed_L2)
    parts = LossParts(nll, balance, entropy, load_LE, uneven_L3, ahead_nll, *counted)
    return loss + router_loss / micro_batches, parts


def router_losses(
    stats: MoEStats, moe: MoEConfig, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns shares of the weighted and the mean balance loss, and all devices' counts.

    Both losses are means over the expert layers, as in megablocks, so that a coefficient does not
    depend on the number of layers; `transformers` pools the layers instead.

    Wire: the counts of all layers in one sum, L * (E + 3) int32 over all devices, with recorded
    experts L * (E + 5); for balance per sequence also L * S * E over context and tensor.
    """
    cfg = moe.router
    # All devices have as many rounds: one of them counts.
    rounds_L = jnp.where(wire.index(layout.mesh_axes) == 0, stats.rounds, 0)
    uneven_L3 = jnp.stack([stats.dropped, stats.overflowed, rounds_L], axis=1)
    replayed_L2, E = stats.replayed_2, stats.load_E.shape[1]
    own = [stats.load_E, uneven_L3, *([] if replayed_L2 is None else [replayed_L2])]
    counts = wire.all_reduce(jnp.concatenate(own, axis=1), layout.mesh_axes)
    load_LE, uneven_L3 = counts[:, :E], counts[:, E : E + 3]
    replayed_L2 = None if replayed_L2 is None else counts[:, E + 3 :]
    if cfg.balance_over == "batch":
        counted_LSE = load_LE[:, None]
    else:
        counted_LSE = wire.all_reduce(stats.counted_SE, layout.context + layout.tensor)
    k = moe.experts_per_token
    balance = jnp.mean(balance_loss(counted_LSE, stats.score_SE, cfg, k=k, layout=layout))
    loss = cfg.balance_loss * balance + cfg.z_loss * jnp.mean(stats.z)
    return loss, balance, load_LE, uneven_L3, replayed_L2


def sum_nll(
    x_BTD: Float[Array, "B T D"],
    w_Dv: Weight,
    target_BT: Int[Array, "B T"],
    layout: Layout,
    *,
    chunk_tokens: int,
    cap: float | None = None,
) -> Float[Array, ""]:
    """Returns the summed negative log-likelihood in nats, the same on all tensor ranks.

    Wire: three float32 per position over tensor, none in backward. Memory: chunk_tokens * v.
    """
    terms, weights = _terms(x_BTD, w_Dv)
    chunks = _cut_in_chunks(terms, weights, target_BT, layout, chunk_tokens)
    return _sum_nll(chunks, weights, layout.tensor, cap)


def target_nll(
    x_BTD: Float[Array, "B T D"],
    w_Dv: Weight,
    target_BT: Int[Array, "B T"],
    layout: Layout,
    *,
    chunk_tokens: int,
    cap: float | None = None,
) -> Float[Array, "B T"]:
    """Returns the negative log-likelihood of each target in nats; 0 where there is none.

    Wire and memory: as `sum_nll`, forward only.
    """
    terms, weights = _terms(x_BTD, w_Dv)
    chunks = _cut_in_chunks(terms, weights, target_BT, layout, chunk_tokens)

    def of_chunk(_: None, chunk: Chunks) -> tuple[None, jax.Array]:
        return None, _chunk_nll(chunk, weights, layout.tensor, cap)[0]

    nll_N = lax.scan(of_chunk, None, chunks)[1].reshape(-1)
    return nll_N[: target_BT.size].reshape(target_BT.shape)


# Arrays whose products with their weights add up to the logits: one, with an adapter two.
Arrays = tuple[jax.Array, ...]
Chunks = tuple[Arrays, jax.Array, jax.Array]


def _terms(x_BTD: jax.Array, w_Dv: Weight) -> tuple[Arrays, Arrays]:
    """Returns the factors of logits: x and weight; with an adapter also x @ a and b."""
    if not isinstance(w_Dv, AdaptedWeight):
        return (x_BTD,), (w_Dv,)
    a_DA, b_Av = w_Dv.adapter
    return (x_BTD, x_BTD @ a_DA), (w_Dv.weight, b_Av)


def _cut_in_chunks(
    terms: Arrays, weights: Arrays, target_BT: jax.Array, layout: Layout, chunk_tokens: int
) -> Chunks:
    """Returns `_terms`, targets in this rank's slice of the vocabulary, and their validity.

    Rows without a target fill the last chunk up where no chunk size divides the tokens.
    """
    N, v = target_BT.size, weights[0].shape[1]
    first = wire.index(layout.tensor) * v if layout.size(layout.tensor) > 1 else 0
    count, rows = _chunk_sizes(N, chunk_tokens)
    missing = count * rows - N

    def cut(x_N: jax.Array, fill: int | bool = 0) -> jax.Array:
        if missing:
            widths = ((0, missing), *((0, 0),) * (x_N.ndim - 1))
            x_N = jnp.pad(x_N, widths, constant_values=fill)
        return x_N.reshape(count, rows, *x_N.shape[1:])

    target_N = target_BT.reshape(N)
    local_N = jnp.where(target_N >= 0, target_N - first, -1)
    rows_of_terms = tuple(cut(x.reshape(N, -1)) for x in terms)
    return rows_of_terms, cut(local_N, -1), cut(target_N >= 0, fill=False)


def _chunk_sizes(N: int, most: int) -> tuple[int, int]:
    """Returns the number of chunks, and the tokens of each: at most `most`.

    A size that divides N is taken if it is more than half of the most. Otherwise the fewest chunks
    are filled up, by less than a token each.
    """
    most = min(N, most)
    fewest = -(-N // most)
    divisor = next((rows for rows in range(most, most // 2, -1) if N % rows == 0), None)
    return (fewest, -(-N // fewest)) if divisor is None else (N // divisor, divisor)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _sum_nll(chunks: Chunks, weights: Arrays, tensor: Axes, cap: float | None) -> jax.Array:
    def add(total, chunk):
        return total + jnp.sum(_chunk_nll(chunk, weights, tensor, cap)[0]), None

    return lax.scan(add, jnp.zeros(()), chunks)[0]


def _chunk_nll(
    chunk: Chunks, weights: Arrays, tensor: Axes, cap: float | None
) -> tuple[jax.Array, ...]:
    """Returns one chunk's nats, logits, and logarithm of the softmax's denominator."""
    terms, local_N, valid_N = chunk
    v = weights[0].shape[1]
    logit_Nv = sum(map(logits, terms[1:], weights[1:]), logits(terms[0], weights[0]))
    logit_Nv = capped(logit_Nv, cap)
    here_N = (local_N >= 0) & (local_N < v)
    safe_N = jnp.where(here_N, local_N, 0)
    chosen_N = jnp.take_along_axis(logit_Nv, safe_N[:, None], axis=1)[:, 0]
    chosen_N = wire.all_reduce(jnp.where(here_N, chosen_N, 0), tensor)
    top_N = wire.all_max(jnp.max(logit_Nv, axis=1), tensor)
    total_N = wire.all_reduce(jnp.sum(jnp.exp(logit_Nv - top_N[:, None]), axis=1), tensor)
    log_total_N = jnp.log(total_N) + top_N
    return jnp.where(valid_N, log_total_N - chosen_N, 0), logit_Nv, log_total_N


def _sum_nll_forward(chunks: Any, weights: Any, tensor: Axes, cap: float | None):
    """Returns the sum, and its gradients as residuals; none for a weight that is frozen.

    Each argument carries whether its gradient is wanted.
    """
    trained = [w.perturbed for w in weights]
    weights = tuple(w.value for w in weights)
    chunks = jax.tree.map(lambda x: x.value, chunks)

    def add(carry, chunk):
        total, sums = carry
        terms, local_N, valid_N = chunk
        nll_N, logit_Nv, log_total_N = _chunk_nll(chunk, weights, tensor, cap)
        target_Nv = local_N[:, None] == jnp.arange(logit_Nv.shape[1])
        dlogit_Nv = jnp.exp(logit_Nv - log_total_N[:, None]) - target_Nv
        if cap is not None:
            dlogit_Nv *= 1 - (logit_Nv / cap) ** 2  # of tanh
        dlogit_Nv = jnp.where(valid_N[:, None], dlogit_Nv, 0).astype(terms[0].dtype)
        dterms = tuple(lax.dot_general(dlogit_Nv, w, (((1,), (1,)), ((), ()))) for w in weights)
        dims = (((0,), (0,)), ((), ()))
        sums = tuple(
            s
            if s is None
            else s + lax.dot_general(x, dlogit_Nv, dims, preferred_element_type=jnp.float32)
            for s, x in zip(sums, terms, strict=True)
        )
        return (total + jnp.sum(nll_N), sums), dterms

    zeros = tuple(
        jnp.zeros(w.shape, jnp.float32) if wanted else None
        for w, wanted in zip(weights, trained, strict=True)
    )
    (total, sums), dterms = lax.scan(add, (jnp.zeros(()), zeros), chunks)
    pairs = zip(sums, weights, strict=True)
    return total, (dterms, tuple(s if s is None else s.astype(w.dtype) for s, w in pairs))


def _sum_nll_backward(tensor: Axes, cap: float | None, saved, gradient: jax.Array):
    """Scales the saved gradients by the sum of all tensor ranks' cotangents.

    Every rank's copy of the sum depends on these logits. The cotangents are equal, because each
    rank contributes the same share of the same sum, so adding them needs no communication.
    """
    scale = gradient * wire.size(tensor)
    dterms, dweights = jax.tree.map(lambda d: (d * scale).astype(d.dtype), saved)
    return (dterms, None, None), dweights


_sum_nll.defvjp(_sum_nll_forward, _sum_nll_backward, symbolic_zeros=True)
