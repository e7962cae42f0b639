"""Parts of `config.json` that say how blocks differ: experts or dense, with a window or without."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families.parts import Config, Settings, value_of, whole_number

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class SparseStep:
    """Each n-th block has experts, except those that are listed (Qwen)."""

    keys: tuple[str, ...] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings.

        Raises:
          InputError: if dense blocks are not the first ones, or all but each n-th.
        """
        layers, step = whole_number(config, "num_hidden_layers"), config.get("decoder_sparse_step")
        step, listed = 1 if step is None else step, config.get("mlp_only_layers") or []
        if type(step) is not int or step < 1 or not isinstance(listed, list):
            raise InputError(
                f"`decoder_sparse_step` is {short(step)}, `mlp_only_layers` is {short(listed)}. "
                "They must be a positive integer and a list of layers. Correct config.json."
            )
        has_experts = [i not in listed and (i + 1) % step == 0 for i in range(layers)]
        first = has_experts.index(True) if any(has_experts) else layers
        for dense, every in ((first, 1), (0, first + 1)):
            if any(has_experts) and has_experts == _blocks(layers, dense, every):
                return {"model.first_dense_layers": dense, "model.moe_every": every}
        raise InputError(
            f"`decoder_sparse_step` = {step} with `mlp_only_layers` = {short(listed)} gives a "
            f"pattern of dense blocks that moejax has not. Dense blocks must be the first ones, "
            "or all but each n-th. Choose another model."
        )

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the keys."""
        layers, dense, every = (
            settings[f"model.{name}"] for name in ("num_layers", "first_dense_layers", "moe_every")
        )
        if every is None:
            raise InputError("`model.moe_every` is none: the model has no experts")
        if not dense:
            return {"decoder_sparse_step": every, "mlp_only_layers": []}
        listed = [i for i, experts in enumerate(_blocks(layers, dense, every)) if not experts]
        return {"decoder_sparse_step": 1, "mlp_only_layers": listed}


def _blocks(layers: int, dense: int, every: int) -> list[bool]:
    """Returns whether each block has experts, as `config.pattern.layer_groups` orders them."""
    return [i >= dense and (i - dense + 1) % every == 0 for i in range(layers)]


@dataclass(frozen=True)
class FirstDense:
    """The first blocks are dense, and all others have experts (DeepSeek, GLM)."""

    keys: tuple[str, ...] = ("first_k_dense_replace",)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings."""
        dense = value_of(config, self.keys)
        return {"model.first_dense_layers": dense, "model.moe_every": 1}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        return {"first_k_dense_replace": settings["model.first_dense_layers"]}


@dataclass(frozen=True)
class OneWindow:
    """A window of all blocks, or none.

    Attributes:
      switch: a key without which `sliding_window` means nothing; "": there is no such key.
    """

    switch: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys."""
        return ("sliding_window", self.switch) if self.switch else ("sliding_window",)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the setting."""
        on = not self.switch or config.get(self.switch, False)
        return {"model.sliding_window": config.get("sliding_window") if on else None}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the keys."""
        window = settings["model.sliding_window"]
        return {"sliding_window": window} | (
            {self.switch: window is not None} if self.switch else {}
        )


@dataclass(frozen=True)
class LayerTypes:
    """A window of some blocks: `layer_types` lists which (gpt-oss, Qwen2-MoE).

    Attributes:
      switch: a key without which no block has a window (Qwen2-MoE); "": there is no such key.
    """

    switch: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys."""
        switched = (self.switch, "max_window_layers") if self.switch else ()
        return ("sliding_window", "layer_types", *switched)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings.

        Raises:
          InputError: if blocks without a window are not each n-th one.
        """
        types = self._types(config)
        if SLIDING not in types:
            return {"model.sliding_window": None}
        if self.switch and not config.get(self.switch, False):
            raise InputError(
                f"`layer_types` has {SLIDING}, and `{self.switch}` is false or missing. They say "
                "the opposite. Correct config.json."
            )
        window = whole_number(config, "sliding_window")
        every = types.index(FULL) + 1 if FULL in types else None
        if types != layer_types(len(types), every):
            raise InputError(
                f"`layer_types` is {short(types)}. Blocks that see everything must be each n-th "
                "one. Choose another model."
            )
        return {"model.sliding_window": window, "model.full_attention_every": every}

    def _types(self, config: Config) -> list[str]:
        layers, given = whole_number(config, "num_hidden_layers"), config.get("layer_types")
        on = not self.switch or config.get(self.switch, False)
        if given is None:
            last = config.get("max_window_layers", layers) if self.switch else layers
            sees = [FULL if i % 2 or i >= last else SLIDING for i in range(layers)]
            return sees if on else [FULL] * layers
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
        """Returns the keys."""
        layers, window = settings["model.num_layers"], settings["model.sliding_window"]
        every = settings.get("model.full_attention_every") if window else 1
        keys: dict[str, Any] = {"layer_types": layer_types(layers, every)}
        keys["sliding_window"] = window or base.get("sliding_window")
        if self.switch:
            last = layers if window else base.get("max_window_layers", layers)
            keys |= {self.switch: window is not None, "max_window_layers": last}
        return keys


def layer_types(layers: int, every: int | None) -> list[str]:
    """Returns what blocks see where each n-th one sees everything; none: no block does."""
    return [FULL if every is not None and (i + 1) % every == 0 else SLIDING for i in range(layers)]
