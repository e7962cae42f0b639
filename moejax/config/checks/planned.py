"""Who chooses: the settings that a planner may, and whether it does."""

from moejax.config.compression import PRESETS
from moejax.config.fields import fields, get_value, short
from moejax.config.schema import Config
from moejax.errors import InputError

MESH = ("mesh.replica", "mesh.fsdp", "mesh.expert", "mesh.tensor")
# What changes where arrays lie and how they travel, and never what is learned.
LAYOUT = (*MESH, "mesh.activations", "mesh.expert_weights")
EXCHANGE = ("route", "route_chunks", "route_chunks_backward")
REDUCTION = ("train.reduction_bytes",)
# The same sums in another order, or made again.
MEMORY = ("model.remat", "train.micro_batches")
CODECS = tuple(f"compression.{kind}" for kind in PRESETS["strong"])
CHOSEN = (*LAYOUT, *EXCHANGE, *REDUCTION, *MEMORY, *CODECS)

MODES = ("default", "auto", "hand")


def pinned(cfg: Config) -> frozenset[str]:
    """The settings among `CHOSEN` that somebody has set: those not at their defaults."""
    names = {name for name in CHOSEN if get_value(cfg, name) != fields()[name].default}
    if cfg.compression.preset != "none":
        names |= set(CODECS)
    return frozenset(names)


def is_planned(cfg: Config) -> bool:
    """Whether mesh and the rest are known only after planning."""
    if cfg.plan.mode == "default":
        return not pinned(cfg)
    return cfg.plan.mode != "hand"


def check_plan(cfg: Config) -> None:
    """Refuses a plan that is neither a mode nor a file.

    Raises:
      InputError: it is neither.
    """
    mode = cfg.plan.mode
    if mode not in MODES and not mode.endswith(".json"):
        raise InputError(
            f"`plan` = {short(mode)} is no way to plan. It must be {', '.join(MODES)}, or the path "
            "of a plan file, which ends in .json. Choose one of them."
        )


def check_nodes(cfg: Config, nodes: int, source: str) -> None:
    """Refuses nodes set by hand that are not those of a cluster or plan.

    Args:
      nodes: that it has.
      source: its name, for the message.
    Raises:
      InputError: a search would cut the mesh for one number and the run go by the other.
    """
    if cfg.mesh.nodes not in (None, nodes):
        raise InputError(
            f"`mesh.nodes` = {cfg.mesh.nodes}, but {source} has {nodes}. They must be equal. Leave "
            "mesh.nodes open, or name a cluster of as many nodes."
        )
