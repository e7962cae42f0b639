"""A family of models: the meaning of its `config.json`, and the tensors of its files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moejax.config.fields import fields, get_value, short
from moejax.config.load import from_dict
from moejax.config.pattern import ahead_parts, shortest
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.hf.families.experts import (
    has_dense_blocks,
    has_experts,
    shared_width,
    shortest_shared,
)
from moejax.hf.families.parts import NOISE, Always, Part, Same, Settings
from moejax.hf.rules import Rule

GELU = "gelu_pytorch_tanh"  # how files call it


def stated(settings: Settings) -> dict[str, Any]:
    """Returns the values that keys of any family have for a model.

    Args:
      settings: all settings of the model and its experts, by dotted name.
    """
    biases = settings["model.attention_bias"]
    keys = {
        "attention_bias": biases,
        "qkv_bias": biases,
        "mlp_bias": False,
        "clip_qkv": None,
        "hidden_activation": GELU if settings["model.activation"] == "geglu" else "silu",
        "use_qk_norm": settings["model.qk_norm"] != "none",
        "use_sliding_window": settings["model.sliding_window"] is not None,
        "sliding_window": settings["model.sliding_window"],
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": 0,
    }
    if settings["model.attention"] == "grouped":
        head = settings["model.head_width"]
        keys["partial_rotary_factor"] = (settings["model.rope_width"] or head) / head
    return keys | _stated_of_experts(settings) if has_experts(settings) else keys


def _stated_of_experts(settings: Settings) -> dict[str, Any]:
    """Returns the values of keys about experts and the blocks that have them."""
    # An expert's width, unless `shared_hidden` says another.
    shared = settings["moe.num_shared_experts"]
    keys = {
        "num_experts": settings["moe.num_experts"],
        "num_local_experts": settings["moe.num_experts"],
        "n_routed_experts": settings["moe.num_experts"],
        "moe_intermediate_size": settings["moe.expert_hidden"],
        "n_shared_experts": shared,
        "num_shared_experts": shared,
        "shared_expert_intermediate_size": shared_width(settings),
        "norm_topk_prob": settings["moe.router.renormalize"],
        "scoring_func": settings["moe.router.score"],
        "routed_scaling_factor": settings["moe.router.weight_scale"],
        "n_group": settings["moe.router.num_groups"],
        "topk_group": settings["moe.router.groups_per_token"],
        "router_jitter_noise": 0.0,
    }
    if not settings["model.layer_mlps"] and settings["model.moe_every"] == 1:
        keys |= {"first_k_dense_replace": settings["model.first_dense_layers"], "moe_layer_freq": 1}
        keys["decoder_sparse_step"] = 1
        keys["mlp_only_layers"] = list(range(settings["model.first_dense_layers"]))
    return keys


# Settings that no file of weights decides: how to train, and how to compute the same.
TRAINING = (
    "model.init_deviation",
    "model.dtype",
    "model.remat",
    "model.scan_layers",
    "model.layers_before_stages",
    "model.stage_chunks",
    "model.predict_ahead",
    "moe.capacity_factor",
    "moe.headroom",
    "moe.slots",
    "moe.slots_from",
    "moe.implementation",
    "moe.router.jitter",
    "moe.router.balance_loss",
    "moe.router.balance_over",
    "moe.router.z_loss",
    "moe.router.bias_update_rate",
    "moe.router.quantile_bins",
    "moe.router.forced",
)
# Keys of any model that do not change its logits.
ANYWHERE = (
    "_attn_implementation",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "eos_token_id",
    "ep_size",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "max_position_embeddings",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "use_cache",
)
# Keys that export writes by itself, or that say how weights are stored.
STORAGE = (
    "architectures",
    "dtype",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)
AHEAD = "num_mtp_layers"  # name of `Family.ahead` in transformers; one layer where it is missing
COMMON: tuple[Part, ...] = (
    Same("vocab_size", "model.vocab_size"),
    Same("hidden_size", "model.width"),
    Same("num_hidden_layers", "model.num_layers"),
    Same("num_attention_heads", "model.num_heads"),
    Same("rms_norm_eps", "model.norm_epsilon"),
    Same("tie_word_embeddings", "model.tie_embeddings", default=False),
    Same("initializer_range", "model.init_deviation", default=0.02),
    Always("hidden_act", "silu"),
    Always("attention_dropout", 0.0, advice=NOISE),
    Always("is_encoder_decoder", False, written=False),
)


IN_LANGUAGE_MODEL = (("model.language_model.", "model."),)


@dataclass(frozen=True)
class Around:
    """A model of images and texts that has a family's models inside; see `hf.text`.

    Attributes:
      name: its `model_type`.
      architecture: the class that transformers builds.
      prefixes: what names of the text model's tensors begin with, and what stands there in a text
        model by itself.
      others: pattern of the names of the other tensors, which are left out.
      keys: keys beside `text_config` that change nothing in texts.
    """

    name: str
    architecture: str
    prefixes: tuple[tuple[str, str], ...]
    others: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """A table between one family's files and our settings and parameters.

    Attributes:
      name: its name here, which is its `model_type` in files that are written.
      architecture: the class that transformers builds, which names it for certain.
      parts: parts of `config.json` besides the common ones.
      implied: settings that every model of the family has, without a key.
      unused: keys that do not change what the model computes; export copies them.
      rules: rules of tensors, without the experts' rules.
      experts: rules of experts, in each form that files have; the first is written. A dense model
        has one form, of no rules.
      model_types: other values of `model_type`.
      missing: values of missing keys whose part has no default.
      null: values of nulls by key; any other null of a key with a meaning is refused.
      common: parts that families share.
      ahead: key with the number of layers after the last that predict further tokens; "": none.
      ahead_tensors: pattern of the names of their tensors, where these are not of a layer; "": they
        are. Such layers are left out.
      around: a model of images and texts whose text model is of this family; None: there is none.
    """

    name: str
    architecture: str
    parts: tuple[Part, ...]
    rules: tuple[Rule, ...]
    experts: tuple[tuple[Rule, ...], ...] = ((),)
    implied: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    missing: Mapping[str, Any] = field(default_factory=dict)
    null: Mapping[str, Any] = field(default_factory=dict)
    common: tuple[Part, ...] = COMMON
    ahead: str = ""
    ahead_tensors: str = ""
    around: Around | None = None

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """All parts of `config.json`."""
        return (*self.common, *self.parts)

    @property
    def joined_experts(self) -> tuple[Rule, ...]:
        """The rules of experts in the last form that has those of a layer in one tensor."""
        joined = (form for form in self.experts if not any("{E}" in rule.theirs for rule in form))
        return list(joined)[-1]

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Returns whether a `config.json` is of this family."""
        named = config.get("architectures") or [self.architecture]
        kinds = (self.name, *self.model_types)
        return config.get("model_type") in kinds and named == [self.architecture]

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a `config.json`, by dotted name.

        Raises:
          InputError: for keys that are not known, and values that cannot be computed here.
        """
        config = self._completed(config)
        always = [part for part in self.all_parts if isinstance(part, Always)]
        refused = [text for part in always if (text := part.refusal(config))]
        settings = dict(self.implied)
        for part in self.all_parts:
            settings |= part.read(config)
        if not has_dense_blocks(settings):
            settings.pop("model.mlp_hidden", None)
        if not has_experts(settings):
            settings = {name: x for name, x in settings.items() if not name.startswith("moe.")}
        if settings.get("moe.router.num_groups", 1) == 1:
            settings.pop("moe.router.groups_per_token", None)
        refused += self._refused_others(config, settings)
        if refused:
            raise InputError(" ".join(refused))
        return settings

    def _completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a `config.json` with this family's values for missing keys and nulls.

        Raises:
          InputError: lists the nulls that stand for nothing.
        """
        counted = {self.ahead} - {""}
        for part in self.all_parts:
            said = isinstance(part, Same) and any(config.get(k) is not None for k in part.keys)
            # `Always` judges nulls; another name of a key may say its value.
            if not isinstance(part, Always) and not said:
                counted |= set(part.keys)
        counted -= set(self.null)
        nulls = [f"`{key}`" for key, value in config.items() if value is None and key in counted]
        if nulls:
            raise InputError(
                f"null stands for no value of {self.name}'s {', '.join(nulls)}, or for another "
                "than a missing key. Write the value into config.json."
            )
        means = self.null.get
        given = {key: means(key) if value is None else value for key, value in config.items()}
        return {**self.missing, **given}

    def _refused_others(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
        """Returns reasons to refuse keys without a part: unknown ones, and others' wrong values."""
        known = {key for part in self.all_parts for key in part.keys}
        known |= {*self.unused, *ANYWHERE, *STORAGE, *((self.ahead, AHEAD) if self.ahead else ())}
        others = {key: value for key, value in config.items() if key not in known}
        if not others:
            return []
        says, wrong = stated(flat_settings(from_settings(settings))), []
        for key in [key for key in others if key in says]:
            if not _equal(value := others.pop(key), says[key]):
                wrong.append(f"`{key}` is {short(value)}, {self.name} computes {short(says[key])}.")
        reasons = [*wrong, "Choose another model."] if wrong else []
        if others:
            listed = ", ".join(f"`{key}` = {short(value)}" for key, value in others.items())
            are, them = ("are keys", "them") if len(others) > 1 else ("is a key", "it")
            reasons.append(
                f"{listed} {are} whose meaning for {self.name} is not known here. Remove {them} "
                f"from config.json, if the model's logits do not depend on {them}."
            )
        return reasons

    def layers_ahead(self, config: Mapping[str, Any]) -> int:
        """Returns how many layers after the last predict further tokens."""
        if not self.ahead:
            return 0
        names = [name for name in (self.ahead, AHEAD) if name in config]
        layers = config[names[0]] if names else self.missing.get(self.ahead, 1)
        return layers if type(layers) is int else 0

    def write(self, cfg: Config, base: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the `config.json` of a model, without the dtype of its weights.

        Args:
          base: the `config.json` that its first weights came with; empty without one.
        Raises:
          InputError: names the settings for which this family has no key.
        """
        base = base if self.matches(base) else {}
        settings = flat_settings(cfg)
        config = {"architectures": [self.architecture], "model_type": self.name}
        config |= {key: base[key] for key in (*self.unused, *ANYWHERE) if key in base}
        for part in self.all_parts:
            config |= part.write(settings, base)
        if self.ahead:
            config[self.ahead] = settings["model.predict_ahead"]
        lost = differences(from_settings(self.read(config)), cfg)
        if lost:
            listed = ", ".join(f"`{name}` = {short(ours)}" for name, _, ours in lost)
            raise InputError(f"it has no key for {listed}")
        return config


def _equal(value: Any, known: Any) -> bool:
    """Returns whether two JSON values are equal; 1 is 1.0, but neither is true."""
    return value == known and isinstance(value, bool) == isinstance(known, bool)


def from_settings(settings: Mapping[str, Any]) -> Config:
    """Returns the config of settings by dotted name; others have their defaults.

    Raises:
      InputError: a value has a wrong type or range.
    """
    return from_dict(settings)  # which takes dotted names as well as groups


def flat_settings(cfg: Config) -> dict[str, Any]:
    """Returns the settings of the model and its experts, by dotted name."""
    names = [name for name in fields() if name.startswith(("model.", "moe."))]
    settings = {name: get_value(cfg, name) for name in names}
    head = settings["model.head_width"]
    # The same in two ways: all channels, and none named.
    if settings.get("model.attention") == "grouped" and settings.get("model.rope_width") == head:
        settings["model.rope_width"] = None
    if settings.get("model.value_width") == head:
        settings["model.value_width"] = None
    settings |= _shortest_full(settings)
    settings |= {f"model.{name}": value for name, value in shortest(cfg.model).items()}
    settings["model.ahead_block"] = ahead_parts(cfg.model)
    return settings | shortest_shared(cfg.moe.shared_width, cfg.moe.expert_hidden)


def _shortest_full(settings: Settings) -> dict[str, Any]:
    """Returns the settings of blocks without a window that are those of other blocks, as none."""
    usual = {"head_width": "head_width", "num_kv_heads": "num_kv_heads", "theta": "rope.theta"}
    own = {
        f"model.full_attention.{name}": None
        for name, other in usual.items()
        if settings[f"model.full_attention.{name}"] == settings[f"model.{other}"]
    }
    head = settings["model.full_attention.head_width"] or settings["model.head_width"]
    if settings["model.full_attention.turned_channels"] == head:
        own["model.full_attention.turned_channels"] = None
    return own


def differences(theirs: Config, ours: Config) -> list[tuple[str, Any, Any]]:
    """Returns (dotted name, value there, value here) of settings that change the result."""
    left, right = flat_settings(theirs), flat_settings(ours)
    unread = TRAINING if ours.model.predict_ahead else (*TRAINING, "model.ahead_block")
    return [
        (name, left[name], right[name])
        for name in left
        if name not in unread and left[name] != right[name]
    ]
