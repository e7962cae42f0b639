"""DeepSeek-V2 and DeepSeek-V3 (DeepSeek-AI 2024), with Kimi-K2 and Moonlight (V3 models)."""

from dataclasses import dataclass
from typing import Any

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families.blocks import FirstDense
from moejax.hf.families.family import Family
from moejax.hf.families.parts import (
    Always,
    Config,
    DenseHidden,
    Implied,
    Same,
    Settings,
    Unused,
    value_of,
    whole_number,
)
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import (
    AHEAD,
    DENSE,
    EXPERTS,
    FUSED,
    LATENT,
    NORMS,
    ROOT,
    SHARED,
    router,
    selection_bias,
)

PAPER = 0.0001  # DeepSeek-V3 (2024), section 4.2: balance factor of each sequence and layer


@dataclass(frozen=True)
class LatentHeads:
    """Heads of latent attention: their plain, rotating and value channels."""

    keys: tuple[str, ...] = (
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "kv_lora_rank",
        "q_lora_rank",
        "num_key_value_heads",
        "qk_head_dim",
        "head_dim",
    )

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings."""
        plain, rotated, values = (whole_number(config, name) for name in self.keys[:3])
        heads = whole_number(config, "num_attention_heads")
        if config.get("num_key_value_heads") not in (None, heads):
            raise InputError(
                f"`num_key_value_heads` is {short(config['num_key_value_heads'])}. In latent "
                f"attention it is `num_attention_heads`, {heads}. Correct config.json."
            )
        return {
            "model.attention": "latent",
            "model.head_width": plain + rotated,
            "model.rope_width": rotated,
            "model.value_width": values,
            "model.kv_latent": whole_number(config, "kv_lora_rank"),
            "model.q_latent": config.get("q_lora_rank"),
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the keys."""
        if settings.get("model.attention") != "latent":
            raise InputError("`model.attention` is grouped")
        rotated, head = settings["model.rope_width"], settings["model.head_width"]
        return {
            "qk_nope_head_dim": head - rotated,
            "qk_rope_head_dim": rotated,
            "v_head_dim": settings["model.value_width"] or head,
            "kv_lora_rank": settings["model.kv_latent"],
            "q_lora_rank": settings["model.q_latent"],
            "num_key_value_heads": settings["model.num_heads"],
        }


@dataclass(frozen=True)
class SharedExperts:
    """Experts that every token visits: their number."""

    keys: tuple[str, ...] = ("n_shared_experts",)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the setting."""
        return {"moe.num_shared_experts": whole_number(config, "n_shared_experts")}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        count = settings["moe.num_shared_experts"]
        if not count:
            raise InputError("`moe.num_shared_experts` is 0. It has at least one")
        return {"n_shared_experts": count}


@dataclass(frozen=True)
class Groups:
    """Groups of experts; a token chooses some of them.

    Attributes:
      switch: whether the key `topk_method` turns groups on (DeepSeek-V2).
    """

    switch: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys."""
        return ("n_group", "topk_group", *(("topk_method",) if self.switch else ()))

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings."""
        if self.switch:
            method = value_of(config, ("topk_method",), "greedy")
            if method == "greedy":
                return {"moe.router.num_groups": 1}
            if method != "group_limited_greedy":
                raise InputError(
                    f"`topk_method` is {short(method)}. moejax computes greedy and "
                    "group_limited_greedy. Choose another model."
                )
        return {
            "moe.router.num_groups": value_of(config, ("n_group",)),
            "moe.router.groups_per_token": value_of(config, ("topk_group",)),
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the keys."""
        groups, chosen = (
            settings[f"moe.router.{name}"] for name in ("num_groups", "groups_per_token")
        )
        keys = {"n_group": groups, "topk_group": chosen}
        if self.switch:
            keys["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
        return keys


@dataclass(frozen=True)
class SequenceBalance:
    """The loss that balances experts in each sequence and layer; here a mean over layers.

    Attributes:
      default: coefficient where the file names none.
    """

    default: float
    keys: tuple[str, ...] = ("aux_loss_alpha", "seq_aux")

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings."""
        alpha = value_of(config, ("aux_loss_alpha",), self.default)
        layers = whole_number(config, "num_hidden_layers")
        span = "sequence" if value_of(config, ("seq_aux",), True) else "batch"
        dense = value_of(config, ("first_k_dense_replace",))
        return {
            "moe.router.balance_loss": alpha * max(0, layers - dense),
            "moe.router.balance_over": span,
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the keys."""
        layers = settings["model.num_layers"] - settings["model.first_dense_layers"]
        alpha = float(f"{settings['moe.router.balance_loss'] / layers:.12g}")
        return {
            "aux_loss_alpha": alpha,
            "seq_aux": settings["moe.router.balance_over"] == "sequence",
        }


MLA = (
    LatentHeads(),
    SharedExperts(),
    DenseHidden(),
    Rope(latent=True),
    Same("n_routed_experts", "moe.num_experts", also=("num_local_experts", "num_experts")),
    Same("moe_intermediate_size", "moe.expert_hidden"),
    Always("attention_bias", False),
    Always("moe_layer_freq", 1),
)

# Heads that follow from others, and queries that are projected directly.
NULLS = dict.fromkeys(("head_dim", "num_key_value_heads", "q_lora_rank", "qk_head_dim"), None)
NULLS |= POSITIONS

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    parts=(
        *MLA,
        FirstDense(),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
        Groups(switch=True),
        SequenceBalance(default=0.001),
        Implied((("moe.router.renormalize", False),)),
        # DeepSeek's code does not scale weights that it normalises, transformers ignores the key.
        Always("norm_topk_prob", False, others=(None,)),
        Always("scoring_func", "softmax"),
        Always("mlp_bias", False),
    ),
    missing={"q_lora_rank": 1536, "first_k_dense_replace": 0},
    null={**NULLS, "n_group": None, "topk_group": None},
    rules=(*ROOT, *NORMS, *LATENT, *DENSE, *SHARED, *router("mlp.")),
    experts=(EXPERTS, FUSED),
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_types=("kimi_k2",),
    parts=(
        *MLA,
        FirstDense(),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=2.5),
        Groups(),
        SequenceBalance(default=PAPER),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
        Implied((("moe.router.score", "sigmoid"),)),
        Always("topk_method", "noaux_tc"),
        Always("scoring_func", "sigmoid"),
        Always("rope_interleave", True),
        Unused(("num_mtp_layers",)),
    ),
    missing={
        "first_k_dense_replace": 3,
        "n_group": 8,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "topk_group": 4,
    },
    null={**NULLS, "norm_topk_prob": False, "num_nextn_predict_layers": 0},
    rules=(
        *ROOT,
        *NORMS,
        *LATENT,
        *DENSE,
        *SHARED,
        *router("mlp."),
        *selection_bias("mlp.gate.e_score_correction_bias"),
        *AHEAD,
    ),
    experts=(EXPERTS, FUSED),
    ahead="num_nextn_predict_layers",
)
