"""Rotary positions in `config.json`: `rope_theta` with `rope_scaling`, or `rope_parameters`.

Transformers 5 writes one object `rope_parameters`; older files have two keys, which every version
reads, so those are written.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families.attention import full_heads, head_width, latent_channels
from moejax.hf.families.parts import Config, Settings, value_of

NUMBERS = (int, float)
POSITIONS = {"rope_scaling": None, "rope_parameters": None}  # nulls that families read as missing
# Nulls inside these objects, read as missing.
NULLS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Keys of each kind of scaling, besides those of any kind.
ANY = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
SECTIONS = ("mrope_section", "mrope_interleaved")
LENGTH = "original_max_position_embeddings"
STRETCHED = ("factor", LENGTH)
KINDS = {
    "default": (),
    "linear": STRETCHED,
    "llama3": (*STRETCHED, "low_freq_factor", "high_freq_factor"),
    "yarn": (*STRETCHED, "truncate", *NULLS),
}
# Kinds of positions in blocks without a window, where others have one.
TURNED = {"default": (), "proportional": ("partial_rotary_factor", "factor")}
FULL_ROPE = ("head_width", "theta", "turned_channels")
# Settings below `model.rope` whose keys have another name.
RENAMED = {
    LENGTH: "trained_length",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
      theta: base of the frequencies where the file names none.
      partial: key that says how many channels rotate; "": all do.
      rotated: share of a head's channels that rotate where the file does not say.
      latent: whether `mscale_all_dim` scales attention's scores too (DeepSeek).
      named: whether a file must say how positions scale: a missing key would mean a default.
      sections: whether a file may share channels out to places in images (Qwen3.5), which changes
        nothing where there is text alone.
    """

    theta: float = 10_000.0
    partial: str = ""
    rotated: float = 1.0
    latent: bool = False
    named: bool = False
    sections: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        partial = (self.partial, "partial_rotary_factor") if self.partial else ()
        return ("rope_theta", "rope_scaling", "rope_parameters", *partial)

    def read(self, config: Config) -> dict[str, Any]:
        given = self._scaling(config)
        if self.sections:
            given = {key: x for key, x in given.items() if key not in SECTIONS or x is None}
        kind = given.get("rope_type") or given.get("type") or "default"
        if kind not in KINDS:
            raise InputError(
                f"positions scale by {short(kind)} (`rope_scaling`). moejax computes "
                f"{', '.join(KINDS)}. Choose a model with one of them."
            )
        for key in given:
            if given[key] is None and key not in NULLS:
                raise InputError(
                    f"`{key}` of `rope_scaling` is null, which stands for no value. Correct "
                    "config.json."
                )
            if key not in ANY + KINDS[kind]:
                raise InputError(
                    f"`rope_scaling` of kind {kind} has `{key}` = {short(given[key])}, whose "
                    "meaning is not known here. Remove it, if it changes nothing."
                )
        theta = given.get("rope_theta") or config.get("rope_theta") or self.theta
        return {
            "model.rope.theta": theta,
            **self._rotated(config, given),
            **_read_kind(kind, given, config, latent=self.latent),
        }

    def _scaling(self, config: Config) -> Mapping[str, Any]:
        both = [config.get(name) for name in ("rope_scaling", "rope_parameters")]
        given = [value for value in both if value]
        if any(not isinstance(value, Mapping) for value in given) or len(given) > 1:
            raise InputError(
                "`rope_scaling` and `rope_parameters` must be one object, of one of the two names. "
                "Correct config.json."
            )
        if not given and self.named:
            raise InputError(
                "`rope_scaling` is missing. Without it transformers would assume a scaling. Write "
                "it into config.json."
            )
        return given[0] if given else {}

    def _rotated(self, config: Config, given: Mapping[str, Any]) -> dict[str, Any]:
        share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if not self.partial:
            if share not in (None, 1, 1.0):
                raise InputError(
                    f"`partial_rotary_factor` is {short(share)}. In this family all channels of a "
                    "head rotate. Correct config.json."
                )
            return {}
        head = head_width(config)
        named = config.get("rotary_dim") if self.partial == "rotary_dim" else None
        if share is None:
            share = self.rotated if named is None else named / head
        if type(share) not in NUMBERS or not 0 < share <= 1:
            raise InputError(
                f"{short(share)} of a head's channels would rotate. It must be above 0 and at "
                "most 1. Correct `partial_rotary_factor` in config.json."
            )
        rotated = int(head * share) if named is None else named
        if rotated != int(head * share):
            raise InputError(
                f"keys disagree: `rotary_dim` is {short(named)}, `partial_rotary_factor` is "
                f"{share} of {head}. They are one number. Correct config.json."
            )
        return {} if rotated == head else {"model.rope_width": rotated}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        scaling = _write_kind(settings, latent=self.latent)
        if scaling is None and self.named:
            scaling = {"rope_type": "default"}
        keys: dict[str, Any] = {
            "rope_theta": settings["model.rope.theta"],
            "rope_scaling": scaling,
        }
        width = settings.get("model.rope_width")
        if not self.partial:
            if width is not None and not self.latent:
                raise InputError(f"`model.rope_width` is {width}, but here all channels rotate")
            key = "partial_rotary_factor"
            return {**keys, key: 1.0} if key in base else keys
        head = settings["model.head_width"]
        rotated = head if width is None else width
        if self.partial == "rotary_dim":
            return {**keys, "rotary_dim": rotated}
        return {**keys, self.partial: _share(rotated, head)}


