"""Parts of a table between `config.json` and settings: each reads and writes some of the keys.

Reading gives settings by dotted name, writing gives keys. A part refuses values that the other side
cannot express, by name; the family adds the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from moejax.config.fields import short
from moejax.errors import InputError

Config = Mapping[str, Any]  # of config.json
Settings = Mapping[str, Any]  # by dotted name


class _Required:
    """Stands for the default of a key that must be there."""


REQUIRED = _Required()


@runtime_checkable
class Part(Protocol):
    """Some keys of `config.json` and the settings that say the same."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys."""
        ...

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings that the keys stand for."""
        ...

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the keys.

        Args:
          base: the `config.json` that the weights once came with; empty without one.
        """
        ...


@dataclass(frozen=True)
class Same:
    """One key is one setting.

    Attributes:
      default: value of a key that is not there or null.
      also: other names of the key, which must agree.
    """

    key: str
    setting: str
    default: Any = REQUIRED
    also: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys."""
        return (self.key, *self.also)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the setting."""
        return {self.setting: value_of(config, self.keys, self.default)}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        return {self.key: settings.get(self.setting, self.default)}


@dataclass(frozen=True)
class Always:
    """A key with the only value that can be computed here; a missing key means the same.

    Attributes:
      others: further values that mean the same.
      written: whether export writes it.
    """

    key: str
    value: Any
    others: tuple[Any, ...] = ()
    written: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys."""
        return (self.key,)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns no settings; `Family.read` lists the refusals of all keys together."""
        return {}

    def refusal(self, config: Config) -> str | None:
        """Returns the reason to refuse a value; None for a value that is computed here."""
        value = config.get(self.key, self.value)
        if any(value == known and type(value) is type(known) for known in self._known()):
            return None
        wanted = " or ".join(short(known) for known in (self.value, *self.others))
        return (
            f"`{self.key}` is {short(value)}. moejax computes it as {wanted} only. Choose a "
            "model without it."
        )

    def _known(self) -> tuple[Any, ...]:
        known = (self.value, *self.others)
        # JSON writes 1 for 1.0.
        return known + tuple(int(v) for v in known if type(v) is float and v == int(v))

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        return {self.key: self.value} if self.written else {}


