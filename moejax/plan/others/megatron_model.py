"""Shapes of a model as arguments of Megatron-LM, and the parts of it to set by hand."""

import itertools

from moejax.config.pattern import ahead_kind, block_kinds
from moejax.config.schema import Config, FullAttentionConfig, ModelConfig
from moejax.plan.others.translation import SHAPE, Gap, Option, Value


def model_options(cfg: Config) -> list[Option]:
    """Returns the arguments that give Megatron-LM the model's shapes."""
    model = cfg.model
    dense = model.mlp_hidden if model.has_dense_blocks else cfg.moe.expert_hidden
    values: dict[str, Value] = {
        "num-layers": model.num_layers,
        "hidden-size": model.width,
        "ffn-hidden-size": dense,
        "num-attention-heads": model.num_heads,
        "seq-length": cfg.data.sequence_length,
        "max-position-embeddings": cfg.data.sequence_length,
        "position-embedding-type": "rope",
        "rotary-base": int(model.rope.theta),
        "normalization": "RMSNorm",
        "norm-epsilon": model.norm_epsilon,
        {"relu2": "squared-relu"}.get(model.activation, "swiglu"): None,
        "disable-bias-linear": None,
    }
    values |= _latent(model) if model.is_latent else _grouped(model)
    if model.is_sparse:
        values |= _indexer(cfg)
    if not model.tie_embeddings:
        values["untie-embeddings-and-output-weights"] = None
    if model.predict_ahead:
        values["mtp-num-layers"] = model.predict_ahead
    if model.has_experts:
        values |= _experts(cfg)
    return [Option(name, value, SHAPE) for name, value in values.items()]


def _grouped(model: ModelConfig) -> dict[str, Value]:
    values: dict[str, Value] = {"kv-channels": model.head_width}
    if model.num_kv_heads != model.num_heads:
        values |= {"group-query-attention": None, "num-query-groups": model.num_kv_heads}
    if model.qk_norm == "head":
        values["qk-layernorm"] = None
    if model.attention_bias:
        values["add-qkv-bias"] = None
    if model.attention_sinks:
        values["softmax-type"] = "learnable"
    return values


def _latent(model: ModelConfig) -> dict[str, Value]:
    """Returns widths of latent attention; channels that rotate are counted apart there."""
    rotated = model.rotated_channels
    values: dict[str, Value] = {
        "multi-latent-attention": None,
        "kv-lora-rank": model.kv_latent,
        "qk-head-dim": model.head_width - rotated,
        "qk-pos-emb-head-dim": rotated,
        "v-head-dim": model.value_channels,
        "qk-layernorm": None,  # both latents are normalised
    }
    if model.q_latent is not None:
        values["q-lora-rank"] = model.q_latent
    return values


def _indexer(cfg: Config) -> dict[str, Value]:
    own, loss = cfg.model.indexer, cfg.train.indexer_loss
    values: dict[str, Value] = {
        "experimental-attention-variant": "dsa",
        "dsa-indexer-n-heads": own.heads,
        "dsa-indexer-head-dim": own.width,
        "dsa-indexer-topk": own.keys,
        "dsa-indexer-loss-coeff": loss,
    }
    if loss:  # over the keys chosen
        values["dsa-indexer-use-sparse-loss"] = None
    return values


