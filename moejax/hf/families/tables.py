"""The families: keys of `config.json` besides the common ones, and rules of tensors.

Read Mixtral first. Families whose routers have a selection bias are in `biased`, those with latent
attention in `latent`, those with linear attention in `linear`; those without experts come last.
Sources: Jiang et al. 2023 (Mistral) and 2024 (Mixtral), Muennighoff et al. 2024 (OLMoE), Qwen team
2024 and 2025, OpenAI 2025 (gpt-oss), Tencent 2025 (Hunyuan-A13B), Shi et al. 2025 (FlexOlmo), IBM
2024 (Granite 3), Google 2026 (Gemma 4), Llama team 2024 (Llama 3).
"""

from moejax.hf.families.attention import (
    KEY_VALUE_HEADS,
    BothBiases,
    FullHeads,
    HeadWidth,
    RootScale,
    ScoreScale,
)
from moejax.hf.families.blocks import LastFull, LayerTypes, OneWindow, SparseStep
from moejax.hf.families.experts import CHOICES, Balance, DenseHidden, SharedExpert
from moejax.hf.families.family import COMMON, GELU, IN_LANGUAGE_MODEL, Around, Family
from moejax.hf.families.parts import NOISE, Always, EveryLayer, Same
from moejax.hf.families.rope import POSITIONS, AlphaRope, Rope, TwoRopes
from moejax.hf.families.tensors import (
    ALL_NORMS,
    DENSE,
    EXPERTS,
    FUSED,
    GROUPED,
    NORMS,
    ROOT,
    SPARSE_EXPERTS,
    fused_experts,
    mlp,
    router,
)
from moejax.hf.rules import Rule

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

GEMMA4 = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    parts=(
        KEY_VALUE_HEADS,
        HeadWidth(),
        FullHeads(),
        TwoRopes(),
        LastFull(),
        BothBiases(),
        RootScale(),
        SharedExpert(keys=("intermediate_size",), gate=False),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Same("num_experts", "moe.num_experts"),
        Same("top_k_experts", "moe.experts_per_token"),
        Same("final_logit_softcapping", "model.logit_cap", default=None),
        Always("hidden_activation", GELU),
        Always("enable_moe_block", True),
        Always("hidden_size_per_layer_input", 0),
        Always("num_kv_shared_layers", 0),
        Always("use_bidirectional_attention", None, others=("vision",)),  # in images alone
    ),
    common=tuple(part for part in COMMON if "hidden_act" not in part.keys),
    implied={
        "model.moe_every": 1,
        "model.activation": "geglu",
        "model.block_norm": "both",
        "model.layer_scale": True,
        "model.qk_norm": "head",
        "model.value_norm": True,
        "model.score_scale": 1.0,
        "moe.own_norms": True,
        "moe.expert_scale": True,
        "moe.router.renormalize": True,
    },
    # The MLP is twice as wide in layers that take keys of others, of which there are none.
    unused=("use_double_wide_mlp", "vocab_size_per_layer_input"),
    missing={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 256,
    },
    null={
        "final_logit_softcapping": None,
        "layer_types": None,
        "num_global_key_value_heads": None,
        "rope_parameters": None,
    },
    rules=(
        *ROOT,
        *ALL_NORMS,
        *GROUPED,
        *mlp("mlp.", "moe"),
        Rule("moe.w_router", "router.proj.weight", "E D"),
        Rule("router_scale", "router.scale"),
        Rule("moe.expert_scale", "router.per_expert_scale"),
    ),
    experts=(fused_experts(""),),
    around=Around(
        name="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        prefixes=IN_LANGUAGE_MODEL,
        others=r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..+",
        keys=(
            "vision_config",
            "audio_config",
            "initializer_range",
            "image_token_id",
            "video_token_id",
            "audio_token_id",
            "boi_token_id",
            "eoi_token_id",
            "boa_token_id",
            "eoa_token_id",
            "eoa_token_index",
            "vision_soft_tokens_per_image",
        ),
    ),
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
