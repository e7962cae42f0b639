"""Tables of families with latent attention; read `tables` first.

Sources: DeepSeek-AI 2024 (V2 and V3; Kimi-K2 and Moonlight are V3 models) and 2025 (V3.2), Zhipu AI
2026 (GLM-4.7-Flash, GLM-5), Kimi Team 2025 (Kimi Linear), Mistral AI 2026 (Mistral Small 4).
"""

from moejax.hf.families.attention import LatentHeads
from moejax.hf.families.blocks import FIRST_DENSE, MlpTypes, OwnIndexers
from moejax.hf.families.experts import (
    CHOICES,
    SHARED_EXPERTS,
    DenseHidden,
    Groups,
    SequenceBalance,
)
from moejax.hf.families.family import IN_LANGUAGE_MODEL, Around, Family
from moejax.hf.families.parts import PAPER, Always, Same
from moejax.hf.families.rope import POSITIONS, GrowingRope, Rope
from moejax.hf.families.tensors import (
    BIASED,
    DENSE,
    EXPERTS,
    FUSED,
    INDEX_WEIGHTS,
    INDEXER,
    LATENT,
    NORMS,
    PAIRED_INDEXER,
    ROOT,
    SHARED,
    router,
)

WITHOUT_HEADS = (
    CHOICES,
    SHARED_EXPERTS,
    DenseHidden(),
    Rope(latent=True),
    Same("n_routed_experts", "moe.num_experts", also=("num_local_experts", "num_experts")),
    Same("moe_intermediate_size", "moe.expert_hidden"),
    Always("attention_bias", False),
    Always("moe_layer_freq", 1),
)
MLA = (LatentHeads(), *WITHOUT_HEADS)
# Each query chooses its keys by an indexer.
SPARSE = (
    LatentHeads(form="sparse"),
    *WITHOUT_HEADS,
    MlpTypes(counts=True),
    OwnIndexers(),
    Same("index_n_heads", "model.indexer.heads"),
    Same("index_head_dim", "model.indexer.width"),
    Same("index_topk", "model.indexer.keys"),
    Same("routed_scaling_factor", "moe.router.weight_scale", default=2.5),
    Always("mlp_bias", False),
    Always("index_topk_freq", 1, others=(None,), written=False),
)

# Heads that follow from others, and queries that are projected directly.
FOLLOWING = {**dict.fromkeys(("head_dim", "q_lora_rank", "qk_head_dim"), None), **POSITIONS}
NULLS = {**FOLLOWING, "num_key_value_heads": None}

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

# The router of DeepSeek-V3, and the channels that it rotates.
V3 = (
    Groups(),
    SequenceBalance(default=PAPER),
    Same("norm_topk_prob", "moe.router.renormalize", default=True),
    Always("topk_method", "noaux_tc"),
    Always("scoring_func", "sigmoid"),
    Always("rope_interleave", True),
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_types=("kimi_k2",),
    parts=(
        *MLA,
        FIRST_DENSE,
        Same("routed_scaling_factor", "moe.router.weight_scale", default=2.5),
        *V3,
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

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    parts=(
        *MLA,
        MlpTypes(),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.8),
        *V3,
        Always("partial_rotary_factor", 1.0, written=False),
    ),
    implied={"moe.router.score": "sigmoid"},
    missing={"n_group": 1, "num_key_value_heads": 20, "q_lora_rank": 768, "topk_group": 1},
    null={**FOLLOWING, "mlp_layer_types": None, "num_nextn_predict_layers": 0},
    rules=(*BIASED, *LATENT),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
)

SPARSE_NULLS = {
    **dict.fromkeys(
        ("index_topk_pattern", "indexer_types", "layer_types", "mlp_layer_types"), None
    ),
    **dict.fromkeys(("head_dim", "qk_head_dim"), None),
    **POSITIONS,
    "num_nextn_predict_layers": 0,
}

DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    parts=(*SPARSE, *V3, Always("indexer_rope_interleave", False, written=False)),
    implied={"moe.router.score": "sigmoid"},
    missing={
        "first_k_dense_replace": 3,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "n_group": 8,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "topk_group": 4,
    },
    null=SPARSE_NULLS,
    rules=(*BIASED, *LATENT, *INDEXER, INDEX_WEIGHTS),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
)

GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    parts=(*SPARSE, *V3, Always("indexer_rope_interleave", True)),
    implied={"moe.router.score": "sigmoid"},
    unused=("index_share_for_mtp_iteration", "index_skip_topk_offset", "moe_router_dtype"),
    missing={
        "first_k_dense_replace": 3,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "n_group": 1,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "topk_group": 1,
    },
    null=SPARSE_NULLS,
    rules=(*BIASED, *LATENT, *PAIRED_INDEXER, INDEX_WEIGHTS),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
)

MISTRAL4 = Family(
    name="mistral4",
    architecture="Mistral4ForCausalLM",
    parts=(
        *(part for part in MLA if not isinstance(part, Rope)),
        FIRST_DENSE,
        GrowingRope(latent=True, named=True),
        SequenceBalance(default=PAPER),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
        # Of more groups softmax scores would be judged by their two best experts.
        Always("n_group", 1),
        Always("topk_group", 1),
        Always("rope_interleave", True),
    ),
    implied={"model.moe_every": 1},
    missing={"first_k_dense_replace": 0, "num_key_value_heads": 32, "q_lora_rank": 1024},
    null=NULLS,
    rules=(*ROOT, *NORMS, *LATENT, *DENSE, *SHARED, *router("mlp.")),
    experts=(FUSED, EXPERTS),
    around=Around(
        name="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            *IN_LANGUAGE_MODEL,
        ),
        others=r"(model\.)?(vision_tower|multi_modal_projector)\..+",
        keys=(
            "vision_config",
            "image_token_id",
            "image_token_index",
            "multimodal_projector_bias",
            "projector_hidden_act",
            "spatial_merge_size",
            "vision_feature_layer",
        ),
    ),
)
