"""Parts of `config.json` about attention's heads, biases and norms."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families.parts import Config, Same, Settings, value_of, whole_number

# Keys of heads in layers without a window, and their width where a file does not say.
FULL, WIDE = ("global_head_dim", "num_global_key_value_heads"), 512
KEY_VALUE_HEADS = Same("num_key_value_heads", "model.num_kv_heads", like="num_attention_heads")


@dataclass(frozen=True)
class HeadWidth:
    """Channels of a head: by default, the width over the heads.

    Attributes:
      free: whether a model may say otherwise.
      multiple: whether the width is a multiple of the heads all the same (Llama).
      named: whether a file must name them: without transformers makes no model (Hunyuan).
    """

    free: bool = True
    multiple: bool = False
    named: bool = False
    keys: tuple[str, ...] = ("head_dim",)

    def read(self, config: Config) -> dict[str, Any]:
        head = whole_number(config, "head_dim") if self.named else head_width(config)
        heads = whole_number(config, "num_attention_heads")
        if not self.free and head * heads != config["hidden_size"]:
            raise InputError(
                f"`head_dim` is {head}. In this family it is `hidden_size` over "
                f"`num_attention_heads`, {config['hidden_size']} over {heads}. Correct config.json."
            )
        if self.multiple and config["hidden_size"] % heads:
            raise InputError(
                f"`hidden_size` is {config['hidden_size']}. In this family it is a multiple of "
                f"`num_attention_heads`, {heads}."
            )
        return {"model.head_width": head}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        width = settings["model.head_width"]
        if self.free:
            return {"head_dim": width}
        if width * settings["model.num_heads"] != settings["model.width"]:
            raise InputError(
                f"`model.head_width` is {width}. In this family it is `model.width` over "
                "`model.num_heads`"
            )
        return {}


def head_width(config: Config) -> int:
    """Returns the channels of a head: `head_dim`, else the width over the heads.

    Raises:
      InputError: if neither gives a number.
    """
    if config.get("head_dim") is not None:
        return whole_number(config, "head_dim")
    width, heads = whole_number(config, "hidden_size"), whole_number(config, "num_attention_heads")
    if width % heads:
        raise InputError(
            f"`hidden_size` is {width}, `num_attention_heads` is {heads}. Without `head_dim` the "
            "first must be a multiple of the second. Correct config.json."
        )
    return width // heads


@dataclass(frozen=True)
class BothBiases:
    """Biases of attention's four projections, all or none.

    Attributes:
      default: whether they are there where the key is missing.
    """

    default: bool = False
    keys: tuple[str, ...] = ("attention_bias",)

    def read(self, config: Config) -> dict[str, Any]:
        if not value_of(config, self.keys, self.default):
            return {"model.attention_bias": False}
        return {"model.attention_bias": True, "model.attention_output_bias": True}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        return {"attention_bias": settings["model.attention_bias"]}


@dataclass(frozen=True)
class LatentHeads:
    """Heads of latent attention: their plain, rotating and value channels."""

    form: str = "latent"  # model.attention
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
        plain, rotated, values = (whole_number(config, name) for name in self.keys[:3])
        heads = whole_number(config, "num_attention_heads")
        if config.get("num_key_value_heads") not in (None, heads):
            raise InputError(
                f"`num_key_value_heads` is {short(config['num_key_value_heads'])}. In latent "
                f"attention it is `num_attention_heads`, {heads}. Correct config.json."
            )
        return {
            "model.attention": self.form,
            "model.head_width": plain + rotated,
            "model.rope_width": rotated,
            "model.value_width": values,
            "model.kv_latent": whole_number(config, "kv_lora_rank"),
            "model.q_latent": config.get("q_lora_rank"),
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        if settings.get("model.attention") != self.form:
            raise InputError(f"`model.attention` is {settings.get('model.attention')}")
        rotated, head = settings["model.rope_width"], settings["model.head_width"]
        return {
            "qk_nope_head_dim": head - rotated,
            "qk_rope_head_dim": rotated,
            "v_head_dim": settings["model.value_width"] or head,
            "kv_lora_rank": settings["model.kv_latent"],
            "q_lora_rank": settings["model.q_latent"],
            "num_key_value_heads": settings["model.num_heads"],
        }


def latent_channels(config: Config) -> tuple[int, int]:
    """Returns the channels of a head that rotate in latent attention, and all of a head."""
    plain, rotated = (whole_number(config, name) for name in LatentHeads.keys[:2])
    return rotated, plain + rotated


@dataclass(frozen=True)
class HeadNorm:
    """Normalisation of queries and keys, each head by itself."""

    keys: tuple[str, ...] = ("use_qk_norm",)

    def read(self, config: Config) -> dict[str, Any]:
        return {"model.qk_norm": "head" if config.get("use_qk_norm", False) else "none"}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        if settings["model.qk_norm"] == "full":
            raise InputError("`model.qk_norm` is full. It normalises each head by itself")
        return {"use_qk_norm": settings["model.qk_norm"] == "head"}


@dataclass(frozen=True)
class ScoreScale:
    """The factor of attention's scores, where a file names it (Granite)."""

    keys: tuple[str, ...] = ("attention_multiplier",)

    def read(self, config: Config) -> dict[str, Any]:
        given = value_of(config, self.keys, 1.0)
        usual = given == head_width(config) ** -0.5
        return {"model.score_scale": None if usual else given}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        scale = settings["model.score_scale"]
        return {self.keys[0]: settings["model.head_width"] ** -0.5 if scale is None else scale}


