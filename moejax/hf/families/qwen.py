"""Qwen2-MoE and Qwen3-MoE (Qwen team 2024, 2025)."""

from dataclasses import dataclass
from typing import Any

from moejax.errors import InputError
from moejax.hf.families.blocks import LayerTypes, OneWindow, SparseStep
from moejax.hf.families.family import Family
from moejax.hf.families.parts import (
    Balance,
    BothBiases,
    Config,
    DenseHidden,
    HeadWidth,
    Implied,
    KeyValueHeads,
    Same,
    Settings,
    Unused,
    shared_width,
    shortest_shared,
    whole_number,
)
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import DENSE, EXPERTS, FUSED, GROUPED, NORMS, ROOT, mlp, router
from moejax.hf.rules import Rule

SHARED_SIZE = "shared_expert_intermediate_size"


@dataclass(frozen=True)
class SharedExpert:
    """One shared expert of any width, behind a gate; here several experts, if it divides."""

    keys: tuple[str, ...] = (SHARED_SIZE,)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings."""
        shared = whole_number(config, SHARED_SIZE)
        found = shortest_shared(shared, whole_number(config, "moe_intermediate_size"))
        return {**found, "moe.shared_gate": True}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        width = shared_width(settings)
        if not width:
            raise InputError("`moe.num_shared_experts` is 0. It has at least one")
        return {SHARED_SIZE: width}


MOE = (
    KeyValueHeads(),
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
        Implied((("model.qk_norm", "head"),)),
        Unused(("max_window_layers",)),
    ),
    missing={"num_key_value_heads": 4, "sliding_window": 4096},
    null={"mlp_only_layers": None, "sliding_window": None, **POSITIONS},
    rules=(*ROOT, *NORMS, *GROUPED, *DENSE, *router("mlp.")),
    experts=(EXPERTS, FUSED),
)
