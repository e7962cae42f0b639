"""Mixtral (Jiang et al. 2024): `MixtralForCausalLM`."""

from moejax.hf.families.blocks import OneWindow
from moejax.hf.families.family import Family
from moejax.hf.families.parts import Always, Balance, HeadWidth, Implied, KeyValueHeads, Same
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import (
    GROUPED,
    NORMS,
    ROOT,
    experts,
    fused_experts,
    router,
)

MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    parts=(
        KeyValueHeads(),
        HeadWidth(),
        Rope(theta=1e6),
        OneWindow(),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_local_experts", "moe.num_experts", also=("num_experts",)),
        Implied((("moe.router.renormalize", True), ("model.moe_every", 1))),
        Always("router_jitter_noise", 0.0),
        Balance("choices"),
    ),
    missing={"num_key_value_heads": 8},
    null={"head_dim": None, "sliding_window": None, **POSITIONS},
    rules=(*ROOT, *NORMS, *GROUPED, *router("block_sparse_moe.")),
    experts=(
        experts("block_sparse_moe.", gate="w1", up="w3", down="w2"),
        fused_experts("block_sparse_moe."),
        fused_experts("mlp."),
    ),
)
