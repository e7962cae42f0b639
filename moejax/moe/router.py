"""Chooses experts for each token, and keeps them balanced.

Per device, always in float32. Load is balanced in up to three ways: a load-balance
loss over the batch or over each sequence, a z-loss on the logits, and a selection bias that moves
after each step (loss-free balancing, DeepSeek-V3).

Letters: N tokens, E experts, K choices a token, L layers, S spans of the balance loss, B sequences,
t positions on this device, D width.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.config.schema import RouterConfig
from moejax.kernels.kept import PLACES
from moejax.layout.layout import Layout


class Routing(NamedTuple):
    """The experts of each token, their weights, and all scores, for the balance loss."""

    expert_NK: Int[Array, "N K"]
    weight_NK: Float[Array, "N K"]
    score_NE: Float[Array, "N E"]
    # The largest score plus bias that was not chosen; None without quantile balancing.
    cut_N1: Float[Array, "N 1"] | None = None
    own_NK: Int[Array, "N K"] | None = None  # the router's choice, where experts are given


def route(
    logit_NE: Float[Array, "N E"],
    bias_E: Float[Array, " E"],
    cfg: RouterConfig,
    *,
    k: int,
    given_NK: Int[Array, "N K"] | None = None,
) -> Routing:
    """Chooses the k experts with the highest score plus bias; weights come from the scores alone.

    With groups, only experts of a token's best groups are candidates. A group's score is the sum of
    its two best experts (sigmoid scores, DeepSeek-V3) or its best expert (softmax, DeepSeek-V2).

    Args:
      given_NK: experts to take in place of the choice, whatever their scores, groups and bias; -1
        in all K of a token: it chooses. None: all tokens choose.
    Source: for recorded experts, Rollout Routing Replay (Ma et al. 2025).
    """
    if cfg.score == "softmax":
        score_NE = jax.nn.softmax(logit_NE, axis=-1)
    else:
        score_NE = jax.nn.sigmoid(logit_NE)
    biased_NE = jax.lax.stop_gradient(score_NE + bias_E)
    if cfg.num_groups > 1:
        biased_NE = jnp.where(_allowed(biased_NE, cfg), biased_NE, -jnp.inf)
    cut_N1 = None
    if cfg.quantile_bins is None:
        expert_NK = jax.lax.top_k(biased_NE, k)[1]
    else:
        best, expert_NK = jax.lax.top_k(biased_NE, k + 1)
        cut_N1, expert_NK = best[:, k:], expert_NK[:, :k]
    own_NK = None if given_NK is None else expert_NK
    if given_NK is not None:
        # Scores that are finite are not negative. XLA cannot know, so a choice that is replaced
        # still takes its time.
        is_given_NK = (given_NK >= 0) & (score_NE[:, :1] >= 0)
        expert_NK = jnp.where(is_given_NK, given_NK, expert_NK)
    expert_NK = checkpoint_name(expert_NK, PLACES)
    weight_NK = jnp.take_along_axis(score_NE, expert_NK, axis=-1)
    if cfg.renormalize:
        # 1e-20 keeps a token whose sigmoid scores all underflow finite (DeepSeek-V3 uses the same).
        weight_NK = weight_NK / (jnp.sum(weight_NK, axis=-1, keepdims=True) + 1e-20)
    return Routing(expert_NK, weight_NK * cfg.weight_scale, score_NE, cut_N1, own_NK)


def choose_in_turn(
    first: jax.Array | int, num_tokens: int, num_experts: int, cfg: RouterConfig, *, k: int
) -> Int[Array, "N K"]:
    """Returns k different experts for each token, so that all experts get the same load.

    Any `num_experts` tokens in a row, counted from a multiple of it, give each expert k choices. A
    token's choices lie in `groups_per_token` groups. Their distance changes from one such row to
    the next, so that they fall on devices much as balanced choices of a router would.

    Args:
      first: number of the first token, which goes on over devices.
    """
    groups, of_token = cfg.num_groups, cfg.groups_per_token
    size = num_experts // groups
    token_N, choice_K = first + jnp.arange(num_tokens), jnp.arange(k)
    row_N1 = (token_N // num_experts)[:, None]

    def in_turn(start_N: jax.Array, step_K: jax.Array, count: int) -> jax.Array:
        distances = [d for d in range(1, count) if math.gcd(d, count) == 1] or [1]
        distance_N1 = jnp.asarray(distances, jnp.int32)[row_N1 % len(distances)]
        return (start_N[:, None] % count + step_K * distance_N1) % count

    group_NK = in_turn(token_N, choice_K % of_token, groups)
    return group_NK * size + in_turn(token_N // groups, choice_K // of_token, size)


def _allowed(biased_NE: jax.Array, cfg: RouterConfig) -> jax.Array:
    """Marks the experts in the token's `groups_per_token` best groups."""
    N, E = biased_NE.shape
    by_group = biased_NE.reshape(N, cfg.num_groups, E // cfg.num_groups)
    best = 2 if cfg.score == "sigmoid" else 1
    group_score = jnp.sum(jax.lax.top_k(by_group, best)[0], axis=-1)
    chosen = jax.lax.top_k(group_score, cfg.groups_per_token)[1]
    allowed = jnp.any(chosen[:, :, None] == jnp.arange(cfg.num_groups), axis=1)
    return jnp.repeat(allowed, E // cfg.num_groups, axis=-1)


def count_load(expert_NK: Int[Array, "N K"], num_experts: int) -> Int[Array, " E"]:
    """Assignments to each expert on this device."""
    return jnp.sum(expert_NK.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)


def count_replayed(own_NK: Int[Array, "N K"], given_NK: Int[Array, "N K"]) -> Int[Array, " 2"]:
    """Counts the given choices that the router makes too, and all given ones; -1 is none."""
    agrees_NK = jnp.any(given_NK[:, :, None] == own_NK[:, None], axis=2)
    return jnp.stack([jnp.sum(x, dtype=jnp.int32) for x in (agrees_NK, given_NK >= 0)])


def balance_terms(
    routing: Routing, cfg: RouterConfig, *, sequences: int
) -> tuple[Int[Array, "S E"], Float[Array, "S E"]]:
    """Terms of the balance loss: for each expert, a count of tokens and the sum of its scores.

    A span is the set of tokens whose load is balanced: one sequence, or all tokens of this device.
    For `batch`, an expert's count is the tokens routed to it. For `sequence`, it is the tokens that
    have it among their K best scores, without selection bias and groups. The loss then sees the
    router's own preference.
    Sigmoid scores are normalised to sum to one.
    Source: DeepSeek-V3 (2024), equations 18 to 20, for a sequence.
    """
    (N, E), K = routing.score_NE.shape, routing.expert_NK.shape[1]
    score_NE, spans, counted_NK = routing.score_NE, 1, routing.expert_NK
    if cfg.balance_over == "sequence":
        spans, counted_NK = sequences, jax.lax.top_k(jax.lax.stop_gradient(score_NE), K)[1]
    if cfg.score == "sigmoid":
        score_NE = score_NE / (jnp.sum(score_NE, axis=-1, keepdims=True) + 1e-20)
    counted_SE = jax.vmap(lambda e: count_load(e, E))(counted_NK.reshape(spans, N // spans, K))
    return counted_SE, jnp.sum(score_NE.reshape(spans, N // spans, E), axis=1)


def balance_loss(
    counted_LSE: Int[Array, "L S E"],
    score_LSE: Float[Array, "L S E"],
    cfg: RouterConfig,
    *,
    k: int,
    layout: Layout,
) -> Float[Array, " L"]:
    """This device's share of each layer's load-balance loss; the total is one for an even load.

    E * sum over experts of (share of assignments) * (mean score), with the share and the mean taken
    over the global batch or over each sequence (then averaged). The shares carry no gradient.

    Args:
      counted_LSE: counts of `balance_terms`, summed over all devices that hold a part of the span.
      score_LSE: scores of `balance_terms`, of this device's part of the span.
      k: experts chosen per token.
    Source: Switch Transformer (Fedus et al. 2021), equation 4; DeepSeek-V3, equations 17 to 20.
    """
    S, E = counted_LSE.shape[1:]
    counted_LSE = counted_LSE.astype(jnp.float32)
    total_LS1 = jnp.sum(counted_LSE, axis=2, keepdims=True)
    mean_LSE = score_LSE * k / total_LS1
    loss_L = E * jnp.sum(counted_LSE / total_LS1 * mean_LSE, axis=(1, 2))
    # Spans are averaged; the sum over devices of this value is the loss.
    spans = 1 if cfg.balance_over == "batch" else S * layout.size(layout.row_axes)
    return loss_L / spans


def z_loss(logit_NE: Float[Array, "N E"], *, layout: Layout) -> Float[Array, ""]:
    """This device's share of the mean squared log-partition of the router.

    Source: ST-MoE (Zoph et al. 2022), equation 5.
    """
    tokens = logit_NE.shape[0] * layout.size(layout.mesh_axes)
    return jnp.sum(jax.nn.logsumexp(logit_NE, axis=-1) ** 2) / tokens


def entropy(score_NE: Float[Array, "N E"], *, layout: Layout) -> Float[Array, ""]:
    """This device's share of the mean entropy of a token's scores, over its largest, log E.

    Close to 1 the router tells experts hardly apart; close to 0 it is sure of one.
    Sigmoid scores are normalised to sum to one.
    """
    N, E = score_NE.shape
    p_NE = jax.lax.stop_gradient(score_NE)
    p_NE /= jnp.sum(p_NE, axis=-1, keepdims=True) + 1e-20
    total = -jnp.sum(jax.scipy.special.xlogy(p_NE, p_NE))
    return total / (N * layout.size(layout.mesh_axes) * math.log(max(E, 2)))


def update_bias(bias_E: jax.Array, load_E: jax.Array, rate: float) -> jax.Array:
    """Lowers the selection bias of overloaded experts by `rate`, raises it for underloaded ones.

    Args:
      load_E: assignments to each expert in the whole step, over all devices.
    Source: DeepSeek-V3 (2024), section 2.1.2.
    """
    load_E = load_E.astype(jnp.float32)
    return bias_E + rate * jnp.sign(jnp.mean(load_E, axis=-1, keepdims=True) - load_E)


class Noise(NamedTuple):
    """The key and position from which router jitter is drawn."""

    key: jax.Array  # the same on every device; differs by step and layer
    first_sequence: jax.Array | int  # index in the global batch of the first routed sequence
    # Positions in the sequence of what all tensor ranks route; None: whole sequences.
    position_T: jax.Array | None = None

    def of(self, index: jax.Array | int) -> "Noise":
        """The noise of one layer, or of one group of layers, by its index."""
        return self._replace(key=jax.random.fold_in(self.key, index))


def jitter_noise(
    shape: tuple[int, ...], amount: float, noise: Noise, *, position_t: jax.Array
) -> Float[Array, "B t D"]:
    """Factors for the router's input, uniform in 1 - amount .. 1 + amount.

    Per device. The noise of a token depends only on its position in the global batch, so every mesh
    and every number of micro-batches draws the same noise.

    Args:
      shape: [B, t, D], of the input.
      position_t: this device's positions in the sequence.
    Source: Switch Transformer (Fedus et al. 2021), section 2.2.
    """
    B, _, D = shape

    def factors(b: jax.Array, s: jax.Array) -> jax.Array:
        sequence = jax.random.fold_in(noise.key, noise.first_sequence + b)
        key = jax.random.fold_in(sequence, s)
        return jax.random.uniform(key, (D,), minval=1 - amount, maxval=1 + amount)

    return jax.vmap(lambda b: jax.vmap(lambda s: factors(b, s))(position_t))(jnp.arange(B))
