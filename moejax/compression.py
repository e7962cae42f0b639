"""Which codec each class of traffic takes across nodes: texts of the config, read without JAX.

A codec is written NAME[:ARGUMENT][+feedback][+stochastic]: int4+feedback, topk:0.01+feedback.
What it does and how far it errs is stated in `comm.codec`. Inside a node nothing is compressed, and
nowhere the router, its metadata, the loss or the state of the optimizer.
"""

import dataclasses
from dataclasses import dataclass

from moejax.config import CompressionConfig
from moejax.errors import InputError

BLOCKS = ("int8", "e4m3", "e5m2", "int4")
NAMES = ("bfloat16", *BLOCKS, "loco", "topk")
# The defaults of a policy: what tolerates how much.
PRESETS: dict[str, dict[str, str]] = {
    "none": {},
    "hybrid": {"dense_gradient": "int8+feedback", "expert_gradient": "int8+feedback"},
    "strong": {"dense_gradient": "int4+feedback", "expert_gradient": "int4+feedback"},
}


@dataclass(frozen=True)
class CodecSpec:
    """A codec by name."""

    name: str
    argument: float | None = None
    feedback: bool = False
    stochastic: bool = False
    block: int = 128

    def __str__(self) -> str:
        argument = "" if self.argument is None else f":{self.argument:g}"
        flags = "+feedback" * self.feedback + "+stochastic" * self.stochastic
        return self.name + argument + flags


@dataclass(frozen=True)
class Compression:
    """The codec of each class; None: it travels as it is."""

    dense_gradient: CodecSpec | None = None
    expert_gradient: CodecSpec | None = None


NO_COMPRESSION = Compression()


def build_compression(cfg: CompressionConfig) -> Compression:
    """Reads a policy: the preset, and on top of it the classes that are set.

    Raises:
      InputError: if a codec is not one.
    """
    chosen = {}
    for entry in dataclasses.fields(Compression):
        text = getattr(cfg, entry.name)
        text = PRESETS[cfg.preset].get(entry.name, "none") if text == "preset" else text
        chosen[entry.name] = read_codec(f"compression.{entry.name}", text, cfg)
    return Compression(**chosen)


def read_codec(setting: str, text: str, cfg: CompressionConfig) -> CodecSpec | None:
    """Reads one codec.

    Raises:
      InputError: if it is not one, or its flags mean nothing.
    """
    if text == "none":
        return None
    plain, *flags = text.split("+")
    name, colon, argument = plain.partition(":")
    if name not in NAMES:
        _refuse(setting, text, f"It must be none or one of {', '.join(NAMES)}")
    if unknown := set(flags) - {"feedback", "stochastic"}:
        _refuse(setting, text, f"It has no flag {min(unknown)}: they are feedback and stochastic")
    if "stochastic" in flags and name not in BLOCKS:
        _refuse(setting, text, f"Only {', '.join(BLOCKS)} round at random")
    if "feedback" in flags and name == "loco":
        _refuse(setting, text, "loco has error feedback of its own. Leave out +feedback")
    spec = CodecSpec(name, None, "feedback" in flags, "stochastic" in flags, cfg.block)
    if name == "topk":
        return dataclasses.replace(spec, argument=_share(setting, text, argument))
    if colon:
        _refuse(setting, text, f"{name} takes no argument. Leave out :{argument}")
    return spec


def _share(setting: str, text: str, argument: str) -> float:
    try:
        share = float(argument)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        _refuse(setting, text, "topk takes the share of values to send, between 0 and 1: topk:0.01")
    return share


def _refuse(setting: str, text: str, rule: str) -> None:
    raise InputError(f"`{setting}` is `{text}`. {rule}.")
