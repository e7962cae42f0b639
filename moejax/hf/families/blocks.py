"""Parts of `config.json` that say how blocks differ: experts or dense, with a window or without."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moejax.config.fields import short
from moejax.config.pattern import (
    layer_attention,
    shortest,
    shortest_attention,
    shortest_mlps,
)
from moejax.config.schema import LinearConfig, ModelConfig
from moejax.errors import InputError
from moejax.hf.families.parts import Config, Same, Settings, whole_number

FIRST_DENSE = Same("first_k_dense_replace", "model.first_dense_layers")  # the others have experts
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True)
class SparseStep:
    """Each n-th block has experts, except those that are listed (Qwen)."""

    keys: tuple[str, ...] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, config: Config) -> dict[str, Any]:
        layers, step = whole_number(config, "num_hidden_layers"), config.get("decoder_sparse_step")
        step, listed = 1 if step is None else step, config.get("mlp_only_layers") or []
        if type(step) is not int or step < 1 or not isinstance(listed, list):
            raise InputError(
                f"`decoder_sparse_step` is {short(step)}, `mlp_only_layers` is {short(listed)}. "
                "They must be a positive integer and a list of layers. Correct config.json."
            )
        dense = {index for index in listed if type(index) is int}
        mlps = tuple(
            "dense" if index in dense or (index + 1) % step else "experts"
            for index in range(layers)
        )
        if "experts" not in mlps:
            raise InputError(
                f"`decoder_sparse_step` = {step} with `mlp_only_layers` = {short(listed)} leaves "
                f"none of {layers} layers for experts. Correct config.json."
            )
        return {f"model.{name}": value for name, value in shortest_mlps(mlps).items()}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        cfg = blocks_of(settings)
        if not cfg.has_experts:
            raise InputError("`model.moe_every` is none: the model has no experts")
        given = {key: base[key] for key in self.keys if key in base}
        if given and blocks_of({**settings, **self.read(base)}) == cfg:
            return given  # two files may say the same
        if not cfg.layer_mlps and not cfg.first_dense_layers:
            return {"decoder_sparse_step": cfg.moe_every, "mlp_only_layers": []}
        listed = [index for index, mlp in enumerate(cfg.mlps) if mlp == "dense"]
        return {"decoder_sparse_step": 1, "mlp_only_layers": listed}


@dataclass(frozen=True)
class MlpTypes:
    """MLPs of the blocks, which `mlp_layer_types` lists; without it the first alone is dense.

    Files name the number of dense blocks at the start too, which nothing else may contradict.

    Attributes:
      counts: whether that number says it where there is no list (Kimi Linear, DeepSeek-V3.2).
    """

    counts: bool = False
    keys: tuple[str, ...] = ("mlp_layer_types", "first_k_dense_replace")

    def read(self, config: Config) -> dict[str, Any]:
        first = config.get("first_k_dense_replace")
        if self.counts and first is not None and config.get("mlp_layer_types") is None:
            if type(first) is not int or first < 0:
                raise InputError(
                    f"`first_k_dense_replace` is {short(first)}. It must be an integer of at least "
                    "0. Correct config.json."
                )
            mlps = _first_dense(first, whole_number(config, "num_hidden_layers"))
        else:
            mlps = mlp_types(config)
        if "experts" not in mlps:
            raise InputError("no layer has experts. Correct `mlp_layer_types` in config.json.")
        if first is not None and mlps != _first_dense(first, len(mlps)):
            raise InputError(
                f"keys disagree: `first_k_dense_replace` is {short(first)}, and by "
                f"`mlp_layer_types` {mlps.count('dense')} layers are dense (without it, the first "
                "one). Correct config.json."
            )
        return {f"model.{name}": value for name, value in shortest_mlps(mlps).items()}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        mlps = blocks_of(settings).mlps
        dense = mlps.index("experts") if "experts" in mlps else len(mlps)
        first = {"first_k_dense_replace": dense} if mlps == _first_dense(dense, len(mlps)) else {}
        types = ["sparse" if mlp == "experts" else "dense" for mlp in mlps]
        return {"mlp_layer_types": types, **first}


def mlp_types(config: Config) -> tuple[str, ...]:
    """Returns "dense" or "experts" for each layer, of `mlp_layer_types`.

    Raises:
      InputError: if the list is not one of these layers.
    """
    layers, given = whole_number(config, "num_hidden_layers"), config.get("mlp_layer_types")
    if given is None:
        return _first_dense(1, layers)
    kinds = {"dense": "dense", "sparse": "experts"}
    if not isinstance(given, list) or len(given) != layers or not set(kinds).issuperset(given):
        raise InputError(
            f"`mlp_layer_types` is {short(given)}. It must say dense or sparse for each of "
            f"{layers} layers. Correct config.json."
        )
    return tuple(kinds[kind] for kind in given)


def _first_dense(dense: Any, layers: int) -> tuple[str, ...]:
    count = min(dense, layers) if type(dense) is int and dense >= 0 else 0
    return ("dense",) * count + ("experts",) * (layers - count)


@dataclass(frozen=True)
class OwnIndexers:
    """Lists of layers that say that each chooses keys by an indexer of its own (GLM-5).

    Sharing of choices between layers (GLM-5.2) is refused, in each way that files have for it.
    """

    keys: tuple[str, ...] = ("layer_types", "indexer_types", "index_topk_pattern")

    def read(self, config: Config) -> dict[str, Any]:
        for key, own in zip(self.keys, ("indexed_attention", "full", "F"), strict=True):
            given = config.get(key)
            if given is not None and set(map(repr, given)) != {repr(own)}:
                raise InputError(
                    f"`{key}` is {short(given)}. moejax computes {own} in all layers, where each "
                    "has an indexer of its own, only. Choose another model."
                )
        return {}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        return {key: base[key] for key in self.keys if key in base}


@dataclass(frozen=True)
class LayerRange:
    """Each n-th block between two has experts (ERNIE)."""

    keys: tuple[str, ...] = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")

    def read(self, config: Config) -> dict[str, Any]:
        layers = whole_number(config, "num_hidden_layers")
        start, stop, step = map(config.get, self.keys, (1, -1, 1))
        stop = layers - 1 if stop == -1 else stop
        if any(type(x) is not int for x in (start, stop, step)) or step < 1:
            raise InputError(
                f"`moe_layer_start_index` is {short(start)}, `moe_layer_end_index` {short(stop)}, "
                f"`moe_layer_interval` {short(step)}. They must be integers, the last above 0. "
                "Correct config.json."
            )
        mlps = self._mlps(layers, start, stop, step)
        if "experts" not in mlps:
            raise InputError(
                f"`moe_layer_start_index` = {start} to `moe_layer_end_index` = {stop} leaves none "
                f"of {layers} layers for experts. Correct config.json."
            )
        return {f"model.{name}": value for name, value in shortest_mlps(mlps).items()}

    def _mlps(self, layers: int, start: int, stop: int, step: int) -> tuple[str, ...]:
        return tuple(
            "experts" if start <= index <= stop and (index + 1) % step == 0 else "dense"
            for index in range(layers)
        )

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        mlps = blocks_of(settings).mlps
        given = {key: base[key] for key in self.keys if key in base}
        if given and blocks_of({**settings, **self.read(base)}).mlps == mlps:
            return given  # several files may say the same
        places = [index for index, mlp in enumerate(mlps) if mlp == "experts"]
        for step in range(1, len(mlps) + 1) if places else ():
            found = (places[0], places[-1], step)
            if self._mlps(len(mlps), *found) == mlps:
                return dict(zip(self.keys, found, strict=True))
        raise InputError("`model.layer_mlps`: experts are not in each n-th block of a range")


def blocks_of(settings: Settings) -> ModelConfig:
    """Returns a config with the settings of a model's blocks; others have defaults."""
    names = ("num_layers", "sliding_window", *shortest(ModelConfig()))
    linear = LinearConfig(form=settings.get("model.linear.form", "none"))
    own = {name: settings[f"model.{name}"] for name in dict.fromkeys(names)}
    return ModelConfig(**own, linear=linear)


