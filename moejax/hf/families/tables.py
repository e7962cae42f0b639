"""The families: keys of `config.json` besides the common ones, and rules of tensors.

Read Mixtral first. Families with latent attention are in `latent`, those without experts in
`dense`. Sources: Jiang et al. 2024 (Mixtral), Muennighoff et al. 2024 (OLMoE), Qwen team 2024 and
2025, OpenAI 2025 (gpt-oss), Zhipu AI 2025 (GLM-4.5), MiniMax 2025, Upstage 2026 (Solar Open),
rednote-hilab 2025 (dots.llm1), Tencent 2025 (Hunyuan-A13B) and 2026 (Hy3), Baidu 2025 (ERNIE 4.5),
Shi et al. 2025 (FlexOlmo), IBM 2024 (Granite 3).
"""

from moejax.hf.families.attention import (
    KEY_VALUE_HEADS,
    BothBiases,
    HeadNorm,
    HeadWidth,
    ScoreScale,
    SoftmaxAttention,
)
from moejax.hf.families.blocks import (
    FIRST_DENSE,
    LayerRange,
    LayerTypes,
    MlpTypes,
    OneWindow,
    SparseStep,
)
from moejax.hf.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
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
from moejax.hf.families.latent import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from moejax.hf.families.parts import NOISE, Always, EveryLayer, Same
from moejax.hf.families.rope import POSITIONS, AlphaRope, Rope
from moejax.hf.families.tensors import (
    BIASED,
    DENSE,
    EXPERTS,
    FUSED,
    GROUPED,
    NORMS,
    PAIRED,
    ROOT,
    SHARED,
    experts,
    fused_experts,
    mlp,
    router,
    selection_bias,
)
from moejax.hf.rules import Rule

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
        Always("router_jitter_noise", 0.0, advice=NOISE),
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
        Always("router_jitter_noise", 0.0, advice=NOISE),
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

SOLAR_OPEN = Family(
    name="solar_open",
    architecture="SolarOpenForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(theta=1e6),
        SHARED_EXPERTS,
        Groups(),
        SequenceBalance(default=PAPER),
        Same("attention_bias", "model.attention_bias", default=False),
        Same("n_routed_experts", "moe.num_experts", also=("num_local_experts", "num_experts")),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
        # Keys of GLM-4.5, whose code it was; all blocks have experts.
        Always("first_k_dense_replace", 0),
        Always("use_qk_norm", False, written=False),
    ),
    implied={"model.moe_every": 1, "moe.router.score": "sigmoid"},
    unused=("intermediate_size",),
    missing={
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "n_group": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 8,
        "topk_group": 1,
    },
    null=POSITIONS,
    rules=(
        *ROOT,
        *NORMS,
        *SHARED,
        *router("mlp."),
        *selection_bias("mlp.gate.e_score_correction_bias"),
        *GROUPED,
    ),
    experts=(EXPERTS, FUSED),
)

DOTS1 = Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(),
        BothBiases(),
        FIRST_DENSE,
        LayerTypes(turns=False),
        DenseHidden(),
        SHARED_EXPERTS,
        Groups(),
        SequenceBalance(default=PAPER),
        Same("n_routed_experts", "moe.num_experts", also=("num_local_experts", "num_experts")),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Same("norm_topk_prob", "moe.router.renormalize", default=False),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
        Always("moe_layer_freq", 1),
        Always("scoring_func", "sigmoid", others=("noaux_tc",)),
    ),
    implied={"model.moe_every": 1, "model.qk_norm": "head", "moe.router.score": "sigmoid"},
    missing={
        "first_k_dense_replace": 0,
        "max_window_layers": 62,
        "n_group": 1,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "topk_group": 1,
    },
    null={
        "layer_types": None,
        "norm_topk_prob": False,
        "num_key_value_heads": None,
        "sliding_window": None,
        **POSITIONS,
    },
    rules=(*BIASED, *GROUPED),
    experts=(EXPERTS, FUSED),
)