@dataclass(frozen=True)
class AlphaRope(Rope):
    """Rotary positions whose base a fixed `alpha` stretches (Hunyuan).

    Files call it `dynamic`, but nothing of it depends on the length of a text.
    """

    def read(self, config: Config) -> dict[str, Any]:
        given = self._scaling(config)
        kind, alpha = given.get("rope_type") or given.get("type"), given.get("alpha")
        if kind != "dynamic" or not alpha:
            return super().read(config)
        if type(alpha) not in NUMBERS or alpha <= 0:
            raise InputError(
                f"`alpha` of `rope_scaling` is {short(alpha)}. It must be a number above 0. "
                "Correct config.json."
            )
        _number(given, "factor")  # means nothing, but transformers asks for it
        head = head_width(config)
        theta = given.get("rope_theta") or config.get("rope_theta") or self.theta
        return {"model.rope.theta": theta * alpha ** (head / (head - 2))}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        own = {key: base[key] for key in self.keys if key in base}
        plain = settings["model.rope.scaling"] == "none" and self._scaling(base).get("alpha")
        if plain and self.read(base)["model.rope.theta"] == settings["model.rope.theta"]:
            return {"rope_scaling": None} | own  # the same base may be said in two ways
        return super().write(settings, base)


@dataclass(frozen=True)
class GrowingRope(Rope):
    """Rotary positions of latent attention, with a factor on queries that grows (Mistral 4).

    All is in `rope_parameters`, of kind yarn: of others transformers takes the channels that rotate
    to be all of a head.
    """

    growth: str = "llama_4_scaling_beta"

    def read(self, config: Config) -> dict[str, Any]:
        if config.get("rope_scaling") is not None:
            raise InputError("`rope_scaling` is not read here. Name it `rope_parameters`.")
        given = dict(self._scaling(config))
        growth, length = _number(given, self.growth), given.get(LENGTH)
        if type(length) is not int or growth < 0:
            raise InputError(
                f"`{LENGTH}` is {short(length)}, `{self.growth}` is {short(growth)}. Queries grow "
                "by both: an integer, and a number of at least 0. Correct config.json."
            )
        if (kind := given.get("rope_type", given.get("type"))) != "yarn":
            raise InputError(
                f"positions scale by {short(kind)} (`rope_parameters`). In this family they scale "
                "by yarn. Correct config.json."
            )
        own = (self.growth, "max_position_embeddings")
        given = {key: x for key, x in given.items() if key not in own}
        rotated, head = latent_channels(config)
        share = given.pop("partial_rotary_factor", rotated / head)
        if type(share) not in NUMBERS or int(head * share) != rotated:
            raise InputError(
                "keys disagree: `partial_rotary_factor` is not the share of `qk_rope_head_dim`, "
                f"{rotated} of {head}. Correct config.json."
            )
        settings = super().read({**config, "rope_parameters": given})
        grows = {"model.rope.query_growth": growth, "model.rope.trained_length": length}
        return settings | (grows if growth else {})

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        keys, head = super().write(settings, base), settings["model.head_width"]
        own = {
            LENGTH: settings["model.rope.trained_length"],
            self.growth: settings["model.rope.query_growth"],
            "partial_rotary_factor": _share(settings["model.rope_width"], head),
        }
        scaling, theta = keys["rope_scaling"], keys["rope_theta"]
        if settings["model.rope.scaling"] == "none":
            scaling = {"rope_type": "yarn", "type": "yarn", "factor": 1.0}
        return {"rope_parameters": {"rope_theta": theta, **scaling, **own}}


