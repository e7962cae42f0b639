"""The whole model on one device in plain jax.numpy: no sort, no network, no code of moejax.model.

Takes global parameters as `TrainStep.init` makes them and returns the loss as the step defines it:
mean nats per target, of the token after the next too, plus the weighted router losses.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.config.schema import Config
from moejax.moe.reference import gated, mark_best, moe_reference
from tests.oracle_attention import attend, norm


class Parts(NamedTuple):
    """Parts of a loss."""

    nll: Any  # mean nats of the next token
    ahead: Any  # of the token after it; None without multi-token prediction
    load: Any  # assignments to each expert of each expert layer; None without experts


class Noise(NamedTuple):
    """Where the jitter of a router's input is drawn from."""

    key: Any
    row_B: Any  # index of each sequence in the batch of the whole step

    def of(self, *indices: int) -> "Noise":
        key = self.key
        for index in indices:
            key = jax.random.fold_in(key, index)
        return self._replace(key=key)

    def factors(self, shape: tuple[int, int, int], amount: float):
        """Returns a factor for each channel of each token, [B, T, D]."""

        def drawn(row, t):
            key = jax.random.fold_in(jax.random.fold_in(self.key, row), t)
            return jax.random.uniform(key, shape[2:], minval=1 - amount, maxval=1 + amount)

        of_row = jax.vmap(lambda row: jax.vmap(lambda t: drawn(row, t))(jnp.arange(shape[1])))
        return of_row(self.row_B)


def oracle_loss(params, router_bias, batch, cfg: Config, noise: Noise | None = None):
    """Returns the loss and its parts.

    Args:
      noise: of the step, if routers have jitter.
    """
    model = cfg.model
    x = params["embedding"]["table"][batch.token_BT]
    losses, loads, index = 0.0, [], 0
    groups, all_biases = _groups(params, router_bias)
    for number, (group, biases) in enumerate(zip(groups, all_biases, strict=True)):
        for layer in range(_length(group)):
            at = jax.tree.map(lambda w, layer=layer: w[layer], (group, biases))
            for place in sorted(at[0]["blocks"]):
                bias = at[1]["blocks"].get(place, {}) if at[1] else {}
                weights = at[0]["blocks"][place]
                own = noise and noise.of(number, layer, place)
                x, loss, load = _block(weights, bias, x, batch.segment_BT, index, cfg, own)
                losses, index = losses + loss, index + 1
                loads += [] if load is None else [load]
    x = norm(x, params["norm"]["scale"], model.norm_epsilon)
    nll = _nll(params, x, batch.target_BT, cfg)
    total, ahead = nll, None
    if model.predict_ahead:
        ahead, loss, load = _ahead(params, router_bias, x, batch, cfg, noise)
        total = total + cfg.train.predict_ahead_loss * ahead
        losses += loss
        loads += [] if load is None else [load]
    # Router losses are means over the expert layers.
    parts = Parts(nll, ahead, jnp.stack(loads) if loads else None)
    return total + losses / max(len(loads), 1), parts


