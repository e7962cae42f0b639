"""The whole model on one device in plain jax.numpy: no sort, no network, no code of moejax.model.

Takes global parameters as `TrainStep.init` makes them and returns the loss as the step defines it:
mean nats per target, of the token after the next too, plus the weighted router losses. Every mesh,
route, chunk count and kernel must agree with it within a derived tolerance.

Letters: N tokens, D width, E experts, U gate and up (2), F hidden width, X values of a row.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.config.schema import Config, RouterConfig
from tests.oracle_attention import attend, norm


class Parts(NamedTuple):
    """Parts of a loss."""

    nll: Any  # mean nats of the next token
    ahead: Any  # of the token after it; None without multi-token prediction
    load: Any  # assignments to each expert of each expert layer; None without experts
    # By expert layer, the biases at which tokens choose experts [L, N, E]; None without quantiles.
    needed: Any = None


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
    if model.zero_centered_norms:
        params = jax.tree_util.tree_map_with_path(_one_more, params)
    x = params["embedding"]["table"][batch.token_BT] * model.embedding_scale
    losses, loads, needed, index = 0.0, [], [], 0
    groups, all_biases = _groups(params, router_bias)
    for number, (group, biases) in enumerate(zip(groups, all_biases, strict=True)):
        for layer in range(_length(group)):
            at = jax.tree.map(lambda w, layer=layer: w[layer], (group, biases))
            for place in sorted(at[0]["blocks"]):
                bias = at[1]["blocks"].get(place, {}) if at[1] else {}
                weights = at[0]["blocks"][place]
                own = noise and noise.of(number, layer, place)
                experts = _recorded(batch, len(loads)) if "moe" in weights else None
                args = (weights, bias, x, batch.segment_BT, index, cfg, own, experts)
                x, loss, load, own_needed = _block(*args)
                losses, index = losses + loss, index + 1
                loads += [] if load is None else [load]
                needed += [own_needed]
    x = norm(x, params["norm"]["scale"], model.norm_epsilon) / model.logit_divisor
    nll = _nll(params, x, batch.target_BT, cfg)
    total, ahead = nll, None
    if model.predict_ahead:
        experts = _recorded(batch, len(loads))
        ahead, loss, load, own_needed = _ahead(params, router_bias, x, batch, cfg, noise, experts)
        total = total + cfg.train.predict_ahead_loss * ahead
        losses += loss
        loads += [] if load is None else [load]
        needed += [own_needed]
    needed = [one for one in needed if one is not None]
    # Router losses are means over the expert layers.
    load_LE, needed_LNE = (jnp.stack(own) if own else None for own in (loads, needed))
    parts = Parts(nll, ahead, load_LE, needed_LNE)
    return total + losses / max(len(loads), 1), parts


def _one_more(path, x):
    """The scale of a norm that is stored as what it is more than one."""
    names = [str(getattr(key, "key", key)) for key in path]
    return x + 1 if names[-1] == "scale" and names[-2].endswith("norm") else x


def _nll(params, x, target_BT, cfg: Config):
    """Mean nats of the targets."""
    table = params["embedding"]
    logits = x @ (table["table"].T if cfg.model.tie_embeddings else table["project"])
    if cfg.model.logit_cap is not None:
        doubled = 2 * logits / cfg.model.logit_cap  # tanh by the logistic function
        logits = cfg.model.logit_cap * (2 / (1 + jnp.exp(-doubled)) - 1)
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    valid = target_BT >= 0
    chosen = jnp.take_along_axis(logp, jnp.where(valid, target_BT, 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(valid, chosen, 0)) / jnp.maximum(jnp.sum(valid), 1)


def _ahead(params, router_bias, h, batch, cfg: Config, noise, experts):
    """Multi-token prediction: its mean nats, and of its block what `_block` returns after x."""
    w, epsilon = params["predict_ahead"], cfg.model.norm_epsilon
    token, target, segment = map(jnp.asarray, (batch.token_BT, batch.target_BT, batch.segment_BT))
    same = segment[:, 1:] == segment[:, :-1]
    token = token.at[:, :-1].set(jnp.where(same, token[:, 1:], token[:, :-1]))
    after = jnp.where(same, target[:, 1:], -1)
    target = jnp.full_like(target, -1).at[:, :-1].set(after)
    e = params["embedding"]["table"][token] * cfg.model.embedding_scale
    e = norm(e, w["embedding_norm"]["scale"], epsilon)
    x = e @ w["w_join"][0] + norm(h, w["hidden_norm"]["scale"], epsilon) @ w["w_join"][1]
    block = jax.tree.map(lambda a: a[0], w["group"]["blocks"][0])
    biases = router_bias.get("predict_ahead", {"group": {"blocks": {0: {}}}})
    bias = jax.tree.map(lambda a: a[0], biases["group"]["blocks"][0])
    own = noise and noise.of(len(params["groups"]), 0, 0)
    index, own_block = cfg.model.num_layers - 1, cfg.model.ahead_block
    if own_block:
        table = own_block[:1] * cfg.model.num_layers
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, layer_attention=table))
    x, *rest = _block(block, bias, x, batch.segment_BT, index, cfg, own, experts)
    x = norm(x, w["norm"]["scale"], epsilon) / cfg.model.logit_divisor
    return _nll(params, x, target, cfg), *rest


def _groups(params, router_bias):
    groups = [params["groups"][i] for i in sorted(params["groups"])]
    known = router_bias.get("groups", {})
    return groups, [known.get(i, {}) for i in sorted(params["groups"])]


def _recorded(batch, layer: int):
    """The experts recorded in a layer, counted among those with experts; None if tokens choose."""
    expert_BTLK = getattr(batch, "expert_BTLK", None)
    if expert_BTLK is None or layer >= expert_BTLK.shape[2]:
        return None
    expert_BTK = expert_BTLK[:, :, layer]
    return expert_BTK.reshape(-1, expert_BTK.shape[-1])


def _length(group):
    return jax.tree.leaves(group)[0].shape[0]


def _block(w, bias, x, segments, index, cfg: Config, noise, recorded_NK=None):
    epsilon = cfg.model.norm_epsilon
    after, factor = cfg.model.block_norm == "after", cfg.model.residual_scale

    def normed(a, name):
        return norm(a, w[name]["scale"], epsilon) if name in w else a

    def result(a, of):
        return normed(a, f"{of}_norm" if after else f"{of}_out_norm")

    if "attention" in w:
        h = x if after else normed(x, "attention_norm")
        y = attend(w["attention"], h, segments, index, cfg)
        x = x + factor * result(y, "attention")
    h, added = x if after else normed(x, "mlp_norm"), 0.0
    loss, load, needed = 0.0, None, None
    if "moe" in w:
        B, T, D = h.shape
        moe = cfg.moe
        args = (w["moe"]["w_router"], bias["moe"]["bias"], w["moe"]["w_in"], w["moe"]["w_out"])
        biases = (w["moe"]["b_in"], w["moe"]["b_out"]) if moe.expert_bias else None
        options = {"biases": biases, "router_bias_E": w["moe"].get("b_router")}
        options |= {"k": moe.experts_per_token, "form": _form(cfg.model)}
        options |= {"recorded_NK": recorded_NK, "scale_E": w["moe"].get("expert_scale", 1.0)}
        seen, own = h, h
        if moe.own_norms:
            length = jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + epsilon * D)
            seen, own = x / length * w["router_scale"], normed(x, "experts_norm")
        seen = seen if noise is None else seen * noise.factors(h.shape, moe.router.jitter)
        options["router_x_ND"] = seen.reshape(-1, D)
        if "w_down" in w["moe"]:
            own = own @ w["moe"]["w_down"]
        rows = own.reshape(B * T, -1)
        y, weight_NE = moe_reference(rows, *args, moe.router, **options)
        y = y @ w["moe"]["w_up"] if "w_up" in w["moe"] else y
        added = normed(y.reshape(B, T, D), "experts_out_norm")
        chosen_NE = weight_NE != 0
        load = jnp.sum(chosen_NE, axis=0)
        logit_NE = options["router_x_ND"] @ args[0] + w["moe"].get("b_router", 0)
        if moe.router.balance_over == "sequence":
            chosen_NE = mark_best(logit_NE, moe.experts_per_token)
        loss = _router_losses(logit_NE, chosen_NE, B, cfg)
        if moe.router.quantile_bins is not None:
            needed = _needed(logit_NE, args[1], cfg)
    if "mlp" in w:
        y = gated(*(h @ w["mlp"]["w_in"][:, u] for u in (0, -1)), _form(cfg.model))
        y = y @ w["mlp"]["w_out"]
        if "shared_gate" in w:
            y = y / (1 + jnp.exp(-jnp.sum(h * w["shared_gate"], axis=-1, keepdims=True)))
        added = added + normed(y, "shared_out_norm")
    if "moe" in w or "mlp" in w:
        x = x + factor * result(added, "mlp")
    return x * jax.lax.stop_gradient(w.get("layer_scale", 1.0)), loss, load, needed


def _needed(logit_NE, bias_E, cfg: Config):
    """The bias from which on each expert is among the best of each token."""
    sigmoid = cfg.moe.router.score == "sigmoid"
    score_NE = jax.nn.sigmoid(logit_NE) if sigmoid else jax.nn.softmax(logit_NE)
    ordered_NE = jnp.sort(score_NE + bias_E, axis=1)
    return jax.lax.stop_gradient(ordered_NE[:, [-1 - cfg.moe.experts_per_token]] - score_NE)


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


def moe_reference(
    x_ND,
    w_router_DE,
    bias_E,
    w_in_EDUF,
    w_out_EFD,
    cfg: RouterConfig,
    *,
    k,
    biases=None,
    router_bias_E=None,
    form=None,
    router_x_ND=None,
    recorded_NK=None,
    scale_E=1.0,
):
    """The expert layer: its output and the dense routing weights [N, E] (zero where not chosen).

    Args:
      bias_E: selection bias, which moves the choice alone.
      biases: b_in_EUF and b_out_ED of the experts' products.
      router_bias_E: added to the logits.
      form: of `gated`.
      router_x_ND: the router's input, where it has jitter; None for `x_ND`.
      recorded_NK: experts of each token in place of its choice; -1 for a token that chooses.
      scale_E: factor of each expert on its weights.
    """
    logit_NE = (x_ND if router_x_ND is None else router_x_ND).astype(jnp.float32) @ w_router_DE
    if router_bias_E is not None:
        logit_NE = logit_NE + router_bias_E
    if cfg.score == "softmax":
        score_NE = jnp.exp(logit_NE) / jnp.sum(jnp.exp(logit_NE), axis=-1, keepdims=True)
    else:
        score_NE = 1 / (1 + jnp.exp(-logit_NE))
    chosen_NE = _chosen(jax.lax.stop_gradient(score_NE + bias_E), cfg, k)
    if recorded_NK is not None:
        expert_E = jnp.arange(chosen_NE.shape[1])
        recorded_NE = jnp.any(jnp.asarray(recorded_NK)[:, :, None] == expert_E, axis=1)
        chosen_NE = jnp.where(jnp.asarray(recorded_NK)[:, :1] < 0, chosen_NE, recorded_NE)
    weight_NE = jnp.where(chosen_NE, score_NE, 0.0)
    if cfg.renormalize:
        weight_NE = weight_NE / jnp.sum(weight_NE, axis=-1, keepdims=True)
    weight_NE = weight_NE * cfg.weight_scale * scale_E
    h_NEUF = jnp.einsum("ND,EDUF->NEUF", x_ND, w_in_EDUF)
    if biases is not None:
        h_NEUF = h_NEUF + biases[0]
    y_NED = jnp.einsum("NEF,EFD->NED", gated(h_NEUF[:, :, 0], h_NEUF[:, :, -1], form), w_out_EFD)
    if biases is not None:
        y_NED = y_NED + biases[1]
    return jnp.einsum("NE,NED->ND", weight_NE, y_NED), weight_NE


def _form(model) -> float | str | None:
    if model.clamp is not None:
        return model.clamp
    return None if model.activation == "swiglu" else model.activation


def gated(gate, up, limit: float | str | None):
    """An activation of gate and up, in another form than in `kernels.experts`.

    Args:
      limit: limit of clamped SwiGLU; "geglu"; "relu2", which has no gate; None for SwiGLU.
    """
    if limit is None:
        return gate * jax.nn.sigmoid(gate) * up
    if limit == "relu2":
        return jnp.where(up > 0, up * up, 0.0)
    if limit == "geglu":  # by tanh, as a logistic function
        cubic = gate + 0.044715 * gate**3
        return gate * up * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * cubic)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))


def _chosen(election_NE, cfg: RouterConfig, k: int):
    """Marks the k best experts of each token, by counting the experts that beat each one."""
    if cfg.num_groups > 1:
        N, E = election_NE.shape
        by_group = jnp.sort(election_NE.reshape(N, cfg.num_groups, -1), axis=-1)
        best = 2 if cfg.score == "sigmoid" else 1
        in_group = mark_best(jnp.sum(by_group[:, :, -best:], axis=-1), cfg.groups_per_token)
        in_group = jnp.repeat(in_group, E // cfg.num_groups, axis=1)
        election_NE = jnp.where(in_group, election_NE, -jnp.inf)
    return mark_best(election_NE, k)


def mark_best(value_NX, k: int):
    """Marks the k largest of each row; of equal values the first wins, as in `lax.top_k`."""
    index_X = jnp.arange(value_NX.shape[1])
    larger = value_NX[:, None, :] > value_NX[:, :, None]
    equal_before = (value_NX[:, None, :] == value_NX[:, :, None]) & (
        index_X[None, None, :] < index_X[None, :, None]
    )
    return jnp.sum(larger | equal_before, axis=-1) < k
