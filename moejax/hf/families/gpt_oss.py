"""gpt-oss (OpenAI 2025): `GptOssForCausalLM`."""

from moejax.hf.families.blocks import LayerTypes
from moejax.hf.families.family import Family
from moejax.hf.families.parts import (
    Always,
    BothBiases,
    HeadWidth,
    Implied,
    KeyValueHeads,
    Same,
    Unused,
)
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import GROUPED, NORMS, ROOT
from moejax.hf.rules import Rule

GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    parts=(
        KeyValueHeads(),
        HeadWidth(),
        Rope(theta=150_000.0, named=True),
        LayerTypes(),
        BothBiases(default=True),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_local_experts", "moe.num_experts", also=("num_experts",)),
        Same("swiglu_limit", "model.activation_limit", default=7.0),
        Always("swiglu_alpha", 1.702),
        Implied(
            (
                # A softmax over the chosen logits is the softmax over all, renormalised.
                ("moe.router.renormalize", True),
                ("moe.router_bias", True),
                ("moe.expert_bias", True),
                ("model.moe_every", 1),
                ("model.activation", "clamped_swiglu"),
                ("model.attention_sinks", True),
            )
        ),
        # The coefficient of a loss that only transformers' training has; 0.9 in released files.
        Unused(("router_aux_loss_coef", "initial_context_length")),
    ),
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