def _nll(params, x, target_BT, cfg: Config):
    """Mean nats of the targets."""
    table = params["embedding"]
    logits = x @ (table["table"].T if cfg.model.tie_embeddings else table["project"])
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    valid = target_BT >= 0
    chosen = jnp.take_along_axis(logp, jnp.where(valid, target_BT, 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(valid, chosen, 0)) / jnp.maximum(jnp.sum(valid), 1)


def _ahead(params, router_bias, h, batch, cfg: Config, noise):
    """Multi-token prediction: its mean nats, its router losses and its experts' load."""
    w, epsilon = params["predict_ahead"], cfg.model.norm_epsilon
    token, target, segment = map(jnp.asarray, (batch.token_BT, batch.target_BT, batch.segment_BT))
    same = segment[:, 1:] == segment[:, :-1]
    token = token.at[:, :-1].set(jnp.where(same, token[:, 1:], token[:, :-1]))
    after = jnp.where(same, target[:, 1:], -1)
    target = jnp.full_like(target, -1).at[:, :-1].set(after)
    e = norm(params["embedding"]["table"][token], w["embedding_norm"]["scale"], epsilon)
    x = e @ w["w_join"][0] + norm(h, w["hidden_norm"]["scale"], epsilon) @ w["w_join"][1]
    block = jax.tree.map(lambda a: a[0], w["group"]["blocks"][0])
    biases = router_bias.get("predict_ahead", {"group": {"blocks": {0: {}}}})
    bias = jax.tree.map(lambda a: a[0], biases["group"]["blocks"][0])
    own = noise and noise.of(len(params["groups"]), 0, 0)
    index = cfg.model.num_layers - 1
    x, loss, load = _block(block, bias, x, batch.segment_BT, index, cfg, own)
    x = norm(x, w["norm"]["scale"], epsilon)
    return _nll(params, x, target, cfg), loss, load


def _groups(params, router_bias):
    groups = [params["groups"][i] for i in sorted(params["groups"])]
    known = router_bias.get("groups", {})
    return groups, [known.get(i, {}) for i in sorted(params["groups"])]


def _length(group):
    return jax.tree.leaves(group)[0].shape[0]


def _block(w, bias, x, segments, index, cfg: Config, noise):
    epsilon = cfg.model.norm_epsilon
    attended = norm(x, w["attention_norm"]["scale"], epsilon)
    x = x + attend(w["attention"], attended, segments, index, cfg)
    h = norm(x, w["mlp_norm"]["scale"], epsilon)
    loss, load = 0.0, None
    if "moe" in w:
        B, T, D = h.shape
        moe = cfg.moe
        args = (w["moe"]["w_router"], bias["moe"]["bias"], w["moe"]["w_in"], w["moe"]["w_out"])
        biases = (w["moe"]["b_in"], w["moe"]["b_out"]) if moe.expert_bias else None
        options = {"biases": biases, "router_bias_E": w["moe"].get("b_router")}
        options |= {"k": moe.experts_per_token, "limit": cfg.model.clamp}
        seen = h if noise is None else h * noise.factors(h.shape, moe.router.jitter)
        options["router_x_ND"] = seen.reshape(-1, D)
        y, weight_NE = moe_reference(h.reshape(-1, D), *args, moe.router, **options)
        x = x + y.reshape(B, T, D)
        chosen_NE = weight_NE != 0
        load = jnp.sum(chosen_NE, axis=0)
        logit_NE = options["router_x_ND"] @ args[0] + w["moe"].get("b_router", 0)
        if moe.router.balance_over == "sequence":
            chosen_NE = mark_best(logit_NE, moe.experts_per_token)
        loss = _router_losses(logit_NE, chosen_NE, B, cfg)
    if "mlp" in w:
        y = gated(h @ w["mlp"]["w_in"][:, 0], h @ w["mlp"]["w_in"][:, 1], cfg.model.clamp)
        y = y @ w["mlp"]["w_out"]
        if "shared_gate" in w:
            y = y / (1 + jnp.exp(-jnp.sum(h * w["shared_gate"], axis=-1, keepdims=True)))
        x = x + y
    return x, loss, load


def _router_losses(logit_NE, chosen_NE, B, cfg: Config):
    router, E = cfg.moe.router, logit_NE.shape[1]
    score = jax.nn.softmax(logit_NE) if router.score == "softmax" else jax.nn.sigmoid(logit_NE)
    if router.score == "sigmoid":
        score = score / jnp.sum(score, axis=-1, keepdims=True)
    chosen_SNE, score_SNE = (_in_spans(x, B, cfg) for x in (chosen_NE, score))
    share = jnp.mean(chosen_SNE, axis=1) / cfg.moe.experts_per_token
    balance = E * jnp.mean(jnp.sum(share * jnp.mean(score_SNE, axis=1), axis=-1))
    z = jnp.mean(jnp.log(jnp.sum(jnp.exp(logit_NE), axis=-1)) ** 2)
    return router.balance_loss * balance + router.z_loss * z


def _in_spans(x_NE, B, cfg: Config):
    """Tokens in the spans over which balance is counted: sequences, or slices of all of them."""
    E = x_NE.shape[1]
    if cfg.moe.router.balance_over == "sequence":
        return x_NE.reshape(B, -1, E)
    slices = cfg.mesh.stage_slices
    return x_NE.reshape(B, slices, -1, E).swapaxes(0, 1).reshape(slices, -1, E)
