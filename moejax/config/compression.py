"""Reads the config's codecs: one for each class of traffic across nodes, by step.

A class has one codec, or several with the step from which each applies:

    int8+feedback                   always
    none,int4+feedback@200          uncompressed for a warm-up of 200 steps
    int4,int8@1000,bfloat16@5000    errors that shrink along training

A codec is NAME[+feedback]. `comm.codecs` describes them and their errors.
Nothing is compressed inside a node; the router, its metadata, the weights of its choices, the loss
and the optimizer state are never compressed. Nothing here imports JAX.
"""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from moejax.config.schema import CompressionConfig, Config
from moejax.errors import InputError

BLOCKS = ("int8", "e4m3", "e5m2", "int4")
PLAIN = ("bfloat16", *BLOCKS)
NAMES = (*PLAIN, "loco")
# Codecs that were removed, and which to use in place of each (decision 0009).
REMOVED: dict[str, str] = dict.fromkeys(("adaptive", "powersgd", "topk"), "int4+feedback")
GRADIENTS = ("dense_gradient", "expert_gradient")
TOKENS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
STAGES = ("stage", "stage_gradient")
# Presets. No feedback between stages: it makes gradients of weights worse (decision 0027).
PRESETS: dict[str, dict[str, str]] = {
    "none": {},
    "hybrid": {
        **dict.fromkeys(GRADIENTS, "int8+feedback"),
        **dict.fromkeys(("dispatch", "combine", *STAGES), "int8"),
    },
    "strong": {
        **dict.fromkeys(GRADIENTS, "int4+feedback"),
        **dict.fromkeys((*TOKENS, "weights", *STAGES), "int8"),
    },
}


@dataclass(frozen=True)
class CodecSpec:
    """A codec by name."""

    name: str
    feedback: bool = False
    block: int = 128
    kernel: str = "reference"  # implementation of kernels.quantize
    # Implementation of kernels.quantized_rows, for rows of tokens; "separate": rows are permuted,
    # then encoded, and decoded, then summed.
    rows_kernel: str = "separate"

    def __str__(self) -> str:
        return self.name + "+feedback" * self.feedback


@dataclass(frozen=True)
class Codecs:
    """The codec of each class during some steps; None: uncompressed."""

    dense_gradient: CodecSpec | None = None
    expert_gradient: CodecSpec | None = None
    dispatch: CodecSpec | None = None
    combine: CodecSpec | None = None
    dispatch_backward: CodecSpec | None = None
    combine_backward: CodecSpec | None = None
    weights: CodecSpec | None = None
    stage: CodecSpec | None = None
    stage_gradient: CodecSpec | None = None


NO_CODECS = Codecs()


@dataclass(frozen=True)
class Compression:
    """The codecs of a run.

    Attributes:
      stretches: (first step, codecs) of each stretch of steps; the first starts at step 0.
      start_layer: number of first blocks whose gradients are not compressed.
    """

    stretches: tuple[tuple[int, Codecs], ...] = ((0, NO_CODECS),)
    start_layer: int = 0

    def all_of(self, kind: str) -> list[CodecSpec]:
        """Returns every codec that a class takes at some step."""
        codecs_of_kind = [getattr(codecs, kind) for _, codecs in self.stretches]
        return [spec for spec in codecs_of_kind if spec is not None]

    def at(self, step: int) -> Codecs:
        """Returns the codecs of a step, counted from zero."""
        return [codecs for start, codecs in self.stretches if start <= step][-1]

    def without(self, kinds: Iterable[str]) -> "Compression":
        """Returns the same codecs, but none for the given classes."""
        none = dict.fromkeys(kinds)
        stretches = tuple(
            (start, dataclasses.replace(codecs, **none)) for start, codecs in self.stretches
        )
        if all(codecs == NO_CODECS for _, codecs in stretches):
            return NO_COMPRESSION
        return dataclasses.replace(self, stretches=stretches)

    def with_kernels(self, kernel: str, rows_kernel: str) -> "Compression":
        """Returns the same codecs with other implementations; see `CodecSpec`."""

        def changed(spec: CodecSpec | None) -> CodecSpec | None:
            if spec is None:
                return None
            return dataclasses.replace(spec, kernel=kernel, rows_kernel=rows_kernel)

        stretches = tuple(
            (start, Codecs(**{kind: changed(spec) for kind, spec in vars(codecs).items()}))
            for start, codecs in self.stretches
        )
        return dataclasses.replace(self, stretches=stretches)


NO_COMPRESSION = Compression()


