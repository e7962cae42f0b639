"""The translation of a plan, and the sizes that every translation starts from."""

import shlex
from dataclasses import dataclass
from typing import Literal

from moejax.config.schema import Config
from moejax.layout.layout import build_layout

AXES = ("stage", "replica", "fsdp", "expert", "tensor")

SHAPE = "shape of the model"  # why a setting has its value

Value = str | int | float | bool | tuple[str, ...] | None


@dataclass(frozen=True)
class Option:
    """One setting of another trainer.

    Attributes:
      name: its name in the trainer's own parser, without dashes.
      value: its value; None for a switch that takes none; several words for a list.
      because: the part of the plan that it stands for, in words.
      subcommand: whether it is a word by itself, behind all other settings.
    """

    name: str
    value: Value
    because: str
    subcommand: bool = False

    @property
    def text(self) -> str:
        """The value as the trainer reads it, in the quotes that a shell needs; empty for None."""
        if self.value is None:
            return ""
        if isinstance(self.value, bool):
            return str(self.value).lower()
        words = self.value if isinstance(self.value, tuple) else (str(self.value),)
        return " ".join(map(shlex.quote, words))


@dataclass(frozen=True)
class Gap:
    """A part of the plan that the trainer cannot express, and its own way in the part's place."""

    what: str
    instead: str


@dataclass(frozen=True)
class Translation:
    """A plan in the settings of one trainer.

    Attributes:
      trainer: its name for people.
      package: the package, with the version whose parser the names were compared with.
      style: how a setting is written: name=value, or --name value.
      start: the words that start it, without settings.
      options: settings, in the order in which they are shown.
      gaps: parts of the plan that it cannot express.
      yours: settings that no plan decides, in words; the reader adds them.
    """

    trainer: str
    package: str
    style: Literal["equals", "dashes"]
    start: tuple[str, ...]
    options: tuple[Option, ...]
    gaps: tuple[Gap, ...]
    yours: str

    def value(self, name: str) -> Value:
        """Returns the value of a setting; raises KeyError if the translation has none."""
        return {option.name: option.value for option in self.options}[name]

    def written(self, option: Option) -> str:
        """Returns a setting as it stands on a command line."""
        if self.style == "equals":
            return f"{option.name}={option.text}"
        return f"{'' if option.subcommand else '--'}{option.name} {option.text}".rstrip()

    def command(self) -> str:
        """Returns the command line, one setting a line, for a shell."""
        lines = [" ".join(self.start), *map(self.written, self.options)]
        return " \\\n    ".join(lines)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a plan's mesh and batch.

    Attributes:
      stage, replica, fsdp, expert, tensor: devices along the mesh axes; their product is all.
      across: devices along each axis that lie on different nodes; by axis.
      batch: sequences of one step, over all devices.
    """

    stage: int
    replica: int
    fsdp: int
    expert: int
    tensor: int
    nodes: int
    across: dict[str, int]
    batch: int
    micro_batches: int

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.stage * self.data * self.tensor

    @property
    def data(self) -> int:
        """Devices of a stage, or groups of tensor ranks, that have sequences of their own."""
        return self.replica * self.fsdp * self.expert

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch on one of `data`."""
        return self.batch // (self.data * self.micro_batches)


def sizes_of(cfg: Config) -> Sizes:
    """Returns the sizes of a resolved config, such as that of a plan."""
    layout = build_layout(cfg.mesh)
    return Sizes(
        **{axis: layout.size(getattr(layout, axis)) for axis in AXES},
        nodes=cfg.mesh.nodes or 1,
        across={axis: layout.size(layout.between_nodes(getattr(layout, axis))) for axis in AXES},
        batch=cfg.train.batch_sequences,
        micro_batches=cfg.train.micro_batches,
    )


def stages_text(cfg: Config) -> str:
    """Returns the plan's spread of layers over pipeline stages, as text."""
    if cfg.mesh.stage == 1:
        return "no pipeline"
    chunks = cfg.model.stage_chunks
    several = f", {chunks} chunks a stage" if chunks > 1 else ""
    return f"stage {cfg.mesh.stage}, schedule {cfg.mesh.schedule}{several}"


HOST_GPUS = 8  # most GPUs of one host; a node of more is several hosts that NVLink joins


def torchrun(sizes: Sizes) -> tuple[str, ...]:
    """Returns the words that start a program on every GPU, with names where hosts are unknown."""
    gpus = sizes.devices // sizes.nodes
    if gpus > HOST_GPUS:
        return ("torchrun", "--nnodes=$HOSTS", "--nproc-per-node=$GPUS_OF_A_HOST")
    return ("torchrun", f"--nnodes={sizes.nodes}", f"--nproc-per-node={gpus}")


def experts_text(cfg: Config) -> str:
    """Returns the plan's spread of experts over devices, as text."""
    kind = f", weights of experts {cfg.mesh.expert_weights}" if cfg.mesh.tensor > 1 else ""
    return f"expert {cfg.mesh.expert}{kind}"


def has_exchange(cfg: Config) -> bool:
    """Returns whether tokens travel to experts on other devices."""
    owners = cfg.mesh.expert * (cfg.mesh.tensor if cfg.mesh.expert_weights == "folded" else 1)
    return cfg.model.has_experts and owners > 1


def has_chunks(cfg: Config) -> bool:
    """Returns whether the exchange of tokens is cut into chunks."""
    return has_exchange(cfg) and max(cfg.route_chunks, cfg.route_chunks_backward or 1) > 1
