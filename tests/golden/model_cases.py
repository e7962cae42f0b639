"""The configs of the small models of `make_models.py`, odd ones and some that fit a mesh."""

from collections.abc import Sequence

ODD = {"vocab_size": 997, "num_attention_heads": 13, "num_key_value_heads": 1}
EVEN = {"vocab_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = {
    **ODD,
    "num_key_value_heads": 13,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "hidden_size": 26,
    "q_lora_rank": None,
}
LATENT_EVEN = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "hidden_size": 24,
    "vocab_size": 96,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
}
TIED = {"tie_word_embeddings": True}
NO_AHEAD = {"num_nextn_predict_layers": 0}


def rope(scaling: dict, theta: float = 10_000.0) -> dict:
    """Positions as files have them."""
    return {"rope_theta": theta, "rope_scaling": scaling}


def sizes(layers: int, width: int, head: int | None = None) -> dict:
    """Layers and widths; a head has the width over the heads, unless it is named."""
    own = {} if head is None else {"head_dim": head}
    return {"num_hidden_layers": layers, "hidden_size": width, **own}


def indexer(heads: int, width: int, keys: int) -> dict:
    """An indexer that chooses fewer keys than the texts have tokens."""
    return {"index_n_heads": heads, "index_head_dim": width, "index_topk": keys}


def experts(count: str, number: int, chosen: int, hidden: int | Sequence[int]) -> dict:
    """Experts.

    Args:
      count: the key of their number.
      hidden: their hidden width; or that of dense blocks and of experts.
    """
    found = {count: number, "num_experts_per_tok": chosen}
    if isinstance(hidden, int):
        return {**found, "intermediate_size": hidden}
    return {**found, "intermediate_size": hidden[0], "moe_intermediate_size": hidden[1]}


def apart(number: int, chosen: int, hidden: int) -> dict:
    """Experts of a model without dense blocks."""
    keys = {"num_experts": number, "num_experts_per_tok": chosen}
    return {**keys, "moe_intermediate_size": hidden}


def ernie(number: int, chosen: int, hidden: Sequence[int]) -> dict:
    """Experts, under ERNIE's names."""
    keys = {"moe_num_experts": number, "moe_k": chosen}
    return {**keys, "intermediate_size": hidden[0], "moe_intermediate_size": hidden[1]}


def hunyuan(number: int, chosen: int | list[int], hidden: int) -> dict:
    """Experts, under Hunyuan's names."""
    return {"num_experts": number, "moe_topk": chosen, "intermediate_size": hidden}


def factors(embedding: float, residual: float, scores: float, logits: float) -> dict:
    """Granite's factors; that of logits divides."""
    return {
        "embedding_multiplier": embedding,
        "residual_multiplier": residual,
        "attention_multiplier": scores,
        "logits_scaling": logits,
    }


def groups(number: int, chosen: int) -> dict:
    """Groups of experts."""
    return {"n_group": number, "topk_group": chosen}


def linear(keys: tuple[int, int], values: tuple[int, int], convolution: int = 4) -> dict:
    """Linear attention: heads of keys and of values, each with its width."""
    return {
        "linear_num_key_heads": keys[0],
        "linear_key_head_dim": keys[1],
        "linear_num_value_heads": values[0],
        "linear_value_head_dim": values[1],
        "linear_conv_kernel_dim": convolution,
    }


def kimi(heads: int, width: int, convolution: int = 4) -> dict:
    """Linear attention whose heads have a key and a value of the same width."""
    return {
        "linear_num_heads": heads,
        "linear_head_dim": width,
        "linear_conv_kernel_dim": convolution,
    }


def kimi_experts(number: int, chosen: int, shared: int, hidden: tuple[int, int]) -> dict:
    """As `experts`, by other names."""
    found = {"num_experts": number, "num_experts_per_token": chosen, "num_shared_experts": shared}
    return {**found, "intermediate_size": hidden[0], "moe_intermediate_size": hidden[1]}


