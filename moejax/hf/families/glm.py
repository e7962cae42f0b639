"""GLM-4.5 (Zhipu AI 2025): `Glm4MoeForCausalLM`."""

from dataclasses import dataclass
from typing import Any

from moejax.errors import InputError
from moejax.hf.families.blocks import FirstDense
from moejax.hf.families.deepseek import PAPER, Groups, SequenceBalance, SharedExperts
from moejax.hf.families.family import Family
from moejax.hf.families.parts import (
    Config,
    DenseHidden,
    HeadWidth,
    Implied,
    KeyValueHeads,
    Same,
    Settings,
)
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import (
    AHEAD,
    DENSE,
    EXPERTS,
    FUSED,
    GROUPED,
    NORMS,
    ROOT,
    SHARED,
    router,
    selection_bias,
)


@dataclass(frozen=True)
class HeadNorm:
    """Normalisation of queries and keys, each head by itself."""

    keys: tuple[str, ...] = ("use_qk_norm",)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the setting."""
        return {"model.qk_norm": "head" if config.get("use_qk_norm", False) else "none"}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        if settings["model.qk_norm"] == "full":
            raise InputError("`model.qk_norm` is full. It normalises each head by itself")
        return {"use_qk_norm": settings["model.qk_norm"] == "head"}


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    parts=(
        KeyValueHeads(),
        HeadWidth(),
        HeadNorm(),
        Rope(partial="partial_rotary_factor", rotated=0.5),
        FirstDense(),
        DenseHidden(),
        SharedExperts(),
        Groups(),
        SequenceBalance(default=PAPER),
        Same("attention_bias", "model.attention_bias", default=False),
        Same("n_routed_experts", "moe.num_experts", also=("num_local_experts", "num_experts")),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
        Implied((("moe.router.score", "sigmoid"),)),
    ),
    missing={
        "first_k_dense_replace": 1,
        "n_group": 1,
        "num_key_value_heads": 8,
        "topk_group": 1,
    },
    null={"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *GROUPED,
        *DENSE,
        *SHARED,
        *router("mlp."),
        *selection_bias("mlp.gate.e_score_correction_bias"),
        *AHEAD,
    ),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
)
