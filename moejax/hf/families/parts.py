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
PAPER = 0.0001  # DeepSeek-V3 (2024), section 4.2: balance factor of each sequence and layer
REQUIRED = object()  # stands for the default of a key that must be there


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
      like: another key, which has that value.
      also: other names of the key, which must agree.
      positive: whether it is a number of something that each model of the family has.
    """

    key: str
    setting: str
    default: Any = REQUIRED
    like: str = ""
    also: tuple[str, ...] = ()
    positive: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self.also)

    def read(self, config: Config) -> dict[str, Any]:
        if self.positive:
            return {self.setting: whole_number(config, self.key)}
        default = value_of(config, (self.like,)) if self.like else self.default
        return {self.setting: value_of(config, self.keys, default)}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        value = settings.get(self.setting, self.default)
        if self.positive and not value:
            raise InputError(f"`{self.setting}` is {value}. It has at least one")
        return {self.key: value}


@dataclass(frozen=True)
class Always:
    """A key with the only value that can be computed here; a missing key means the same.

    Attributes:
      others: further values that mean the same.
      written: whether export writes it.
      advice: what to do about another value.
    """

    key: str
    value: Any
    others: tuple[Any, ...] = ()
    written: bool = True
    advice: str = "Choose a model without it."

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, config: Config) -> dict[str, Any]:
        """Returns no settings; `Family.read` lists the refusals of all keys together."""
        return {}

    def refusal(self, config: Config) -> str | None:
        """Returns the reason to refuse a value; None for a value that is computed here."""
        value, known = config.get(self.key, self.value), [self.value, *self.others]
        wanted = " or ".join(map(short, known))
        # JSON writes 1 for 1.0.
        known += [int(v) for v in known if type(v) is float and v == int(v)]
        if any(value == one and type(value) is type(one) for one in known):
            return None
        return f"`{self.key}` is {short(value)}. moejax computes it as {wanted} only. {self.advice}"

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        return {self.key: self.value} if self.written else {}


NOISE = "It is noise of training, and changes no logits: make it 0.0 in config.json."


@dataclass(frozen=True)
class EveryLayer(Same):
    """One key is one setting, as a number or as a list with that number for each layer (Hunyuan).

    Attributes:
      only: the only value that can be computed here; None: any.
    """

    only: Any = None

    def read(self, config: Config) -> dict[str, Any]:
        given = {name: config[name] for name in self.keys if isinstance(config.get(name), list)}
        for name, values in given.items():
            if len(values) != config.get("num_hidden_layers") or len(set(map(repr, values))) != 1:
                raise InputError(
                    f"`{name}` is {short(values)}. moejax computes one number for all "
                    f"{config.get('num_hidden_layers')} layers. Choose another model."
                )
        found = super().read({**config, **{name: values[0] for name, values in given.items()}})
        if self.only is not None and found[self.setting] != self.only:
            raise InputError(
                f"`{self.key}` is {short(found[self.setting])}. moejax computes it as "
                f"{short(self.only)} only. Choose another model."
            )
        return found

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        (value,) = super().write(settings, base).values()
        names = [name for name in self.keys if name == self.key or name in base]
        layers = settings["model.num_layers"]
        return {n: [value] * layers if isinstance(base.get(n), list) else value for n in names}


@dataclass(frozen=True)
class Twice(Same):
    """One setting under several keys, all of which are written: code of authors reads others."""

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        (value,) = super().write(settings, base).values()
        return dict.fromkeys(self.keys, value)


@dataclass(frozen=True)
class Numbered:
    """A part with a list of layers, which files give as numbers too (MiMo).

    Attributes:
      part: reads and writes the list.
      listed: its key.
      key: key of the numbers.
      kinds: what 0 and 1 mean.
    """

    part: Part
    listed: str
    key: str
    kinds: tuple[str, str]

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.part.keys, self.key)

    def read(self, config: Config) -> dict[str, Any]:
        numbers, given = config.get(self.key), config.get(self.listed)
        if numbers is None:
            return self.part.read(config)
        known = isinstance(numbers, list) and all(type(n) is int and n in (0, 1) for n in numbers)
        named = [self.kinds[number] for number in numbers] if known else None
        if named is None or given not in (None, named):
            raise InputError(
                f"`{self.key}` is {short(numbers)}, `{self.listed}` is {short(given)}. The first "
                f"must say 0 for {self.kinds[0]}, 1 for {self.kinds[1]} of each layer, and agree "
                "with the second. Correct config.json."
            )
        return self.part.read({**config, self.listed: named})

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        keys = self.part.write(settings, base)
        return {**keys, self.key: [self.kinds.index(kind) for kind in keys[self.listed]]}


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
    if default is REQUIRED:
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