def nemotron(layers: str, mamba: Sequence[int], hidden: Sequence[int]) -> dict:
    """Layers by their signs; Mamba-2's groups, heads, channels of both, and its convolution."""
    keys = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")
    widths = ("intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
    kinds = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    return {
        "layers_block_type": [kinds[sign] for sign in layers],
        "time_step_limit": [0.0, 9.0],  # without effect; infinity is no JSON
        **dict(zip(keys, mamba, strict=True)),
        **dict(zip(widths, hidden, strict=True)),
    }


def gemma(number: int, chosen: int, hidden: Sequence[int]) -> dict:
    """Experts and the MLP beside them, under Gemma's names, in the form that has experts."""
    keys = {"enable_moe_block": True, "num_experts": number, "top_k_experts": chosen}
    keys |= {"hidden_size_per_layer_input": 0, "sliding_window": 9}
    return {**keys, "intermediate_size": hidden[0], "moe_intermediate_size": hidden[1]}


def trinity(shared: int, dense: int, window: int) -> dict:
    """Shared experts, dense blocks at the start, and a window, under AFMoE's names."""
    return {
        "num_shared_experts": shared,
        "num_dense_layers": dense,
        "sliding_window": window,
    }


def mimo(heads: int, window: int, theta: float, share: float) -> dict:
    """Keys and values, window, base and rotating share of a head, under MiMo's names."""
    kinds = {"sliding_attention": 1e4, "full_attention": theta}
    rotates = {"rope_type": "default", "partial_rotary_factor": share}
    return {
        "num_key_value_heads": heads,
        "sliding_window": window,
        "rope_parameters": {kind: {**rotates, "rope_theta": base} for kind, base in kinds.items()},
    }


def growing(scaling: dict, length: int, growth: float) -> dict:
    """Positions as Mistral 4 has them: queries grow with each length behind them."""
    own = {"original_max_position_embeddings": length, "llama_4_scaling_beta": growth}
    return {"rope_parameters": {"rope_theta": 1e4, **scaling, **own}}


def two_ropes(near: float, far: float, share: float | None = None) -> dict:
    """Positions of blocks with a window, and without: all pairs turn, or a share of them."""
    some = {"rope_type": "proportional", "partial_rotary_factor": share}
    full = some if share else {"rope_type": "default"}
    return {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
            "full_attention": {**full, "rope_theta": far},
        }
    }