@dataclass(frozen=True)
class RootScale:
    """Embeddings times the root of their width (Gemma).

    Attributes:
      keys: a key without which there is no such factor (AFMoE); (): it is always there.
    """

    keys: tuple[str, ...] = ()

    def read(self, config: Config) -> dict[str, Any]:
        on = not self.keys or value_of(config, self.keys, False)
        return {"model.embedding_scale": whole_number(config, "hidden_size") ** 0.5 if on else 1.0}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        scale, root = settings["model.embedding_scale"], settings["model.width"] ** 0.5
        if scale not in ((root, 1.0) if self.keys else (root,)):
            raise InputError(f"`model.embedding_scale` is {scale}. It is the width's root, {root}")
        return {key: scale == root for key in self.keys}


@dataclass(frozen=True)
class FullHeads:
    """Heads of blocks without a window (Gemma 4), named for all of them, or layer by layer."""

    keys: tuple[str, ...] = (
        "global_head_dim",
        "num_global_key_value_heads",
        "attention_k_eq_v",
        "per_layer_config",
    )

    def read(self, config: Config) -> dict[str, Any]:
        own = full_heads(config)
        own = {key: None if own[key] == config[key] else own[key] for key in own}
        return {
            "model.full_attention.head_width": own["head_dim"],
            "model.full_attention.num_kv_heads": own["num_key_value_heads"],
            "model.full_attention.keys_are_values": value_of(config, ("attention_k_eq_v",), False),
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        names = ("head_width", "num_kv_heads", "keys_are_values")
        width, heads, shared = (settings[f"model.full_attention.{name}"] for name in names)
        return {
            "global_head_dim": width or settings["model.head_width"],
            "num_global_key_value_heads": heads,
            "attention_k_eq_v": shared,
        }


def full_heads(config: Config) -> dict[str, int]:
    """Returns `head_dim` and `num_key_value_heads` of layers without a window (Gemma 4).

    Raises:
      InputError: if `per_layer_config`, which transformers writes, says anything else.
    """
    usual = {key: whole_number(config, key) for key in ("head_dim", "num_key_value_heads")}
    given, wide, heads = map(config.get, ("per_layer_config", *FULL))
    if given is None:
        own = {"head_dim": WIDE if wide is None else wide}
        if config.get("attention_k_eq_v") and heads is not None:
            own["num_key_value_heads"] = heads
        return _whole({**usual, **own})
    types = enumerate(config.get("layer_types") or ())
    full = sorted(str(index) for index, kind in types if kind == "full_attention")
    layers = list(given.values()) if isinstance(given, Mapping) else []
    own = layers[0] if layers and isinstance(layers[0], Mapping) else {}
    known = set(usual).issuperset(own) and all(layer == own for layer in layers)
    if not own or not known or sorted(map(str, given)) != full:
        raise InputError(
            f"`per_layer_config` is {short(given)}. moejax computes the same `head_dim` and "
            "`num_key_value_heads` in each layer with full_attention in `layer_types`, and no "
            "others. Choose another model."
        )
    if (wide, heads) != (None, None):
        raise InputError(
            f"`{FULL[0]}` or `{FULL[1]}` stands beside `per_layer_config`, and transformers reads "
            "the latter alone. Remove one of them from config.json."
        )
    return _whole({**usual, **own})


def _whole(numbers: dict[str, Any]) -> dict[str, int]:
    return {key: whole_number(numbers, key) for key in numbers}


@dataclass(frozen=True)
class WindowHeads:
    """Keys and values of blocks with a window, twice as many as in others (MiMo); their width."""

    keys: tuple[str, ...] = (
        "num_key_value_heads",
        "swa_num_key_value_heads",
        "v_head_dim",
        "swa_v_head_dim",
    )

    def read(self, config: Config) -> dict[str, Any]:
        full, near = whole_number(config, self.keys[0]), config.get(self.keys[1])
        if near not in (None, 2 * full):
            raise InputError(
                f"`{self.keys[1]}` is {short(near)}. transformers reads twice "
                f"`{self.keys[0]}`, {2 * full}. Choose another model."
            )
        return {
            "model.num_kv_heads": 2 * full,
            "model.full_attention.num_kv_heads": full,
            "model.full_attention.sinks": False,
            "model.value_width": value_of(config, self.keys[2:]),
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        near = settings["model.num_kv_heads"]
        width = settings["model.value_width"] or settings["model.head_width"]
        return dict(zip(self.keys, (near // 2, near, width, width), strict=True))


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
        given = {"attn_type_list": [1] * settings["model.num_layers"]}
        return given if "attn_type_list" in base else {}
