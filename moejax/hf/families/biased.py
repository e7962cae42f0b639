"""Tables of families whose routers have a selection bias, with grouped attention.

Read `tables` first. Sources: Zhipu AI 2025 (GLM-4.5), MiniMax 2025, Upstage 2026 (Solar Open),
rednote-hilab 2025 (dots.llm1), Tencent 2026 (Hy3), Baidu 2025 (ERNIE 4.5).
"""

from moejax.hf.families.attention import (
    KEY_VALUE_HEADS,
    BothBiases,
    HeadNorm,
    HeadWidth,
    SoftmaxAttention,
)
from moejax.hf.families.blocks import FIRST_DENSE, LayerRange, LayerTypes, MlpTypes
from moejax.hf.families.experts import (
    CHOICES,
    PAPER,
    SHARED_EXPERTS,
    Balance,
    DenseHidden,
    Groups,
    SequenceBalance,
)
from moejax.hf.families.family import Family
from moejax.hf.families.parts import NOISE, Always, Same
from moejax.hf.families.rope import POSITIONS, Rope
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
    SPARSE_EXPERTS,
    mlp,
    router,
    selection_bias,
)
from moejax.hf.rules import Rule

# Parts of GLM-4.5, and of models that began with its code.
GLM = (
    SHARED_EXPERTS,
    Groups(),
    SequenceBalance(default=PAPER),
    Same("attention_bias", "model.attention_bias", default=False),
    Same("n_routed_experts", "moe.num_experts", also=("num_local_experts", "num_experts")),
    Same("moe_intermediate_size", "moe.expert_hidden"),
    Same("norm_topk_prob", "moe.router.renormalize", default=True),
    Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
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
        *GLM,
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
        *GLM,
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