@dataclass(frozen=True)
class Implied:
    """Settings that every model of a family has, without a key."""

    settings: tuple[tuple[str, Any], ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """No names."""
        return ()

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings."""
        return dict(self.settings)

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns no key."""
        return {}


@dataclass(frozen=True)
class Unused:
    """Keys that do not change what the model computes; export copies them."""

    names: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys."""
        return self.names

    def read(self, config: Config) -> dict[str, Any]:
        """Returns no setting."""
        return {}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the keys that the base has."""
        return {name: base[name] for name in self.names if name in base}


@dataclass(frozen=True)
class KeyValueHeads:
    """Key and value heads: as many as query heads where nothing says their number."""

    keys: tuple[str, ...] = ("num_key_value_heads",)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the setting."""
        heads = value_of(config, ("num_attention_heads",))
        return {"model.num_kv_heads": value_of(config, self.keys, heads)}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        return {"num_key_value_heads": settings["model.num_kv_heads"]}


@dataclass(frozen=True)
class HeadWidth:
    """Channels of a head: by default, the width over the heads.

    Attributes:
      free: whether a model may say otherwise.
    """

    free: bool = True
    keys: tuple[str, ...] = ("head_dim",)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the setting."""
        head, heads = head_width(config), whole_number(config, "num_attention_heads")
        if not self.free and head * heads != config["hidden_size"]:
            raise InputError(
                f"`head_dim` is {head}. In this family it is `hidden_size` over "
                f"`num_attention_heads`, {config['hidden_size']} over {heads}. Correct config.json."
            )
        return {"model.head_width": head}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key; none where it follows from others."""
        width = settings["model.head_width"]
        if not self.free:
            if width * settings["model.num_heads"] != settings["model.width"]:
                raise InputError(
                    f"`model.head_width` is {width}. In this family it is `model.width` over "
                    "`model.num_heads`"
                )
            return {}
        return {"head_dim": width}


@dataclass(frozen=True)
class BothBiases:
    """Biases of attention's four projections, all or none.

    Attributes:
      default: whether they are there where the key is missing.
    """

    default: bool = False
    keys: tuple[str, ...] = ("attention_bias",)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the settings."""
        if not value_of(config, self.keys, self.default):
            return {"model.attention_bias": False}
        return {"model.attention_bias": True, "model.attention_output_bias": True}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        return {"attention_bias": settings["model.attention_bias"]}


@dataclass(frozen=True)
class DenseHidden:
    """Hidden width of dense blocks, which has no effect in a model without them."""

    keys: tuple[str, ...] = ("intermediate_size",)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the setting, which `Family.read` drops where no block is dense."""
        return {"model.mlp_hidden": value_of(config, self.keys)}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        if has_dense_blocks(settings):
            return {"intermediate_size": settings["model.mlp_hidden"]}
        return {"intermediate_size": base.get("intermediate_size", settings["moe.expert_hidden"])}


@dataclass(frozen=True)
class Balance:
    """The coefficient of the load-balance loss, whose mean is defined differently there.

    Attributes:
      times: factor on their coefficient: docs/architecture.md has the table.
      default: their coefficient where the key is missing.
    """

    times: str  # "choices" (transformers' loss) or "one" (megablocks')
    default: float = 0.001
    key: str = "router_aux_loss_coef"

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys."""
        return (self.key,)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns the setting."""
        given = value_of(config, self.keys, self.default)
        choices = whole_number(config, "num_experts_per_tok")
        return {"moe.router.balance_loss": given * (choices if self.times == "choices" else 1)}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        """Returns the key."""
        times = settings["moe.experts_per_token"] if self.times == "choices" else 1
        # Rounded, so that a product and a quotient give the number that was read.
        return {self.key: float(f"{settings['moe.router.balance_loss'] / times:.12g}")}


def shared_width(settings: Settings) -> int:
    """Returns the hidden width of the shared experts together; 0 without them."""
    count, own = settings["moe.num_shared_experts"], settings.get("moe.shared_hidden")
    return own if count and own is not None else count * settings["moe.expert_hidden"]


def shortest_shared(width: int, expert: int) -> dict[str, Any]:
    """Returns the settings of shared experts: several of an expert's width, if it divides.

    Args:
      width: hidden width of all shared experts together; 0 without them.
      expert: hidden width of an expert.
    """
    if width % expert:
        return {"moe.num_shared_experts": 1, "moe.shared_hidden": width}
    return {"moe.num_shared_experts": width // expert, "moe.shared_hidden": None}


def has_dense_blocks(settings: Settings) -> bool:
    """Returns whether some block has no experts."""
    if settings.get("model.layer_mlps"):
        return "dense" in settings["model.layer_mlps"]
    return settings.get("model.first_dense_layers", 0) > 0 or settings.get("model.moe_every") != 1


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


def value_of(config: Config, names: tuple[str, ...], default: Any = REQUIRED) -> Any:
    """Returns the value of a key that may have several names.

    Raises:
      InputError: if it is missing and has no default, or its names disagree.
    """
    given = {name: config[name] for name in names if config.get(name) is not None}
    if len({repr(value) for value in given.values()}) > 1:
        listed = ", ".join(f"`{name}` is {short(value)}" for name, value in given.items())
        raise InputError(f"keys disagree: {listed}. They are one number. Correct config.json.")
    if given:
        return next(iter(given.values()))
    if isinstance(default, _Required):
        raise InputError(
            f"`{names[0]}` is missing. The model depends on it. Write it into config.json."
        )
    return default


def whole_number(config: Config, name: str) -> int:
    """Returns the value of a key that must be a positive integer.

    Raises:
      InputError: if it is missing, or something else.
    """
    value = value_of(config, (name,))
    if type(value) is not int or value < 1:
        raise InputError(
            f"`{name}` is {short(value)}. It must be a positive integer. Correct config.json."
        )
    return value
