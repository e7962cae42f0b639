"""Tables of families with linear attention, and how their files say which layers have it.

Read `tables` first. Sources: Qwen team 2025 (Qwen3-Next) and 2026 (Qwen3.5), Kimi Team 2025 (Kimi
Linear), NVIDIA 2025 (Nemotron-H, Nemotron 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moejax.config.fields import short
from moejax.config.pattern import layer_attention, shortest_attention, shortest_mlps
from moejax.errors import InputError
from moejax.hf.families.attention import KEY_VALUE_HEADS, HeadWidth, LatentHeads
from moejax.hf.families.blocks import FULL, LINEAR, MlpTypes, SparseStep, blocks_of
from moejax.hf.families.experts import (
    CHOICES,
    Balance,
    DenseHidden,
    Groups,
    SequenceBalance,
    SharedExpert,
)
from moejax.hf.families.family import COMMON, IN_LANGUAGE_MODEL, Around, Family
from moejax.hf.families.latent import NULLS
from moejax.hf.families.parts import (
    NOISE,
    PAPER,
    Always,
    Config,
    Same,
    Settings,
    Twice,
    value_of,
    whole_number,
)
from moejax.hf.families.rope import POSITIONS, Rope
from moejax.hf.families.tensors import (
    AHEAD_OF_NEMOTRON,
    AHEAD_OF_QWEN,
    DELTA,
    DELTA_APART,
    DENSE,
    EXPERTS_OF_QWEN,
    GATED,
    KIMI,
    KIMI_EXPERTS,
    NEMOTRON_H_TENSORS,
    NORMS,
    ROOT,
    SHARED_EXPERT,
    UNGATED_EXPERTS,
    UNPAIRED,
    of_blocks,
    router,
    selection_bias,
)


@dataclass(frozen=True)
class LinearTypes:
    """Linear attention in some blocks, which `layer_types` lists, or all but each n-th.

    Attributes:
      form: value of `model.linear.form`.
      every: n, where the file does not say.
    """

    form: str
    every: int = 4
    keys: tuple[str, ...] = ("layer_types", "full_attention_interval")

    def read(self, config: Config) -> dict[str, Any]:
        layers, given = whole_number(config, "num_hidden_layers"), config.get("layer_types")
        if given is None:
            every = whole_number({"full_attention_interval": self.every, **config}, self.keys[1])
            given = [LINEAR if (index + 1) % every else FULL for index in range(layers)]
        if (
            not isinstance(given, Sequence)
            or len(given) != layers
            or not {FULL, LINEAR}.issuperset(given)
            or LINEAR not in given
        ):
            raise InputError(
                f"`layer_types` is {short(given)}. It must say {LINEAR} or {FULL} for each of "
                f"{layers} layers, and {LINEAR} for some. Correct config.json."
            )
        sees = tuple("full" if kind == FULL else "linear" for kind in given)
        found = {f"model.{key}": value for key, value in shortest_attention(sees, None).items()}
        return {"model.linear.form": self.form, **found}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        if settings["model.linear.form"] != self.form:
            raise InputError(f"`model.linear.form` is {settings['model.linear.form']}")
        cfg = blocks_of(settings)
        given = {key: base[key] for key in self.keys if key in base}
        if given and blocks_of({**settings, **self.read(base)}) == cfg:
            return given  # two files may say the same
        return {
            "layer_types": [FULL if seen == "full" else LINEAR for seen in layer_attention(cfg)]
        }


# Attention and MLP of a layer's kinds, their signs in a pattern, and older names (Nemotron-H).
ALONE = {
    LINEAR: ("linear", "none"),
    FULL: ("full", "none"),
    "moe": ("none", "experts"),
    "mlp": ("none", "dense"),
}
SIGNS = dict(zip(ALONE, "M*E-", strict=True))
OLDER = {"mamba": LINEAR, "attention": FULL}


@dataclass(frozen=True)
class PartsAlone:
    """Layers that are attention, an MLP or experts alone, by a list of names or a text of signs.

    Attributes:
      form: value of `model.linear.form`, which some layers have.
    """

    form: str
    keys: tuple[str, ...] = (
        "layers_block_type",
        "layer_types",
        "hybrid_override_pattern",
        "num_hidden_layers",
    )

    def read(self, config: Config) -> dict[str, Any]:
        names, pattern = value_of(config, self.keys[:2], None), config.get(self.keys[2])
        kinds: list[Any] = _kinds_of(pattern)
        if names is not None:
            given = names if isinstance(names, list) else []
            kinds = [OLDER.get(str(name), name) for name in given]
        if not all(kind in tuple(ALONE) for kind in kinds) or LINEAR not in kinds:
            raise InputError(
                f"`layers_block_type` is {short(names)}, `hybrid_override_pattern` is "
                f"{short(pattern)}. One must say {', '.join(ALONE)} (M, *, E, -) for each layer, "
                f"and {LINEAR} for some. Correct config.json."
            )
        layers = config.get("num_hidden_layers", len(kinds))
        if layers != len(kinds) or (pattern is not None and kinds != _kinds_of(pattern)):
            raise InputError(
                f"keys disagree: `num_hidden_layers` is {short(layers)}, `layers_block_type` has "
                f"{len(kinds)} layers, `hybrid_override_pattern` is {short(pattern)}. Code of "
                "different authors reads one or the other. Correct config.json."
            )
        sees, mlps = zip(*(ALONE[kind] for kind in kinds), strict=True)
        found = shortest_attention(sees, None) | shortest_mlps(mlps)
        balance = {
            "moe.router.balance_loss": PAPER * mlps.count("experts"),
            "moe.router.balance_over": "sequence",
        }
        return {
            "model.num_layers": len(kinds),
            "model.linear.form": self.form,
            **{f"model.{name}": value for name, value in found.items()},
            **balance,
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        if settings["model.linear.form"] != self.form:
            raise InputError(f"`model.linear.form` is {settings['model.linear.form']}")
        cfg, names = blocks_of(settings), {parts: name for name, parts in ALONE.items()}
        parts = list(zip(layer_attention(cfg), cfg.mlps, strict=True))
        if not set(names).issuperset(parts):
            raise InputError(
                "`model.layer_attention` and `model.layer_mlps`: a layer does not have attention, "
                "an MLP or experts alone"
            )
        kinds = [names[own] for own in parts]
        return {
            "layers_block_type": kinds,
            "hybrid_override_pattern": "".join(SIGNS[kind] for kind in kinds),
            "num_hidden_layers": len(kinds),
        }


def _kinds_of(pattern: Any) -> list[str]:
    """Returns the kinds of layers of a text of signs; of anything else none."""
    kinds = {sign: kind for kind, sign in SIGNS.items()}
    return [kinds.get(sign, sign) for sign in pattern] if isinstance(pattern, str) else []


@dataclass(frozen=True)
class KimiLayers:
    """Linear attention in some blocks, by `layer_types` or by the lists of `linear_attn_config`.

    Layers are counted from 1 in the lists. Sizes stand beside either.
    """

    keys: tuple[str, ...] = (
        "layer_types",
        "linear_attn_config",
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
    )
    types = LinearTypes("kimi_delta")

    def read(self, config: Config) -> dict[str, Any]:
        inside = config.get("linear_attn_config", {})
        names = dict(zip(INSIDE, self.keys[2:], strict=True))
        if not isinstance(inside, Mapping) or not {*LISTS, *names}.issuperset(inside):
            raise InputError(
                f"`linear_attn_config` is {short(inside)}. moejax knows {', '.join(LISTS)}, "
                f"{', '.join(names)} in it. Choose another model, or remove what changes nothing."
            )
        sizes = [
            value_of({key: inside.get(key), name: config.get(name)}, (name, key), default)
            for (key, name), default in zip(names.items(), (128, 32, 4), strict=True)
        ]
        width, heads, convolution = sizes
        return {
            **self.types.read({**config, "layer_types": _kimi_types(config, inside)}),
            **dict.fromkeys(("model.linear.key_heads", "model.linear.value_heads"), heads),
            **dict.fromkeys(("model.linear.key_width", "model.linear.value_width"), width),
            "model.linear.convolution": convolution,
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        (types,) = self.types.write(settings, {}).values()
        linear = {name: settings[f"model.linear.{name}"] for name in ("key_width", "key_heads")}
        sizes = (*linear.values(), settings["model.linear.convolution"])
        lists = [[i for i, t in enumerate(types, 1) if t == kind] for kind in (FULL, LINEAR)]
        # In both forms: that of the authors' code, and that of transformers.
        inside = dict(zip((*LISTS, *INSIDE), (*lists, *sizes), strict=True))
        return dict(zip(self.keys, (types, inside, *sizes), strict=True))


LISTS = ("full_attn_layers", "kda_layers")
INSIDE = ("head_dim", "num_heads", "short_conv_kernel_size")


def _kimi_types(config: Config, inside: Mapping[str, Any]) -> list[str]:
    """Returns the type of each layer; without a list as transformers has them.

    Raises:
      InputError: if lists are not of these layers, or disagree.
    """
    layers, given = whole_number(config, "num_hidden_layers"), config.get("layer_types")
    if set(LISTS).isdisjoint(inside):
        default = [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
        return default if given is None else given
    full, linear = (inside.get(name, []) for name in LISTS)
    places = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    each = list(range(1, layers + 1))
    once = all(type(place) is int for place in places) and sorted(places) == each
    found = [FULL if place in full else LINEAR for place in each] if once else []
    if not once or given not in (None, found):
        raise InputError(
            f"`linear_attn_config` has layers {short(full)} and {short(linear)}, `layer_types` is "
            f"{short(given)}. They must name each of {layers} layers once, counted from 1, and "
            "agree. Correct config.json."
        )
    return found


DELTA_NET = (
    CHOICES,
    KEY_VALUE_HEADS,
    HeadWidth(),
    LinearTypes("gated_delta"),
    SharedExpert(),
    Same("linear_num_key_heads", "model.linear.key_heads"),
    Same("linear_num_value_heads", "model.linear.value_heads"),
    Same("linear_key_head_dim", "model.linear.key_width"),
    Same("linear_value_head_dim", "model.linear.value_width"),
    Same("linear_conv_kernel_dim", "model.linear.convolution"),
    Same("moe_intermediate_size", "moe.expert_hidden"),
    Same("num_experts", "moe.num_experts", also=("num_local_experts",)),
    Always("attention_bias", False),
    Balance("choices"),
)
WITH_DELTA_NET = {
    "model.ahead_block": ("full", "experts"),
    "model.qk_norm": "head",
    "model.attention_gate": True,
    "model.zero_centered_norms": True,
}
SIZES_OF_DELTA_NET = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    parts=(
        *DELTA_NET,
        Rope(partial="partial_rotary_factor", rotated=0.25),
        SparseStep(),
        DenseHidden(),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
    ),
    implied=WITH_DELTA_NET,
    missing=SIZES_OF_DELTA_NET,
    null={"mlp_only_layers": None, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *of_blocks("grouped", GATED),
        *of_blocks("gated_delta", DELTA),
        *DENSE,
        *router("mlp."),
        *SHARED_EXPERT,
        *AHEAD_OF_QWEN,
    ),
    experts=EXPERTS_OF_QWEN,
    ahead_tensors=r"mtp\..+",
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    parts=(
        *DELTA_NET,
        Rope(partial="partial_rotary_factor", rotated=0.25, sections=True),
        Always("attn_output_gate", True),
    ),
    implied={**WITH_DELTA_NET, "moe.router.renormalize": True, "model.moe_every": 1},
    unused=("mtp_use_dedicated_embeddings", "mamba_ssm_dtype"),
    missing=SIZES_OF_DELTA_NET,
    null={"mtp_num_hidden_layers": 0, **POSITIONS},
    rules=(
        *ROOT,
        *NORMS,
        *of_blocks("grouped", GATED),
        *of_blocks("gated_delta", DELTA_APART),
        *router("mlp."),
        *SHARED_EXPERT,
        *AHEAD_OF_QWEN,
    ),
    experts=EXPERTS_OF_QWEN,
    ahead="mtp_num_hidden_layers",
    ahead_tensors=r"mtp\..+",
    around=Around(
        name="qwen3_5_moe",
        architecture="Qwen3_5MoeForConditionalGeneration",
        prefixes=IN_LANGUAGE_MODEL,
        others=r"model\.visual\..+",
        keys=(
            "vision_config",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
            "language_model_only",
        ),
    ),
)

KIMI_LINEAR = Family(
    name="kimi_linear",
    architecture="KimiLinearForCausalLM",
    parts=(
        LatentHeads(),
        KimiLayers(),
        MlpTypes(counts=True),
        DenseHidden(),
        SequenceBalance(default=PAPER),
        Groups(count="num_expert_group"),
        Same("num_experts_per_token", "moe.experts_per_token"),
        Same("num_experts", "moe.num_experts"),
        Same("num_shared_experts", "moe.num_shared_experts", positive=True),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Same("moe_renormalize", "moe.router.renormalize", default=True),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=2.446),
        Always("attention_bias", False),
        Always("mla_use_nope", True),
        Always("moe_layer_freq", 1),
        Always("num_nextn_predict_layers", 0),
        Always("moe_router_activation_func", "sigmoid"),
        Always("use_grouped_topk", True),
    ),
    implied={"model.positions": "none", "moe.router.score": "sigmoid"},
    unused=("head_dim", "model_max_length", "rope_scaling", "rope_theta"),  # nothing rotates
    missing={
        "num_expert_group": 1,
        "num_key_value_heads": 32,
        "num_shared_experts": 1,
        "topk_group": 1,
    },
    null={**NULLS, "mlp_layer_types": None},
    rules=(
        *ROOT,
        *NORMS,
        *of_blocks("latent", UNPAIRED),
        *of_blocks("kimi_delta", KIMI),
        *router("block_sparse_moe."),
        *selection_bias("block_sparse_moe.gate.e_score_correction_bias"),
    ),
    experts=KIMI_EXPERTS,
)

_OTHERWISE = {"num_hidden_layers", "rms_norm_eps", "tie_word_embeddings", "hidden_act"}

NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    parts=(
        CHOICES,
        KEY_VALUE_HEADS,
        HeadWidth(),
        PartsAlone("mamba2"),
        DenseHidden(),
        SharedExpert(keys=("moe_shared_expert_intermediate_size",), gate=False),
        Groups(),
        Twice("layer_norm_epsilon", "model.norm_epsilon", default=1e-5, also=("norm_eps",)),
        Same("n_groups", "model.linear.key_heads"),
        Same("ssm_state_size", "model.linear.key_width"),
        Same("mamba_num_heads", "model.linear.value_heads"),
        Same("mamba_head_dim", "model.linear.value_width"),
        Same("conv_kernel", "model.linear.convolution"),
        Same("use_conv_bias", "model.linear.convolution_bias", default=True),
        Same("time_step_min", "model.linear.least_step", default=0.001),
        Same("n_routed_experts", "moe.num_experts", also=("num_local_experts",)),
        Same("moe_intermediate_size", "moe.expert_hidden"),
        Same("moe_latent_size", "moe.latent", default=None),
        Same("norm_topk_prob", "moe.router.renormalize", default=True),
        Same("routed_scaling_factor", "moe.router.weight_scale", default=1.0),
        # transformers has one shared expert, and ties nothing, whatever the file says.
        Always("n_shared_experts", 1),
        Always("tie_word_embeddings", False),
        Always("mlp_hidden_act", "relu2"),
        Always("mamba_hidden_act", "silu"),
        Always("attention_bias", False),
        Always("mamba_proj_bias", False),
        Always("mlp_bias", False),
        Always("use_bias", False),
        Always("residual_in_fp32", False),
        Always("sliding_window", None),
        Always("hidden_dropout", 0.0, advice=NOISE),
    ),
    common=tuple(part for part in COMMON if _OTHERWISE.isdisjoint(part.keys)),
    implied={
        "model.ahead_block": ("full", "experts"),
        "model.positions": "none",
        "model.activation": "relu2",
        "model.tie_embeddings": False,
        "moe.router.score": "sigmoid",
    },
    unused=(
        "chunk_size",
        "expand",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
        "num_logits_to_keep",
        "partial_rotary_factor",
        "rescale_prenorm_residual",
        "rope_theta",
        "time_step_floor",
        "time_step_limit",
        "time_step_max",
        "use_mamba_kernels",
    ),
    missing={
        "conv_kernel": 4,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 8,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 0,
        "ssm_state_size": 128,
        "topk_group": 1,
    },
    null={"moe_latent_size": None},
    rules=(*NEMOTRON_H_TENSORS, *AHEAD_OF_NEMOTRON),
    experts=UNGATED_EXPERTS,
    ahead="num_nextn_predict_layers",
    ahead_tensors=r"mtp\..+",
)