HY_V3 = Family(
    name="hy_v3",
    architecture="HYV3ForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(theta=11_158_840.0),
        BothBiases(),
        MlpTypes(),
        DenseHidden(),
        SequenceBalance(default=PAPER),
        Same("num_shared_experts", "moe.num_shared_experts", positive=True),
        Same("num_experts", "moe.num_experts", also=("num_local_experts",)),
        Same("moe_intermediate_size", "moe.expert_hidden", also=("expert_hidden_dim",)),
        Same("router_scaling_factor", "moe.router.weight_scale", default=2.826),
        Always("mlp_bias", False),
        Always("qk_norm", True),
        Always("route_norm", True),
        Always("moe_router_use_sigmoid", True),
        Always("moe_router_enable_expert_bias", True),
    ),
    implied={
        "model.qk_norm": "head",
        "moe.router.renormalize": True,
        "moe.router.score": "sigmoid",
    },
    unused=(
        "enable_attention_fp32_softmax",
        "enable_lm_head_fp32",
        "enable_moe_fp32_combine",
        "eod_token_id",
        "sep_token_id",
        "use_grouped_mm",
    ),
    missing={
        "head_dim": 128,
        "initializer_range": 0.006,
        "num_key_value_heads": 8,
        "num_shared_experts": 1,
    },
    null={"mlp_layer_types": None, "num_nextn_predict_layers": 0, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *GROUPED,
        *DENSE,
        *mlp("mlp.shared_mlp.", "moe"),
        *router("mlp.router."),
        *selection_bias("mlp.expert_bias"),
    ),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
)

ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    parts=(
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(theta=500_000.0),
        LayerRange(),
        DenseHidden(),
        Same("moe_k", "moe.experts_per_token", also=("num_experts_per_tok",)),
        Same("moe_num_experts", "moe.num_experts", also=("num_experts", "num_local_experts")),
        Same("moe_num_shared_experts", "moe.num_shared_experts", default=2),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Balance("choices", of="moe_k"),
        Always("use_bias", False),
        Always("use_rmsnorm", True, written=False),
        # No sum of chosen scores is that small: of K of E scores with bias it is far above.
        Always("moe_norm_min", 1e-12),
        Always("moe_gate", "topk", written=False),
        Always("moe_gate_act", "softmax", others=(None,), written=False),
        Always("moe_use_aux_free", True, written=False),
    ),
    implied={"moe.router.renormalize": True},
    # A capacity is for training alone.
    unused=("is_quantized", "moe_capacity", "sep_token_id"),
    missing={
        "moe_k": 6,
        "moe_num_experts": 64,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    null={"num_nextn_predict_layers": 0, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *PAIRED,
        *DENSE,
        *SHARED,
        *router("mlp."),
        Rule("moe.bias", "mlp.moe_statics.e_score_correction_bias", "1 E", wide=True),
    ),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
    ahead_tensors=r"model\.mtp_.+",
)

HUNYUAN_V1_MOE = Family(
    name="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    parts=(
        KEY_VALUE_HEADS,
        HeadWidth(named=True),
        AlphaRope(),
        BothBiases(),
        EveryLayer("moe_topk", "moe.experts_per_token", also=("num_experts_per_tok",)),
        EveryLayer("intermediate_size", "moe.expert_hidden", also=("moe_intermediate_size",)),
        # A shared expert of an expert's width, whatever the file says.
        EveryLayer("num_shared_expert", "moe.num_shared_experts", default=1, only=1),
        Same("num_experts", "moe.num_experts", also=("num_local_experts",)),
        Always("use_qk_norm", True),
        Always("use_mixed_mlp_moe", True, written=False),
        Always("use_cla", False, written=False),
        Always("mlp_bias", False, written=False),
        Always("moe_layer_num_skipped", 0, written=False),
        Always("norm_type", "rms", written=False),
    ),
    implied={"model.moe_every": 1, "model.qk_norm": "rotated", "moe.router.renormalize": True},
    unused=("attention_head_dim", "cla_share_factor", "eod_token_id", "pad_id", "sep_token_id"),
    null={"num_key_value_heads": None, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *(rule for rule in GROUPED if "norm" not in rule.ours),
        Rule("attention.q_norm.scale", "self_attn.query_layernorm.weight"),
        Rule("attention.k_norm.scale", "self_attn.key_layernorm.weight"),
        Rule("moe.w_router", "mlp.gate.wg.weight", "E D"),
        *mlp("mlp.shared_mlp.", "moe"),
    ),
    experts=(EXPERTS, FUSED),
)

FLEX_OLMO = Family(
    name="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(theta=500_000.0),
        BothBiases(),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_experts", "moe.num_experts", also=("num_local_experts",)),
        Same("norm_topk_prob", "moe.router.renormalize", default=False),
        Balance("one", default=0.01),
    ),
    implied={"model.qk_norm": "full", "model.moe_every": 1, "model.block_norm": "after"},
    null={"num_key_value_heads": None, **POSITIONS},
    rules=(
        *ROOT,
        Rule("attention_norm.scale", "post_attention_layernorm.weight"),
        Rule("mlp_norm.scale", "post_feedforward_layernorm.weight"),
        *GROUPED,
        *router("mlp."),
    ),
    experts=(EXPERTS, FUSED),
)

GRANITE_MOE = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        Rope(),
        BothBiases(),
        ScoreScale(),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_local_experts", "moe.num_experts", also=("num_experts",)),
        Same("embedding_multiplier", "model.embedding_scale", default=1.0),
        Same("residual_multiplier", "model.residual_scale", default=1.0),
        Same("logits_scaling", "model.logit_divisor", default=1.0),
        Balance("choices"),
    ),
    # A softmax over the chosen logits is the softmax over all, renormalised.
    implied={"moe.router.renormalize": True, "model.moe_every": 1},
    missing={"num_local_experts": 8, "num_experts_per_tok": 2},
    null={"num_key_value_heads": None, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *GROUPED,
        Rule("moe.w_router", "block_sparse_moe.router.layer.weight", "E D"),
    ),
    experts=(
        (
            Rule("moe.w_in", "block_sparse_moe.input_linear.weight", "E UF D"),
            Rule("moe.w_out", "block_sparse_moe.output_linear.weight", "E D F"),
        ),
    ),
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
    GLM4_MOE_LITE,
    SOLAR_OPEN,
    DOTS1,
    HY_V3,
    ERNIE4_5_MOE,
    HUNYUAN_V1_MOE,
    FLEX_OLMO,
    GRANITE_MOE,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
)
