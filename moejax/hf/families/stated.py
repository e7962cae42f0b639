"""Keys by which a `config.json` states what its family computes anyway.

Files carry keys of other families that state a constant of their own: `qkv_bias` false where no
model of the family has biases. Such a key passes if it says what the settings say.
"""

from typing import Any

from moejax.hf.families.parts import Settings, shared_width


def stated(settings: Settings) -> dict[str, Any]:
    """Returns what keys of any family say about a model.

    Args:
      settings: all settings of the model and its experts, by dotted name.
    """

    def model(name: str) -> Any:
        return settings[f"model.{name}"]

    def moe(name: str) -> Any:
        return settings[f"moe.{name}"]

    shared = moe("num_shared_experts")  # of an expert's width, unless `shared_hidden` says another
    biases = model("attention_bias")
    keys = {
        "attention_bias": biases,
        "qkv_bias": biases,
        "mlp_bias": False,
        "clip_qkv": None,
        "hidden_activation": "silu",
        "use_qk_norm": model("qk_norm") != "none",
        "use_sliding_window": model("sliding_window") is not None,
        "sliding_window": model("sliding_window"),
        "num_experts": moe("num_experts"),
        "num_local_experts": moe("num_experts"),
        "n_routed_experts": moe("num_experts"),
        "moe_intermediate_size": moe("expert_hidden"),
        "n_shared_experts": shared,
        "num_shared_experts": shared,
        "shared_expert_intermediate_size": shared_width(settings),
        "norm_topk_prob": moe("router.renormalize"),
        "scoring_func": moe("router.score"),
        "routed_scaling_factor": moe("router.weight_scale"),
        "n_group": moe("router.num_groups"),
        "topk_group": moe("router.groups_per_token"),
        "router_jitter_noise": 0.0,
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": 0,
    }
    if not model("layer_mlps") and model("moe_every") == 1:
        keys |= {"first_k_dense_replace": model("first_dense_layers"), "moe_layer_freq": 1}
        keys["decoder_sparse_step"] = 1
        keys["mlp_only_layers"] = list(range(model("first_dense_layers")))
    if model("attention") != "latent":
        head = model("head_width")
        keys["partial_rotary_factor"] = (model("rope_width") or head) / head
    return keys
