"""The whole model on one device in plain jax.numpy: no sort, no network, no code of moejax.model.

Takes global parameters as `TrainStep.init` makes them and returns the loss as the step defines it:
mean nats per target plus the weighted router losses.
"""

import jax
import jax.numpy as jnp

from moejax.config.schema import Config
from moejax.moe.reference import mark_best, moe_reference
from tests.oracle_attention import attend, norm


def oracle_loss(params, router_bias, batch, cfg: Config):
    """Returns the loss and the assignments to each expert of each expert layer."""
    model = cfg.model
    x = params["embedding"]["table"][batch.token_BT]
    losses, loads, index = 0.0, [], 0
    for group, biases in zip(*_groups(params, router_bias), strict=True):
        for layer in range(_length(group)):
            at = jax.tree.map(lambda w, layer=layer: w[layer], (group, biases))
            for place in sorted(at[0]["blocks"]):
                bias = at[1]["blocks"].get(place, {}) if at[1] else {}
                weights = at[0]["blocks"][place]
                x, loss, load = _block(weights, bias, x, batch.segment_BT, index, cfg)
                losses, index = losses + loss, index + 1
                loads += [] if load is None else [load]
    x = norm(x, params["norm"]["scale"], model.norm_epsilon)
    table = params["embedding"]
    logits = x @ (table["table"].T if model.tie_embeddings else table["project"])
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    valid = batch.target_BT >= 0
    chosen = jnp.take_along_axis(logp, jnp.where(valid, batch.target_BT, 0)[..., None], -1)[..., 0]
    nll = -jnp.sum(jnp.where(valid, chosen, 0)) / jnp.maximum(jnp.sum(valid), 1)
    # Router losses are means over the expert layers.
    return nll + losses / max(len(loads), 1), (nll, jnp.stack(loads) if loads else None)


def _groups(params, router_bias):
    groups = [params["groups"][i] for i in sorted(params["groups"])]
    known = router_bias.get("groups", {})
    return groups, [known.get(i, {}) for i in sorted(params["groups"])]


def _length(group):
    return jax.tree.leaves(group)[0].shape[0]


def _block(w, bias, x, segments, index, cfg: Config):
    epsilon = cfg.model.norm_epsilon
    attended = norm(x, w["attention_norm"]["scale"], epsilon)
    x = x + attend(w["attention"], attended, segments, index, cfg)
    h = norm(x, w["mlp_norm"]["scale"], epsilon)
    loss, load = 0.0, None
    if "moe" in w:
        B, T, D = h.shape
        moe = cfg.moe
        args = (w["moe"]["w_router"], bias["moe"]["bias"], w["moe"]["w_in"], w["moe"]["w_out"])
        y, weight_NE = moe_reference(h.reshape(-1, D), *args, moe.router, k=moe.experts_per_token)
        x = x + y.reshape(B, T, D)
        chosen_NE = weight_NE != 0
        load = jnp.sum(chosen_NE, axis=0)
        logit_NE = h.reshape(-1, D) @ args[0]
        if moe.router.balance_over == "sequence":
            chosen_NE = mark_best(logit_NE, moe.experts_per_token)
        loss = _router_losses(logit_NE, chosen_NE, B, cfg)
    if "mlp" in w:
        x = x + _swiglu(h, w["mlp"]["w_in"], w["mlp"]["w_out"])
    return x, loss, load


def _swiglu(h, w_in, w_out):
    gate, up = h @ w_in[:, 0], h @ w_in[:, 1]
    return (gate * jax.nn.sigmoid(gate) * up) @ w_out


def _router_losses(logit_NE, chosen_NE, B, cfg: Config):
    router, (N, E) = cfg.moe.router, logit_NE.shape
    score = jax.nn.softmax(logit_NE) if router.score == "softmax" else jax.nn.sigmoid(logit_NE)
    if router.score == "sigmoid":
        score = score / jnp.sum(score, axis=-1, keepdims=True)
    spans = 1 if router.balance_over == "batch" else B
    share = jnp.mean(chosen_NE.reshape(spans, N // spans, E), axis=1) / cfg.moe.experts_per_token
    mean = jnp.mean(score.reshape(spans, N // spans, E), axis=1)
    balance = E * jnp.mean(jnp.sum(share * mean, axis=-1))
    z = jnp.mean(jnp.log(jnp.sum(jnp.exp(logit_NE), axis=-1)) ** 2)
    return router.balance_loss * balance + router.z_loss * z
