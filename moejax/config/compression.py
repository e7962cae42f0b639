"""Reads the config's codecs: one for each class of traffic across nodes, by step.

A class has one codec, or several with the step from which each applies:

    int8+feedback                   always
    none,int4+feedback@200          uncompressed for a warm-up of 200 steps
    int4,int8@1000,bfloat16@5000    errors that shrink along training
    adaptive:0.9:int8|int4|topk:0.1 the strongest that keeps 0.9 of the gradient's squared norm

A codec is NAME[:ARGUMENT][+feedback][+stochastic]. `comm.codecs` describes them and their errors.
Nothing is compressed inside a node; the router, its metadata, the weights of its choices, the loss
and the optimizer state are never compressed. Nothing here imports JAX.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from moejax.config.schema import CompressionConfig
from moejax.errors import InputError

BLOCKS = ("int8", "e4m3", "e5m2", "int4")
NAMES = ("bfloat16", *BLOCKS, "loco", "topk", "powersgd", "adaptive")
GRADIENTS = ("dense_gradient", "expert_gradient")
TOKENS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
STAGES = ("stage", "stage_gradient")
# Presets. No feedback between stages: it makes gradients of weights worse (decision 0027).
PRESETS: dict[str, dict[str, str]] = {
    "none": {},
    "hybrid": {
        "dense_gradient": "int8+feedback",
        "expert_gradient": "int8+feedback",
        "dispatch": "int8",
        "combine": "int8",
        "stage": "int8",
        "stage_gradient": "int8",
    },
    "strong": {
        "dense_gradient": "int4+feedback",
        "expert_gradient": "int4+feedback",
        "dispatch": "int8",
        "combine": "int8",
        "dispatch_backward": "int8",
        "combine_backward": "int8",
        "weights": "int8",
        "stage": "int8",
        "stage_gradient": "int8",
    },
}


@dataclass(frozen=True)
class CodecSpec:
    """A codec by name."""

    name: str
    argument: float | None = None
    feedback: bool = False
    stochastic: bool = False
    block: int = 128
    kernel: str = "reference"  # implementation of kernels.quantize
    # Implementation of kernels.quantized_rows, for rows of tokens; "separate": rows are permuted,
    # then encoded, and decoded, then summed.
    rows_kernel: str = "separate"
    # For adaptive codecs: levels from mild to strong, the chosen level, and whether this step
    # measures the error of each.
    levels: tuple["CodecSpec", ...] = ()
    level: int = 0
    measures: bool = False

    def __str__(self) -> str:
        argument = "" if self.argument is None else f":{self.argument:g}"
        levels = ":" + "|".join(map(str, self.levels)) if self.levels else ""
        flags = "+feedback" * self.feedback + "+stochastic" * self.stochastic
        return self.name + argument + levels + flags


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
      stages: (first step, codecs); the first stage starts at step 0.
      start_layer: number of first blocks whose gradients are not compressed.
      adapt_every: steps between choices of adaptive codecs.
    """

    stages: tuple[tuple[int, Codecs], ...] = ((0, NO_CODECS),)
    start_layer: int = 0
    adapt_every: int = 1

    def all_of(self, kind: str) -> list[CodecSpec]:
        """Returns every codec that a class takes at some step."""
        codecs_of_kind = [getattr(codecs, kind) for _, codecs in self.stages]
        return [spec for spec in codecs_of_kind if spec is not None]

    @property
    def adaptive(self) -> bool:
        """True if some codec is adaptive."""
        return any(spec.levels for kind in GRADIENTS for spec in self.all_of(kind))

    def at(self, step: int, levels: tuple[int, int] = (0, 0)) -> Codecs:
        """Returns the codecs of a step.

        Args:
          step: counted from zero.
          levels: chosen levels of the adaptive codecs of `GRADIENTS`.
        """
        codecs = [codecs for start, codecs in self.stages if start <= step][-1]
        measures = step % self.adapt_every == 0
        for kind, level in zip(GRADIENTS, levels, strict=True):
            spec = getattr(codecs, kind)
            if spec is not None and spec.levels:
                spec = dataclasses.replace(spec, level=level, measures=measures)
                codecs = dataclasses.replace(codecs, **{kind: spec})
        return codecs

    def without(self, kinds: Iterable[str]) -> "Compression":
        """Returns the same codecs, but none for the given classes."""
        none = dict.fromkeys(kinds)
        stages = tuple(
            (start, dataclasses.replace(codecs, **none)) for start, codecs in self.stages
        )
        if all(codecs == NO_CODECS for _, codecs in stages):
            return NO_COMPRESSION
        return dataclasses.replace(self, stages=stages)

    def with_kernels(self, kernel: str, rows_kernel: str) -> "Compression":
        """Returns the same codecs with other implementations; see `CodecSpec`."""

        def changed(spec: CodecSpec | None) -> CodecSpec | None:
            if spec is None:
                return None
            levels = tuple(dataclasses.replace(level, kernel=kernel) for level in spec.levels)
            return dataclasses.replace(spec, kernel=kernel, rows_kernel=rows_kernel, levels=levels)

        stages = tuple(
            (start, Codecs(**{kind: changed(spec) for kind, spec in vars(codecs).items()}))
            for start, codecs in self.stages
        )
        return dataclasses.replace(self, stages=stages)


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
    stages = []
    for now in starts:
        latest = {
            kind: schedule[max(start for start in schedule if start <= now)]
            for kind, schedule in schedules.items()
        }
        stages.append((now, Codecs(**latest)))
    if all(codecs == NO_CODECS for _, codecs in stages):
        return NO_COMPRESSION
    policy = Compression(tuple(stages), cfg.start_layer, cfg.adapt_every)
    return policy if policy.adaptive else dataclasses.replace(policy, adapt_every=1)


