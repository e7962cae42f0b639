"""OLMoE (Muennighoff et al. 2024): `OlmoeForCausalLM`."""

from moejax.hf.families.family import Family
from moejax.hf.families.parts import (
    Always,
    Balance,
    BothBiases,
    HeadWidth,
    Implied,
    KeyValueHeads,
    Same,
)
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import EXPERTS, FUSED, GROUPED, NORMS, ROOT, router

OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    parts=(
        KeyValueHeads(),
        HeadWidth(free=False),
        Rope(),
        BothBiases(),
        Same("intermediate_size", "moe.expert_hidden"),
        Same("num_experts", "moe.num_experts", also=("num_local_experts",)),
        Same("norm_topk_prob", "moe.router.renormalize", default=False),
        Implied((("model.qk_norm", "full"), ("model.moe_every", 1))),
        Always("clip_qkv", None),
        Balance("one", default=0.01),
    ),
    null={"num_key_value_heads": None, **POSITIONS},
    rules=(*ROOT, *NORMS, *GROUPED, *router("mlp.")),
    experts=(EXPERTS, FUSED),
)