@dataclass(frozen=True)
class OneWindow:
    """A window of all blocks, or none.

    Attributes:
      switch: a key without which `sliding_window` means nothing; "": there is no such key.
    """

    switch: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("sliding_window", self.switch) if self.switch else ("sliding_window",)

    def read(self, config: Config) -> dict[str, Any]:
        on = not self.switch or config.get(self.switch, False)
        return {"model.sliding_window": config.get("sliding_window") if on else None}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        window = settings["model.sliding_window"]
        switched = {self.switch: window is not None} if self.switch else {}
        return {"sliding_window": window, **switched}


@dataclass(frozen=True)
class LayerTypes:
    """A window in some blocks, which `layer_types` lists (gpt-oss, Qwen).

    Attributes:
      switch: a key without which no block has a window (Qwen); "": there is no such key, and a
        missing list with a window means what `turns` says.
      turns: whether without a list every second block before `max_window_layers` has a window; else
        all from it on have one (dense Qwen).
    """

    switch: str = ""
    turns: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        last = () if self.turns and not self.switch else ("max_window_layers",)
        return ("sliding_window", "layer_types", *last, *((self.switch,) if self.switch else ()))

    def read(self, config: Config) -> dict[str, Any]:
        types = self._types(config)
        if SLIDING not in types:
            return {"model.sliding_window": None}
        if self.switch and not config.get(self.switch, False):
            raise InputError(
                f"`layer_types` has {SLIDING}, and `{self.switch}` is false or missing. They say "
                "the opposite. Correct config.json."
            )
        window = whole_number(config, "sliding_window")
        sees = tuple("full" if kind == FULL else "window" for kind in types)
        found = shortest_attention(sees, window)
        return {f"model.{name}": value for name, value in found.items()}

    def _types(self, config: Config) -> list[str]:
        layers, given = whole_number(config, "num_hidden_layers"), config.get("layer_types")
        on = config.get(self.switch, False) if self.switch else self.turns
        on = on or (not self.switch and config.get("sliding_window") is not None)
        if given is None:
            last = config.get("max_window_layers", layers)
            if not on:
                return [FULL] * layers
            if not self.turns:
                return [FULL if i < last else SLIDING for i in range(layers)]
            return [FULL if i % 2 or i >= last else SLIDING for i in range(layers)]
        if (
            not isinstance(given, Sequence)
            or len(given) != layers
            or not {FULL, SLIDING}.issuperset(given)
        ):
            raise InputError(
                f"`layer_types` is {short(given)}. It must say {SLIDING} or {FULL} for each of "
                f"{layers} layers. Correct config.json."
            )
        return list(given)

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        layers, window = settings["model.num_layers"], settings["model.sliding_window"]
        sees = layer_attention(blocks_of(settings))
        types = [FULL if window is None or seen == "full" else SLIDING for seen in sees]
        keys: dict[str, Any] = {"layer_types": types}
        keys["sliding_window"] = window or base.get("sliding_window")
        if "max_window_layers" in self.keys:  # means nothing beside `layer_types`
            keys["max_window_layers"] = base.get("max_window_layers", layers)
        if self.switch:
            keys[self.switch] = window is not None
        return keys


