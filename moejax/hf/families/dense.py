"""Tables of families without experts; read `tables` first.

Sources: Llama team 2024 (Llama 3), Jiang et al. 2023 (Mistral), Qwen team 2024 and 2025.
"""

from moejax.hf.families.attention import KEY_VALUE_HEADS, BothBiases, HeadWidth
from moejax.hf.families.blocks import LayerTypes, OneWindow
from moejax.hf.families.experts import DenseHidden
from moejax.hf.families.family import Family
from moejax.hf.families.parts import Always
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import DENSE, GROUPED, NORMS, ROOT

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
