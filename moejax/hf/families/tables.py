"""The families: keys of `config.json` besides the common ones, and rules of tensors.

Read Mixtral first. Dense families come last. Sources: Jiang et al. 2024 (Mixtral), Muennighoff et
al. 2024 (OLMoE), Qwen team 2024 and 2025, DeepSeek-AI 2024 (V2 and V3; Kimi-K2 and Moonlight are V3
models), OpenAI 2025 (gpt-oss), Zhipu AI 2025 (GLM-4.5), MiniMax 2025, Llama team 2024 (Llama 3),
Jiang et al. 2023 (Mistral).
"""

from moejax.hf.families.attention import (
    KEY_VALUE_HEADS,
    BothBiases,
    HeadNorm,
    HeadWidth,
    LatentHeads,
    SoftmaxAttention,
)
from moejax.hf.families.blocks import FIRST_DENSE, LayerTypes, LinearTypes, OneWindow, SparseStep
from moejax.hf.families.experts import (
    CHOICES,
    PAPER,
    SHARED_EXPERTS,
    Balance,
    DenseHidden,
    Groups,
    SequenceBalance,
    SharedExpert,
)
from moejax.hf.families.family import Family
from moejax.hf.families.parts import Always, Same
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import (
    AHEAD,
    DELTA,
    DENSE,
    EXPERTS,
    FUSED,
    GATED,
    GROUPED,
    LATENT,
    NORMS,
    ROOT,
    SHARED,
    experts,
    fused_experts,
    mlp,
    of_blocks,
    router,
    selection_bias,
)
from moejax.hf.rules import Rule

# Tensors of a model whose router has a selection bias (DeepSeek-V3, GLM), without attention.
BIASED = (
    *ROOT,
    *NORMS,
    *DENSE,
    *SHARED,
    *router("mlp."),
    *selection_bias("mlp.gate.e_score_correction_bias"),
    *AHEAD,
)
SPARSE_EXPERTS = (
    experts("block_sparse_moe.", gate="w1", up="w3", down="w2"),
    fused_experts("block_sparse_moe."),
    fused_experts("mlp."),
)

MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(theta=1e6),
        OneWindow(),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_local_experts", "moe.num_experts", also=("num_experts",)),
        Always("router_jitter_noise", 0.0),
        Balance("choices"),
    ),
    implied={"moe.router.renormalize": True, "model.moe_every": 1},
    missing={"num_key_value_heads": 8},
    null={"head_dim": None, "sliding_window": None, **POSITIONS},
    rules=(*ROOT, *NORMS, *GROUPED, *router("block_sparse_moe.")),
    experts=SPARSE_EXPERTS,
)

OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(free=False),
        Rope(),
        BothBiases(),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_experts", "moe.num_experts", also=("num_local_experts",)),
        Same("norm_topk_prob", "moe.router.renormalize", default=False),
        Always("clip_qkv", None),
        Balance("one", default=0.01),
    ),
    implied={"model.qk_norm": "full", "model.moe_every": 1},
    null={"num_key_value_heads": None, **POSITIONS},
    rules=(*ROOT, *NORMS, *GROUPED, *router("mlp.")),
    experts=(EXPERTS, FUSED),
)

MOE = (
    CHOICES,
    KEY_VALUE_HEADS,
    HeadWidth(),
    Rope(),
    SparseStep(),
    DenseHidden(),
    Same("moe_intermediate_size", "moe.expert_hidden"),
    Same("num_experts", "moe.num_experts", also=("num_local_experts",)),
    Same("norm_topk_prob", "moe.router.renormalize", default=False),
    Balance("choices"),
)

QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    parts=(
        *MOE,
        LayerTypes(switch="use_sliding_window"),
        SharedExpert(),
        Same("qkv_bias", "model.attention_bias", default=True),
    ),
    missing={"num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28},
    null={"layer_types": None, "mlp_only_layers": None, "sliding_window": None, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *GROUPED,
        *DENSE,
        *router("mlp."),
        *mlp("mlp.shared_expert.", "moe"),
        Rule("shared_gate", "mlp.shared_expert_gate.weight", "1 D"),
    ),
    experts=(EXPERTS, FUSED),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parts=(
        *MOE,
        OneWindow(switch="use_sliding_window"),
        BothBiases(),
    ),
    implied={"model.qk_norm": "head"},
    unused=("max_window_layers",),
    missing={"num_key_value_heads": 4, "sliding_window": 4096},
    null={"mlp_only_layers": None, "sliding_window": None, **POSITIONS},
    rules=(*ROOT, *NORMS, *GROUPED, *DENSE, *router("mlp.")),
    experts=(EXPERTS, FUSED),
)