@dataclass(frozen=True)
class LastFull(LayerTypes):
    """A window in all blocks but some, of which the last is one (Gemma 4).

    Attributes:
      every: each n-th block has none where the file does not say.
    """

    every: int = 6

    def _types(self, config: Config) -> list[str]:
        layers, given = whole_number(config, "num_hidden_layers"), config.get("layer_types")
        if given is None:
            given = [SLIDING if (index + 1) % self.every else FULL for index in range(layers)]
        named = super()._types({**config, "layer_types": given})
        types = [*named[:-1], FULL]  # whatever the file says of the last
        if SLIDING not in types:
            raise InputError(
                f"`layer_types` has no {SLIDING}. moejax computes models of this family with "
                "blocks of both kinds. Choose another model."
            )
        return types


@dataclass(frozen=True)
class FullWithoutPositions(LayerTypes):
    """A window and positions in all blocks but each n-th, or as `layer_types` says (AFMoE).

    Attributes:
      every: key of n.
      default: n where the file does not say.
    """

    every: str = "global_attn_every_n_layers"
    default: int = 4

    @property
    def keys(self) -> tuple[str, ...]:
        return (*super().keys, self.every)

    def read(self, config: Config) -> dict[str, Any]:
        types = self._types(config)
        some = "window" if FULL in types else "rotary"
        return {**super().read(config), "model.positions": some if SLIDING in types else "none"}

    def _types(self, config: Config) -> list[str]:
        layers, given = whole_number(config, "num_hidden_layers"), config.get("layer_types")
        if given is None:
            every = whole_number({self.every: self.default, **config}, self.every)
            given = [SLIDING if (index + 1) % every else FULL for index in range(layers)]
        return super()._types({**config, "layer_types": given})

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        # Beside `layer_types` n means nothing.
        return {**super().write(settings, base), self.every: base.get(self.every, self.default)}


@dataclass(frozen=True)
class FirstFull(LayerTypes):
    """A window in all blocks but the first and each n-th, or as `layer_types` says (MiMo).

    `sliding_window_size` counts the positions before a query's own, which `sliding_window` has too.

    Attributes:
      every: n.
    """

    every: int = 6

    @property
    def keys(self) -> tuple[str, ...]:
        return (*super().keys, "sliding_window_size")

    def read(self, config: Config) -> dict[str, Any]:
        layers, given = whole_number(config, "num_hidden_layers"), config.get("layer_types")
        if given is None:
            full = [index == 0 or (index + 1) % self.every == 0 for index in range(layers)]
            given = [FULL if each else SLIDING for each in full]
        if {FULL, SLIDING} != set(self._types({**config, "layer_types": given})):
            raise InputError(
                f"`layer_types` is {short(given)}. moejax computes models of this family with "
                f"{SLIDING} and {FULL}. Choose another model."
            )
        window = {"sliding_window": self._window(config)}
        return super().read({**config, **window, "layer_types": given})

    def _window(self, config: Config) -> int:
        if config.get("sliding_window_size") is None:
            return whole_number(config, "sliding_window")
        return whole_number(config, "sliding_window_size") + 1

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        keys = super().write(settings, base)
        before = {"sliding_window_size": (keys["sliding_window"] or 1) - 1}
        own = {key: base[key] for key in ("sliding_window", *before) if key in base}
        said = own and self._window(base) == keys["sliding_window"]
        return {**keys, **before, **(own if said else {})}  # both numbers may be said in two ways