def _experts(cfg: Config) -> dict[str, Value]:
    moe, router = cfg.moe, cfg.moe.router
    values: dict[str, Value] = {
        "num-experts": moe.num_experts,
        "moe-ffn-hidden-size": moe.expert_hidden,
        "moe-router-topk": moe.experts_per_token,
    }
    if (pattern := layer_pattern(cfg.model)) is not None:
        values["moe-layer-freq"] = pattern
    if moe.num_shared_experts:
        values["moe-shared-expert-intermediate-size"] = moe.shared_width
        if moe.shared_gate:
            values["moe-shared-expert-gate"] = None
    if moe.latent is not None:
        values["moe-latent-size"] = moe.latent
    if router.score == "sigmoid":
        values["moe-router-score-function"] = "sigmoid"
    elif not router.renormalize:
        values["moe-router-pre-softmax"] = None
    if router.weight_scale != 1.0:
        values["moe-router-topk-scaling-factor"] = router.weight_scale
    if router.num_groups > 1:
        values |= {
            "moe-router-num-groups": router.num_groups,
            "moe-router-group-topk": router.groups_per_token,
        }
    if router.bias_update_rate:
        values |= {
            "moe-router-enable-expert-bias": None,
            "moe-router-bias-update-rate": router.bias_update_rate,
        }
    if router.quantile_bins is not None:
        values |= {
            "moe-router-load-balancing-type": "quantile_balancing",
            "moe-router-quantile-balancing-estimation-scope": "global_batch",
            "moe-router-qb-num-bins": router.quantile_bins,
        }
    if router.forced != "none":
        values["moe-router-force-load-balancing"] = None
    return values


def layer_pattern(model: ModelConfig) -> str | None:
    """Returns `--moe-layer-freq`: 1 for a layer with experts, 0 without; None: all have them."""
    if not model.has_dense_blocks or not model.has_experts:
        return None
    if model.layer_mlps:
        entries = [int(mlp == "experts") for mlp in model.layer_mlps]
        runs = [f"[{entry}]*{len(list(run))}" for entry, run in itertools.groupby(entries)]
        return f"({'+'.join(runs)})"
    assert model.moe_every is not None, "it has experts"
    layers = model.num_layers - model.first_dense_layers
    groups, rest = divmod(layers, model.moe_every)
    parts = [f"[0]*{model.first_dense_layers}"] if model.first_dense_layers else []
    if model.moe_every == 1:
        parts.append(f"[1]*{groups}")
    elif groups:
        parts.append(f"([0]*{model.moe_every - 1}+[1]*1)*{groups}")
    parts += [f"[0]*{rest}"] if rest else []
    return f"({'+'.join(parts)})"


def model_gaps(cfg: Config) -> list[Gap]:
    """Returns parts of the model that the arguments above do not express."""
    model, router = cfg.model, cfg.moe.router
    parts = {
        f"rotary scaling {model.rope.scaling}": model.rope.scaling != "none",
        "RMSNorm of queries and keys over all heads": model.qk_norm == "full",
        "RMSNorm of queries and keys behind rotary positions": model.qk_norm == "rotated",
        "norms behind attention and MLP": model.block_norm != "before",
        "norms of experts, router and shared experts each": cfg.moe.own_norms,
        "norms or factors of values": model.value_norm or model.value_scale != 1.0,
        "values of another width than keys": not model.is_latent
        and model.value_channels != model.head_width,
        "queries that grow with the position": model.rope.query_growth > 0,
        "other heads in blocks without a window": model.full_attention != FullAttentionConfig(),
        "factors of blocks": model.layer_scale,
        "block ahead that is unlike the last": model.predict_ahead > 0
        and ahead_kind(model) != block_kinds(model)[-1],
        "factors of experts": cfg.moe.expert_scale,
        "cap on logits": model.logit_cap is not None,
        "factors on embeddings, residuals, scores or logits": model.score_scale is not None
        or {model.embedding_scale, model.residual_scale, model.logit_divisor} != {1.0},
        "sliding window": model.sliding_window is not None,
        f"linear attention {model.linear.form}": model.is_linear,
        "attention without positions": model.positions != "rotary",
        {"geglu": "GEGLU"}.get(model.activation, "clamped SwiGLU"): model.activation
        not in ("swiglu", "relu2"),
        "layers of attention, an MLP or experts alone": model.parts < 2 * model.num_layers,
        "biases of experts, router or attention's output": cfg.moe.expert_bias
        or cfg.moe.router_bias
        or model.attention_output_bias,
        "sigmoid scores that are not normalised": router.score == "sigmoid"
        and not router.renormalize,
    }
    instead = "needs it set by hand, or by a recipe of the model: the arguments leave it out"
    return [Gap(f"the model's {part}", instead) for part, there in parts.items() if there]