CASES: dict[str, dict[str, dict]] = {
    "mixtral": {
        "window, top 1": {
            **ODD,
            **sizes(2, 20, head=6),
            **experts("num_local_experts", 5, 1, 10),
            "sliding_window": 9,
        },
        "even, llama3 positions": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=6),
            **experts("num_local_experts", 24, 6, 8),
            **rope(LLAMA3, 1e6),
        },
    },
    "olmoe": {
        "top 3": {**ODD, **sizes(2, 52), **experts("num_experts", 5, 3, 10)},
        "even, linear positions, biases": {
            **EVEN,
            **TIED,
            **sizes(2, 48),
            **experts("num_experts", 24, 6, 8),
            "norm_topk_prob": True,
            "attention_bias": True,
            **rope({"rope_type": "linear", "factor": 3.0}),
        },
    },
    "qwen2_moe": {
        "first block dense, top 3": {
            **ODD,
            **sizes(3, 52),
            **experts("num_experts", 5, 3, (14, 10)),
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [0],
        },
        "even, windows by turns": {
            **EVEN,
            **TIED,
            **sizes(4, 48),
            **experts("num_experts", 24, 6, (16, 8)),
            "shared_expert_intermediate_size": 8,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 4,
        },
        "blocks of no period, odd shared expert": {
            **ODD,
            **sizes(6, 52),
            **experts("num_experts", 5, 2, (14, 10)),
            "shared_expert_intermediate_size": 13,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [5],
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", *["sliding_attention"] * 4, "full_attention"],
        },
    },
    "qwen3_moe": {
        "every second block dense, yarn": {
            **ODD,
            **sizes(4, 20, head=6),
            **experts("num_experts", 5, 3, (14, 10)),
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            **rope(YARN, 1e6),
        },
        "even, window, tied": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=6),
            **experts("num_experts", 24, 6, (16, 8)),
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    },
    "deepseek_v2": {
        "greedy, direct queries": {
            **LATENT,
            "kv_lora_rank": 6,
            **experts("n_routed_experts", 5, 3, (14, 10)),
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
        },
        "even, groups, yarn": {
            **LATENT_EVEN,
            **TIED,
            **experts("n_routed_experts", 24, 6, (16, 8)),
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            **groups(4, 2),
            "routed_scaling_factor": 4.0,
            "first_k_dense_replace": 0,
            "num_hidden_layers": 2,
            **rope({**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
        },
    },
    "deepseek_v3": {
        "one group, direct queries, another epsilon": {
            **LATENT,
            **NO_AHEAD,
            "kv_lora_rank": 7,
            **experts("n_routed_experts", 5, 3, (14, 10)),
            "n_shared_experts": 2,
            **groups(1, 1),
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-3,
        },
        "even, groups, yarn": {
            **LATENT_EVEN,
            **NO_AHEAD,
            **experts("n_routed_experts", 24, 6, (16, 8)),
            "n_shared_experts": 1,
            **groups(4, 2),
            "first_k_dense_replace": 1,
            "num_hidden_layers": 2,
            **rope({**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
        },
    },
    "gpt_oss": {
        "top 3": {
            **ODD,
            **sizes(2, 20, head=6),
            **experts("num_local_experts", 5, 3, 10),
            "sliding_window": 9,
            **rope({**YARN, "factor": 8.0, "truncate": False}, 150_000.0),
        },
        "even": {
            **EVEN,
            **TIED,
            **sizes(4, 24, head=6),
            **experts("num_local_experts", 24, 6, 8),
            "sliding_window": 7,
            "swiglu_limit": 0.5,
            **rope({"rope_type": "default"}, 150_000.0),
        },
    },
    "glm4_moe": {
        "norm of heads, biases": {
            **ODD,
            **NO_AHEAD,
            **sizes(3, 20, head=12),
            **experts("n_routed_experts", 5, 3, (14, 10)),
            "n_shared_experts": 1,
            **groups(1, 1),
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        },
        "even": {
            **EVEN,
            **TIED,
            **NO_AHEAD,
            **sizes(2, 24, head=8),
            **experts("n_routed_experts", 24, 6, (16, 8)),
            "n_shared_experts": 2,
            **groups(4, 2),
            "first_k_dense_replace": 0,
            "partial_rotary_factor": 0.5,
        },
    },
    "minimax_m2": {
        "top 1": {
            **ODD,
            **sizes(2, 20, head=6),
            **experts("num_local_experts", 5, 1, 10),
            "rotary_dim": 4,
        },
        "even": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=8),
            **experts("num_local_experts", 24, 6, 8),
            "rotary_dim": 4,
        },
    },
    "glm4_moe_lite": {
        "two dense blocks apart, direct queries": {
            **LATENT,
            "kv_lora_rank": 7,
            **experts("n_routed_experts", 5, 3, (14, 10)),
            "n_shared_experts": 2,
            **groups(1, 1),
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "num_hidden_layers": 4,
            "rope_theta": 1e6,
        },
        "even, groups": {
            **LATENT_EVEN,
            **experts("n_routed_experts", 24, 6, (16, 8)),
            "n_shared_experts": 1,
            **groups(4, 2),
            "num_hidden_layers": 2,
            "rms_norm_eps": 1e-3,
        },
    },
    "deepseek_v32": {
        "one group, another epsilon": {
            **LATENT,
            **NO_AHEAD,
            "q_lora_rank": 11,
            "kv_lora_rank": 7,
            **experts("n_routed_experts", 5, 3, (14, 10)),
            "n_shared_experts": 2,
            **groups(1, 1),
            **indexer(11, 7, 9),
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-3,
        },
        "even, groups, yarn": {
            **LATENT_EVEN,
            **NO_AHEAD,
            **experts("n_routed_experts", 24, 6, (16, 8)),
            "n_shared_experts": 1,
            **groups(4, 2),
            **indexer(12, 8, 11),
            "first_k_dense_replace": 1,
            "num_hidden_layers": 2,
            **rope({**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
        },
    },
    "glm_moe_dsa": {
        "two dense blocks, one group": {
            **LATENT,
            **NO_AHEAD,
            "q_lora_rank": 11,
            "kv_lora_rank": 7,
            **experts("n_routed_experts", 5, 3, (14, 10)),
            "n_shared_experts": 2,
            **groups(1, 1),
            **indexer(11, 7, 9),
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "first_k_dense_replace": 2,
            "num_hidden_layers": 4,
            "rope_theta": 1e6,
        },
        "even, groups": {
            **LATENT_EVEN,
            **NO_AHEAD,
            **experts("n_routed_experts", 24, 6, (16, 8)),
            "n_shared_experts": 1,
            **groups(4, 2),
            **indexer(12, 8, 11),
            "first_k_dense_replace": 1,
            "num_hidden_layers": 2,
            "rms_norm_eps": 1e-3,
        },
    },
    "solar_open": {
        "yarn, biases": {
            **ODD,
            **sizes(2, 20, head=6),
            **experts("n_routed_experts", 5, 3, (14, 10)),
            "n_shared_experts": 1,
            **groups(1, 1),
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            **rope(YARN, 1e6),
        },
        "even, groups": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=8),
            **experts("n_routed_experts", 24, 6, (16, 8)),
            "n_shared_experts": 2,
            **groups(4, 2),
        },
    },
    "dots1": {
        "window of the last block, biases": {
            **ODD,
            **sizes(3, 20, head=6),
            **experts("n_routed_experts", 5, 3, (14, 10)),
            "n_shared_experts": 2,
            **groups(1, 1),
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
        "even, groups, no window": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=8),
            **experts("n_routed_experts", 24, 6, (16, 8)),
            "n_shared_experts": 1,
            **groups(4, 2),
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "sliding_window": None,
        },
    },
    "hy_v3": {
        "biases, scaled weights": {
            **ODD,
            **sizes(3, 20, head=6),
            **experts("num_experts", 5, 3, (14, 10)),
            "num_shared_experts": 2,
            "attention_bias": True,
        },
        "even, blocks by turns": {
            **EVEN,
            **TIED,
            **sizes(4, 24, head=8),
            **experts("num_experts", 24, 6, (16, 8)),
            "num_shared_experts": 1,
            "router_scaling_factor": 1.5,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
    },
    "ernie4_5_moe": {
        "every second block of a range, no shared expert": {
            **ODD,
            **sizes(6, 26, head=6),
            **ernie(5, 3, (14, 10)),
            "tie_word_embeddings": False,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
        },
        "even": {**EVEN, **sizes(2, 24, head=8), **ernie(24, 6, (16, 8))},
    },
    "hunyuan_v1_moe": {
        "positions by alpha, biases": {
            **ODD,
            **sizes(2, 20, head=6),
            **hunyuan(5, 3, 10),
            "attention_bias": True,
            **rope({"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0}),
        },
        "even, choices by layer": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=8),
            **hunyuan(24, [6, 6], 8),
        },
    },
    "flex_olmo": {
        "biases": {
            **ODD,
            **sizes(2, 20, head=6),
            **experts("num_experts", 5, 3, 10),
            "attention_bias": True,
        },
        "even, normalised": {
            **EVEN,
            **TIED,
            **sizes(2, 48),
            **experts("num_experts", 24, 6, 8),
            "norm_topk_prob": True,
        },
    },
    "granitemoe": {
        "factors, biases": {
            **ODD,
            **sizes(2, 20, head=6),
            **experts("num_local_experts", 5, 3, 10),
            **factors(3.0, 0.4, 0.25, 1.5),
            "attention_bias": True,
        },
        "even, other factors": {
            **EVEN,
            **TIED,
            **sizes(2, 48),
            **experts("num_local_experts", 24, 6, 8),
            **factors(5.0, 0.22, 0.5, 0.75),
        },
    },
    "llama": {
        "llama3 positions, biases": {
            **ODD,
            **sizes(2, 26, head=6),
            "intermediate_size": 14,
            "attention_bias": True,
            **rope(LLAMA3, 5e5),
        },
        "even, tied": {**EVEN, **TIED, **sizes(2, 48), "intermediate_size": 16},
    },
    "mistral": {
        "window": {**ODD, **sizes(2, 20, head=6), "intermediate_size": 14, "sliding_window": 9},
        "even, no window": {
            **EVEN,
            **sizes(2, 48),
            "intermediate_size": 16,
            "sliding_window": None,
        },
    },
    "qwen2": {
        "windows of the last blocks": {
            **ODD,
            **sizes(3, 52),
            "intermediate_size": 14,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
        "even, tied, yarn": {
            **EVEN,
            **TIED,
            **sizes(2, 48),
            "intermediate_size": 16,
            **rope(YARN, 1e6),
        },
    },
    "qwen3": {
        "yarn, biases": {
            **ODD,
            **sizes(3, 20, head=6),
            "intermediate_size": 14,
            "attention_bias": True,
            **rope(YARN, 1e6),
        },
        "even, window of the last block, tied": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=6),
            "intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "vocab_size": 260,  # takes bytes
        },
    },
    "qwen3_next": {
        "one key head, first layer in full": {
            **ODD,
            **sizes(3, 20, head=8),
            **experts("num_experts", 5, 2, (14, 10)),
            **linear((1, 6), (3, 5), convolution=3),
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 10,
            "partial_rotary_factor": 0.5,
        },
        # Few layers: norms that begin at zero are drawn near one here, and scale by two.
        "even, the last layer in full": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=8),
            **experts("num_experts", 24, 6, (16, 8)),
            **linear((4, 6), (8, 4)),
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 8,
        },
    },
    "qwen3_5_moe_text": {
        "one key head, first layer in full, sections, yarn": {
            **ODD,
            **sizes(2, 20, head=8),
            **apart(5, 2, 10),
            **linear((1, 6), (3, 5), convolution=3),
            "layer_types": ["full_attention", "linear_attention"],
            "shared_expert_intermediate_size": 14,
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.75,
                "mrope_section": [1, 1, 1],
                "mrope_interleaved": True,
            },
        },
        "even, the last layer in full": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=8),
            **apart(24, 6, 8),
            **linear((4, 8), (8, 4)),
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 8,
        },
    },
    "kimi_linear": {
        "odd, first layer in full, last dense": {
            **LATENT,
            **sizes(3, 26),
            **kimi_experts(5, 2, 1, (14, 10)),
            **kimi(3, 6, convolution=3),
            "kv_lora_rank": 10,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "q_lora_rank": 9,
        },
        "even, groups": {
            **LATENT_EVEN,
            **sizes(4, 24),
            **kimi_experts(24, 6, 2, (16, 8)),
            **kimi(4, 6),
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_renormalize": False,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "q_lora_rank": None,
        },
    },
    "gemma4_text": {
        "biases, values of their own": {
            **ODD,
            **sizes(2, 20, head=6),
            **gemma(5, 2, (14, 10)),
            **two_ropes(5e3, 1e6),
            "global_head_dim": 10,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
        },
        "even, keys are values, a cap": {
            **EVEN,
            **sizes(2, 24, head=6),
            **gemma(24, 6, (16, 8)),
            **two_ropes(1e4, 1e6, share=0.5),
            "global_head_dim": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
        },
    },
    "nemotron_h": {
        "odd, a latent, least steps": {
            **ODD,
            "hidden_size": 20,
            "head_dim": 6,
            **nemotron("ME*-M", (3, 6, 7, 5, 3), (14, 10, 12)),
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_latent_size": 8,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "time_step_min": 0.6,
        },
        "even, groups": {
            **EVEN,
            "hidden_size": 24,
            "head_dim": 6,
            **nemotron("MEM*E", (4, 8, 8, 6, 4), (16, 8, 16)),
            "n_routed_experts": 24,
            "num_experts_per_tok": 6,
            "n_group": 4,
            "topk_group": 2,
            "use_conv_bias": False,
        },
    },
    "afmoe": {
        "biases, a table of layers": {
            **ODD,
            **sizes(4, 20, head=6),
            **experts("num_experts", 5, 3, (14, 10)),
            **trinity(2, 1, 9),
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "attention_bias": True,
            "mup_enabled": True,
            "route_scale": 2.5,
        },
        "even, each second layer in full, yarn": {
            **EVEN,
            **TIED,
            **sizes(2, 24, head=8),
            **experts("num_experts", 24, 6, (16, 8)),
            **trinity(1, 0, 7),
            **rope(YARN),
            "global_attn_every_n_layers": 2,
        },
    },
    "mimo_v2_flash": {
        "biases, most layers in full": {
            **ODD,
            **sizes(4, 20, head=10),
            **experts("n_routed_experts", 5, 3, (14, 10)),
            **groups(1, 1),
            **mimo(2, 9, 3e5, 0.61),
            "num_attention_heads": 12,
            "layer_types": [*["full_attention"] * 2, "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "attention_bias": True,
            "attention_value_scale": None,
            "v_head_dim": 7,
        },
        "even, groups": {
            **EVEN,
            **TIED,
            **sizes(3, 24, head=8),
            **experts("n_routed_experts", 24, 6, (16, 8)),
            **groups(4, 2),
            **mimo(2, 7, 5e6, 0.334 * 1.5),
            "v_head_dim": 6,
            "routed_scaling_factor": 2.5,
        },
    },
    "mistral4": {
        "direct queries, first block dense": {
            **LATENT,
            **experts("n_routed_experts", 5, 3, (14, 10)),
            **growing(YARN, 7, 0.3),
            "kv_lora_rank": 7,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "routed_scaling_factor": 1.5,
        },
        "even, yarn": {
            **LATENT_EVEN,
            **TIED,
            **experts("n_routed_experts", 24, 6, (16, 8)),
            **growing({**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, 16, 0.1),
            "n_shared_experts": 1,
            "num_hidden_layers": 2,
        },
    },
}