def describe_codecs(codecs: Codecs) -> str:
    """Returns the codecs as text; for adaptive ones, the chosen level."""
    lines = []
    for entry in dataclasses.fields(Codecs):
        spec = getattr(codecs, entry.name)
        if spec is not None:
            shown = f"{spec.levels[spec.level]} (adaptive)" if spec.levels else str(spec)
            lines.append(f"{entry.name} {shown}")
    return ", ".join(lines) or "none"


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
    for own in {"loco", "adaptive"} & names:
        if len(names) > 1:
            _refuse(kind, text, f"The state of {own} cannot be used by another codec")
    return schedule


def _read_codec(kind: str, text: str, cfg: CompressionConfig) -> CodecSpec | None:
    """Reads one codec of a class."""
    if text == "none":
        return None
    plain, *flags = text.split("+") if not text.startswith("adaptive") else [text]
    name, colon, argument = plain.partition(":")
    if name not in NAMES:
        _refuse(kind, text, f"It must be none or one of {', '.join(NAMES)}")
    if unknown := set(flags) - {"feedback", "stochastic"}:
        _refuse(kind, text, f"It has no flag {min(unknown)}: they are feedback and stochastic")
    plain_name = name in ("bfloat16", *BLOCKS)
    if kind == "stage_gradient" and ("stochastic" in flags or not plain_name):
        rule = "Gradients between stages have a codec that may remember, with +feedback. Choose "
        _refuse(kind, text, rule + f"bfloat16, {', '.join(BLOCKS)}")
    if kind not in (*GRADIENTS, "stage_gradient") and (flags or not plain_name):
        rule = "Only gradients of weights have a codec that remembers or rounds at random. Choose "
        _refuse(kind, text, rule + f"bfloat16, {', '.join(BLOCKS)}")
    if "stochastic" in flags and name not in BLOCKS:
        _refuse(kind, text, f"Only {', '.join(BLOCKS)} round at random")
    if "feedback" in flags and name in ("loco", "powersgd", "adaptive"):
        _refuse(kind, text, f"{name} has error feedback of its own. Leave out +feedback")
    spec = CodecSpec(name, None, "feedback" in flags, "stochastic" in flags, cfg.block)
    if name == "topk":
        share = _number(argument)
        if not 0 < share < 1:
            rule = "topk takes the share of values to send, between 0 and 1: topk:0.01"
            _refuse(kind, text, rule)
        return dataclasses.replace(spec, argument=share)
    if name == "powersgd":
        rank = _number(argument)
        if rank < 1 or rank != int(rank):
            _refuse(kind, text, "powersgd takes a rank of at least 1: powersgd:4")
        return dataclasses.replace(spec, argument=rank)
    if name == "adaptive":
        return _read_adaptive(kind, text, argument, spec, cfg)
    if colon:
        _refuse(kind, text, f"{name} takes no argument. Leave out :{argument}")
    return spec


def _read_adaptive(
    kind: str, text: str, argument: str, spec: CodecSpec, cfg: CompressionConfig
) -> CodecSpec:
    threshold, _, listed = argument.partition(":")
    levels = tuple(_read_codec(kind, part, cfg) for part in listed.split("|")) if listed else ()
    plain = (*BLOCKS, "bfloat16", "topk")
    held = [level is not None and level.name in plain and not level.feedback for level in levels]
    if not 0 < _number(threshold) < 1 or len(levels) < 2 or not all(held):
        rule = (
            "adaptive takes the share of the squared norm to keep, and codecs without feedback "
            "from mild to strong: adaptive:0.9:int8|int4|topk:0.1"
        )
        _refuse(kind, text, rule)
    codecs = tuple(level for level in levels if level is not None)
    return dataclasses.replace(spec, argument=_number(threshold), levels=codecs)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _refuse(kind: str, text: str, rule: str) -> None:
    raise InputError(f"`compression.{kind}` is `{text}`. {rule}.")