MLA = (
    CHOICES,
    LatentHeads(),
    SHARED_EXPERTS,
    DenseHidden(),
    Rope(latent=True),
    Same("n_routed_experts", "moe.num_experts", also=("num_local_experts", "num_experts")),
    Same("moe_intermediate_size", "moe.expert_hidden"),
    Always("attention_bias", False),
    Always("moe_layer_freq", 1),
)

# Heads that follow from others, and queries that are projected directly.
NULLS = dict.fromkeys(("head_dim", "num_key_value_heads", "q_lora_rank", "qk_head_dim"), None)
NULLS |= POSITIONS

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    parts=(
        *MLA,
        FIRST_DENSE,
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
        Groups(switch=True),
        SequenceBalance(default=0.001),
        # DeepSeek's code does not scale weights that it normalises, transformers ignores the key.
        Always("norm_topk_prob", False, others=(None,)),
        Always("scoring_func", "softmax"),
        Always("mlp_bias", False),
    ),
    implied={"model.moe_every": 1, "moe.router.renormalize": False},
    missing={"q_lora_rank": 1536, "first_k_dense_replace": 0},
    null={**NULLS, "n_group": None, "topk_group": None},
    rules=(*ROOT, *NORMS, *LATENT, *DENSE, *SHARED, *router("mlp.")),
    experts=(EXPERTS, FUSED),
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_types=("kimi_k2",),
    parts=(
        *MLA,
        FIRST_DENSE,
        Same("routed_scaling_factor", "moe.router.weight_scale", default=2.5),
        Groups(),
        SequenceBalance(default=PAPER),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
        Always("topk_method", "noaux_tc"),
        Always("scoring_func", "sigmoid"),
        Always("rope_interleave", True),
    ),
    implied={"model.moe_every": 1, "moe.router.score": "sigmoid"},
    unused=("num_mtp_layers",),
    missing={
        "first_k_dense_replace": 3,
        "n_group": 8,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "topk_group": 4,
    },
    null={**NULLS, "norm_topk_prob": False, "num_nextn_predict_layers": 0},
    rules=(*BIASED, *LATENT),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
)

GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(theta=150_000.0, named=True),
        LayerTypes(),
        BothBiases(default=True),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_local_experts", "moe.num_experts", also=("num_experts",)),
        Same("swiglu_limit", "model.activation_limit", default=7.0),
        Always("swiglu_alpha", 1.702),
    ),
    implied={
        # A softmax over the chosen logits is the softmax over all, renormalised.
        "moe.router.renormalize": True,
        "moe.router_bias": True,
        "moe.expert_bias": True,
        "model.moe_every": 1,
        "model.activation": "clamped_swiglu",
        "model.attention_sinks": True,
    },
    # The coefficient of a loss that only transformers' training has; 0.9 in released files.
    unused=("router_aux_loss_coef", "initial_context_length"),
    missing={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    null={"layer_types": None, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *GROUPED,
        Rule("moe.w_router", "mlp.router.weight", "E D"),
        Rule("moe.b_router", "mlp.router.bias"),
    ),
    experts=(
        (
            Rule("moe.w_in", "mlp.experts.gate_up_proj", "E D FU"),
            Rule("moe.b_in", "mlp.experts.gate_up_proj_bias", "E FU"),
            Rule("moe.w_out", "mlp.experts.down_proj", "E F D"),
            Rule("moe.b_out", "mlp.experts.down_proj_bias", "E D"),
        ),
    ),
)

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        HeadNorm(),
        Rope(partial="partial_rotary_factor", rotated=0.5),
        FIRST_DENSE,
        DenseHidden(),
        SHARED_EXPERTS,
        Groups(),
        SequenceBalance(default=PAPER),
        Same("attention_bias", "model.attention_bias", default=False),
        Same("n_routed_experts", "moe.num_experts", also=("num_local_experts", "num_experts")),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
    ),
    implied={"model.moe_every": 1, "moe.router.score": "sigmoid"},
    missing={"first_k_dense_replace": 1, "n_group": 1, "num_key_value_heads": 8, "topk_group": 1},
    null={"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0, **POSITIONS},
    rules=(*BIASED, *GROUPED),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
)

MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    model_types=("minimax",),  # of the first files, whose architecture says which
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(theta=5e6, partial="rotary_dim"),
        SoftmaxAttention(),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_local_experts", "moe.num_experts", also=("num_experts",)),
        Always("use_qk_norm", True),
        Always("qk_norm_type", "per_layer"),
        Always("scoring_func", "sigmoid"),
        Always("use_routing_bias", True),
        Always("router_jitter_noise", 0.0),
        Always("sliding_window", None, written=False),
        Always("swa_rope_theta", -1.0, written=False),
        Always("shared_intermediate_size", 0, written=False),
        *(
            Always(f"layernorm_{name}_beta", 1.0, written=False)
            for name in ("full_attention", "linear_attention", "mlp")
        ),
        Balance("choices"),
    ),
    implied={
        "model.qk_norm": "full",
        "model.moe_every": 1,
        "moe.router.renormalize": True,
        "moe.router.score": "sigmoid",
    },
    unused=(
        "mlp_intermediate_size",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "shared_moe_mode",
        "use_mtp",
    ),
    missing={"head_dim": 128, "num_key_value_heads": 8},
    null={"attn_type_list": None, "rotary_dim": None, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *GROUPED,
        *router("block_sparse_moe."),
        *selection_bias("block_sparse_moe.e_score_correction_bias"),
    ),
    experts=SPARSE_EXPERTS,
)

# What a model without experts has.
PLAIN = {"model.moe_every": None}
PLAIN_RULES = (*ROOT, *NORMS, *GROUPED, *DENSE)
LAST_WINDOWS = LayerTypes(switch="use_sliding_window", turns=False)

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    parts=(
        KEY_VALUE_HEADS,
        HeadWidth(multiple=True),
        Rope(),
        DenseHidden(),
        BothBiases(),
        Always("mlp_bias", False),
    ),
    implied=PLAIN,
    null={"head_dim": None, "num_key_value_heads": None, **POSITIONS},
    rules=PLAIN_RULES,
)

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    parts=(KEY_VALUE_HEADS, HeadWidth(), Rope(), DenseHidden(), OneWindow()),
    implied=PLAIN,
    missing={"num_key_value_heads": 8, "sliding_window": 4096},
    null={"head_dim": None, "sliding_window": None, **POSITIONS},
    rules=PLAIN_RULES,
)

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    parts=(
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(),
        DenseHidden(),
        LAST_WINDOWS,
        Always("use_mrope", False),
    ),
    implied={**PLAIN, "model.attention_bias": True},
    missing={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    null={"layer_types": None, "num_key_value_heads": None, "sliding_window": None, **POSITIONS},
    rules=PLAIN_RULES,
)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    parts=(KEY_VALUE_HEADS, HeadWidth(), Rope(), DenseHidden(), LAST_WINDOWS, BothBiases()),
    implied={**PLAIN, "model.qk_norm": "head"},
    missing={
        "head_dim": 128,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    null={"layer_types": None, "num_key_value_heads": None, "sliding_window": None, **POSITIONS},
    rules=PLAIN_RULES,
)

QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(partial="partial_rotary_factor", rotated=0.25),
        SparseStep(),
        DenseHidden(),
        SharedExpert(),
        LinearTypes("gated_delta"),
        Same("linear_num_key_heads", "model.linear.key_heads"),
        Same("linear_num_value_heads", "model.linear.value_heads"),
        Same("linear_key_head_dim", "model.linear.key_width"),
        Same("linear_value_head_dim", "model.linear.value_width"),
        Same("linear_conv_kernel_dim", "model.linear.convolution"),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Same("num_experts", "moe.num_experts", also=("num_local_experts",)),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
        Always("attention_bias", False),
        Balance("choices"),
    ),
    implied={
        "model.qk_norm": "head",
        "model.attention_gate": True,
        "model.zero_centered_norms": True,
    },
    missing={
        "head_dim": 256,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    null={"mlp_only_layers": None, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *of_blocks("grouped", GATED),
        *of_blocks("gated_delta", DELTA),
        *DENSE,
        *router("mlp."),
        *mlp("mlp.shared_expert.", "moe"),
        Rule("shared_gate", "mlp.shared_expert_gate.weight", "1 D"),
    ),
    experts=(EXPERTS, FUSED),
    apart="mtp.",
)

FAMILIES = (
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    GLM4_MOE,
    MINIMAX_M2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_NEXT,
)
