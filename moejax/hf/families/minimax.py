"""MiniMax-M2 (MiniMax 2025): `MiniMaxM2ForCausalLM`."""

from dataclasses import dataclass
from typing import Any

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families.family import Family
from moejax.hf.families.parts import (
    Always,
    Balance,
    Config,
    HeadWidth,
    Implied,
    KeyValueHeads,
    Same,
    Settings,
    Unused,
)
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import (
    GROUPED,
    NORMS,
    ROOT,
    experts,
    fused_experts,
    router,
    selection_bias,
)


@dataclass(frozen=True)
class SoftmaxAttention:
    """A list of the layers' attention, which an earlier model of the authors mixed."""

    keys: tuple[str, ...] = ("attn_type_list",)

    def read(self, config: Config) -> dict[str, Any]:
        """Refuses linear attention."""
        kinds = config.get("attn_type_list") or [1]
        if not isinstance(kinds, list) or set(map(repr, kinds)) != {"1"}:
            raise InputError(
                f"`attn_type_list` is {short(kinds)}. moejax computes softmax attention, 1, only. "
                "Choose another model."
            )
        return {}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key, if files of the family have it."""
        given = {"attn_type_list": [1] * settings["model.num_layers"]}
        return given if "attn_type_list" in base else {}


MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    model_types=("minimax",),  # of the first files, whose architecture says which
    parts=(
        KeyValueHeads(),
        HeadWidth(),
        Rope(theta=5e6, partial="rotary_dim"),
        SoftmaxAttention(),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_local_experts", "moe.num_experts", also=("num_experts",)),
        Implied(
            (
                ("model.qk_norm", "full"),
                ("model.moe_every", 1),
                ("moe.router.renormalize", True),
                ("moe.router.score", "sigmoid"),
            )
        ),
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
        Unused(
            (
                "mlp_intermediate_size",
                "mtp_transformer_layers",
                "num_mtp_modules",
                "shared_moe_mode",
                "use_mtp",
            )
        ),
        Balance("choices"),
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
    experts=(
        experts("block_sparse_moe.", gate="w1", up="w3", down="w2"),
        fused_experts("block_sparse_moe."),
        fused_experts("mlp."),
    ),
)