def build_compression(cfg: CompressionConfig) -> Compression:
    """Reads the codecs: the preset, overridden by classes that are set.

    Raises:
      InputError: if a codec is unknown, or not for its class.
    """
    schedules = {}
    for entry in dataclasses.fields(Codecs):
        text = getattr(cfg, entry.name)
        text = PRESETS[cfg.preset].get(entry.name, "none") if text == "preset" else text
        schedules[entry.name] = _read_schedule(entry.name, text, cfg)
    starts = sorted({start for schedule in schedules.values() for start in schedule})
    stretches = []
    for now in starts:
        latest = {
            kind: schedule[max(start for start in schedule if start <= now)]
            for kind, schedule in schedules.items()
        }
        stretches.append((now, Codecs(**latest)))
    if all(codecs == NO_CODECS for _, codecs in stretches):
        return NO_COMPRESSION
    return Compression(tuple(stretches), cfg.start_layer)


def outer_codec(cfg: Config) -> CodecSpec | None:
    """Reads the codec of the outer loop; None: nothing is compressed.

    Raises:
      InputError: if it is unknown.
    """
    text = cfg.outer.codec
    name, plus, flag = text.partition("+")
    if text != "none" and (name not in PLAIN or flag != "feedback" * bool(plus)):
        raise InputError(
            f"`outer.codec` is `{text}`. It must be none or one of {', '.join(PLAIN)}, and may "
            "have +feedback behind it."
        )
    return None if text == "none" else CodecSpec(name, bool(plus), cfg.compression.block)


def without_removed_codecs(text: str) -> str:
    """Returns a saved setting of codecs with those to use in place of removed ones."""

    def known(part: re.Match[str]) -> str:
        name, rest, start = part.groups()
        return (REMOVED.get(name) or name + rest.replace("+stochastic", "")) + (start or "")

    return re.sub(r"([^,:+@]+)([^,@]*)(@[^,]*)?", known, text)


def describe_codecs(codecs: Codecs) -> str:
    """Returns the codecs as text."""
    named = [f"{kind} {spec}" for kind, spec in vars(codecs).items() if spec is not None]
    return ", ".join(named) or "none"


def _read_schedule(kind: str, text: str, cfg: CompressionConfig) -> dict[int, CodecSpec | None]:
    """Reads a class: first step -> codec."""
    schedule: dict[int, CodecSpec | None] = {}
    for index, part in enumerate(text.split(",")):
        name, at, start = part.partition("@")
        if (index > 0) != bool(at) or (at and not start.isdecimal()):
            rule = "The first codec starts at step 0; each later one names its step: none,int8@200"
            _refuse(kind, text, rule)
        step = int(start or 0)
        if schedule and step <= max(schedule):
            _refuse(kind, text, "Its steps must grow")
        schedule[step] = _read_codec(kind, name, cfg)
    names = {spec.name for spec in schedule.values() if spec is not None}
    if "loco" in names and len(names) > 1:
        _refuse(kind, text, "The state of loco cannot be used by another codec")
    return schedule


def _read_codec(kind: str, text: str, cfg: CompressionConfig) -> CodecSpec | None:
    """Reads one codec of a class."""
    if text == "none":
        return None
    name, *flags = text.split("+")
    former = name.partition(":")[0]
    if former in REMOVED:
        _refuse(kind, text, f"{former} was removed: use {REMOVED[former]}, which keeps the loss")
    if name not in NAMES:
        _refuse(kind, text, f"It must be none or one of {', '.join(NAMES)}")
    if "stochastic" in flags:
        _refuse(kind, text, "+stochastic was removed: it gains nothing. Leave it out")
    if unknown := set(flags) - {"feedback"}:
        _refuse(kind, text, f"It has no flag {min(unknown)}: there is +feedback alone")
    if kind == "stage_gradient" and name == "loco":
        rule = "Gradients between stages have a codec that may remember, with +feedback. Choose "
        _refuse(kind, text, rule + ", ".join(PLAIN))
    if kind not in (*GRADIENTS, "stage_gradient") and (flags or name == "loco"):
        rule = "Only gradients of weights have a codec that remembers. Choose "
        _refuse(kind, text, rule + ", ".join(PLAIN))
    if "feedback" in flags and name == "loco":
        _refuse(kind, text, f"{name} has error feedback of its own. Leave out +feedback")
    return CodecSpec(name, "feedback" in flags, cfg.block)


def _refuse(kind: str, text: str, rule: str) -> None:
    raise InputError(f"`compression.{kind}` is `{text}`. {rule}.")