@dataclass(frozen=True)
class TwoRopes:
    """Rotary positions of blocks with a window, and of those without (Gemma 4).

    In the latter some pairs of a whole head may turn (`proportional`).

    Attributes:
      thetas: bases where the file has no such object.
      share: share of a head's pairs that turn without one.
    """

    thetas: tuple[float, float] = (10_000.0, 1_000_000.0)
    share: float = 0.25
    keys: tuple[str, ...] = ("rope_parameters",)

    def read(self, config: Config) -> dict[str, Any]:
        given = config.get("rope_parameters")
        if given is None:
            given = self._said(self.thetas, self.share)
        given = _of_both(given)
        near = _kind_of(given, "sliding_attention", {"default": ()})
        far = _kind_of(given, "full_attention", TURNED)
        share = far.get("partial_rotary_factor", 1.0)
        head = full_heads(config)["head_dim"]
        turned = 2 * int(share * head // 2) if type(share) in NUMBERS and share <= 1 else 0
        if turned < 2 or far.get("factor", 1) != 1:
            raise InputError(
                f"`rope_parameters` of full_attention are {short(dict(far))}. moejax computes a "
                "`partial_rotary_factor` at which some pair turns, and a `factor` of 1. Choose "
                "another model."
            )
        thetas = _number(near, "rope_theta"), _number(far, "rope_theta")
        return {
            "model.rope.theta": thetas[0],
            "model.full_attention.theta": None if thetas[0] == thetas[1] else thetas[1],
            "model.full_attention.turned_channels": None if turned == head else turned,
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        own = {name: settings[f"model.full_attention.{name}"] for name in FULL_ROPE}
        head = own["head_width"] or settings["model.head_width"]
        theta, turned = settings["model.rope.theta"], own["turned_channels"] or head
        share = turned / head
        share = share if 2 * int(share * head // 2) == turned else (turned + 0.5) / head
        return {"rope_parameters": self._said((theta, own["theta"] or theta), share)}

    def _said(self, thetas: tuple[float, float], share: float) -> dict[str, Any]:
        far = {"rope_type": "proportional", "partial_rotary_factor": share}
        return {
            "sliding_attention": {"rope_type": "default", "rope_theta": thetas[0]},
            "full_attention": {**far, "rope_theta": thetas[1]},
        }


@dataclass(frozen=True)
class TwoBases:
    """Bases of the positions of blocks with a window, and of those without (MiMo).

    Both turn the same first channels of a head. Released files have a key for each base.

    Attributes:
      bases: of each kind of blocks, the key and the base where the file does not say.
      share: share of a head's channels that rotate where the file does not say.
    """

    bases: tuple[tuple[str, str, float], ...] = (
        ("sliding_attention", "swa_rope_theta", 10_000.0),
        ("full_attention", "rope_theta", 5_000_000.0),
    )
    share: float = 0.334
    keys: tuple[str, ...] = (
        "rope_parameters",
        "rope_theta",
        "swa_rope_theta",
        "partial_rotary_factor",
    )

    def read(self, config: Config) -> dict[str, Any]:
        given, head, found = config.get("rope_parameters"), head_width(config), []
        for blocks, key, base in self.bases:
            own: Mapping[str, Any] = {}
            if given is not None:
                own = _kind_of(_of_both(given), blocks, {"default": ("partial_rotary_factor",)})
                own = {"rope_theta": _number(own, "rope_theta"), **own}
            theta = _one_of(config, own, (key, "rope_theta"), base)
            names = ("partial_rotary_factor", "partial_rotary_factor")
            share = _one_of(config, own, names, self.share)
            found.append((theta, int(head * share) if type(share) in NUMBERS else 0))
        (near, width), (far, other) = found
        if width != other or not 0 < width <= head:
            raise InputError(
                f"{width} and {other} of a head's {head} channels would rotate in blocks with and "
                "without a window. It must be one number, above 0. Correct "
                "`partial_rotary_factor` in config.json."
            )
        return {
            "model.rope.theta": near,
            "model.full_attention.theta": None if near == far else far,
            "model.rope_width": None if width == head else width,
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        near, head = settings["model.rope.theta"], settings["model.head_width"]
        thetas = near, settings["model.full_attention.theta"] or near
        width, given = settings["model.rope_width"] or head, base.get("partial_rotary_factor")
        same = type(given) in NUMBERS and int(head * given) == width  # in another fraction
        share = {"partial_rotary_factor": given if same else _share(width, head)}
        said = [
            (blocks, key, theta) for (blocks, key, _), theta in zip(self.bases, thetas, strict=True)
        ]
        own = {b: {"rope_type": "default", "rope_theta": theta, **share} for b, _, theta in said}
        return {"rope_parameters": own, **share, **{key: theta for _, key, theta in said}}


def _one_of(config: Config, own: Config, names: tuple[str, str], default: float) -> Any:
    """Returns a number that a file names, or its object of positions, or both alike."""
    both = {names[0]: config.get(names[0]), "rope_parameters": own.get(names[1])}
    floats = {name: float(x) if type(x) is int else x for name, x in both.items()}
    return value_of(floats, tuple(floats), default)


def _of_both(given: Any) -> Mapping[str, Any]:
    """Returns positions of both kinds of blocks, which transformers writes in one object."""
    if not isinstance(given, Mapping) or sorted(given) != ["full_attention", "sliding_attention"]:
        raise InputError(
            f"`rope_parameters` is {short(given)}. It must have an object for "
            "sliding_attention and one for full_attention. Correct config.json."
        )
    return given


def _kind_of(
    given: Mapping[str, Any], blocks: str, kinds: Mapping[str, tuple[str, ...]]
) -> Mapping[str, Any]:
    """Returns the keys of positions of some blocks; refuses other kinds and unknown keys."""
    own = given[blocks] if isinstance(given[blocks], Mapping) else {}
    kind = str(own.get("rope_type"))
    known = ("rope_type", "rope_theta", *kinds.get(kind, ()))
    if kind not in kinds or not set(known).issuperset(own):
        wanted = dict.fromkeys(("rope_theta", *(key for keys in kinds.values() for key in keys)))
        raise InputError(
            f"`rope_parameters` of {blocks} are {short(given[blocks])}. moejax computes the kinds "
            f"{' and '.join(kinds)}, with the keys {', '.join(wanted)}. Choose another model."
        )
    return own


def _share(rotated: int, head: int) -> float:
    """Returns a fraction whose product with the head's width, cut down, is `rotated`."""
    share = rotated / head
    return share if int(head * share) == rotated else (rotated + 0.5) / head


def _read_kind(
    kind: str, given: Mapping[str, Any], config: Config, *, latent: bool
) -> dict[str, Any]:
    """Returns the settings of a kind of scaling; none if it scales nothing."""
    if kind == "default":
        return {}
    factor = _number(given, "factor")
    if factor == 1 and given.get("attention_factor") in (None, 1):
        return {}
    length = given.get(LENGTH) or config.get("max_position_embeddings")
    settings: dict[str, Any] = {"model.rope.scaling": kind, "model.rope.factor": factor}
    if kind == "linear":
        return settings
    if type(length) is not int:
        raise InputError(
            f"`original_max_position_embeddings` is {short(length)}. Scaling of kind {kind} "
            "depends on it. Correct config.json."
        )
    settings["model.rope.trained_length"] = length
    if kind == "llama3":
        settings["model.rope.low_frequency_factor"] = _number(given, "low_freq_factor")
        settings["model.rope.high_frequency_factor"] = _number(given, "high_freq_factor")
        return settings
    settings["model.rope.beta_fast"] = given.get("beta_fast") or 32.0
    settings["model.rope.beta_slow"] = given.get("beta_slow") or 1.0
    if given.get("truncate") not in (None, True):
        settings["model.rope.truncate"] = given["truncate"]
    return settings | _read_magnitudes(given, factor, latent=latent)


def _read_magnitudes(given: Mapping[str, Any], factor: float, *, latent: bool) -> dict[str, Any]:
    """Returns the settings of yarn's factors of cos and sin, and of scores.

    DeepSeek's code and transformers agree where both of `mscale` and `mscale_all_dim` are there and
    not zero, or neither is. Outside DeepSeek they are factors of cos and sin alone.
    """
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    settings = {}
    if given.get("attention_factor") is not None:
        settings["model.rope.attention_factor"] = given["attention_factor"]
    if all_dim in (None, 0) and mscale in (None, 1):
        return settings
    if not mscale or not all_dim:
        raise InputError(
            f"`mscale` is {short(mscale)}, `mscale_all_dim` is {short(all_dim)}. Both must be "
            "numbers above 0, or neither be there: else code of different authors disagrees. "
            "Correct config.json."
        )
    if latent:
        return settings | {"model.rope.mscale": mscale, "model.rope.mscale_all_dim": all_dim}
    quotient = magnitude(mscale, factor) / magnitude(all_dim, factor)
    return {"model.rope.attention_factor": quotient} | settings


def magnitude(scale: float, factor: float) -> float:
    """Returns yarn's magnitude 0.1 s ln(factor) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0


def _write_kind(settings: Settings, *, latent: bool) -> dict[str, Any] | None:
    """Returns `rope_scaling`; None if positions do not scale."""
    kind = settings["model.rope.scaling"]
    if kind == "none":
        return None
    names = ("factor",) if kind == "linear" else KINDS[kind]
    keys = {key: settings.get(f"model.rope.{RENAMED.get(key, key)}") for key in names}
    keys = {key: value for key, value in keys.items() if value is not None}
    if keys.get("truncate"):
        del keys["truncate"]  # what a missing key means
    if not latent and ("mscale" in keys or "mscale_all_dim" in keys):
        raise InputError("`model.rope.mscale` scales scores, which this family has no key for")
    return {"rope_type": kind, "type": kind, **keys}


def _number(given: Mapping[str, Any], name: str) -> float:
    value = given.get(name)
    if type(value) not in NUMBERS:
        raise InputError(
            f"`{name}` of `rope_scaling` is {short(value)}. It must be a number. Correct "
            "config.json."
        )
    return value  # type: ignore[return-value]
