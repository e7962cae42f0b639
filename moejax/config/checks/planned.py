"""The settings that the planner may choose, and the rules about plans."""

from moejax.config.compression import PRESETS
from moejax.config.fields import fields, get_value, one_line, short
from moejax.config.schema import Config
from moejax.errors import InputError

MESH = ("mesh.stage", "mesh.replica", "mesh.fsdp", "mesh.expert", "mesh.tensor")
# Settings of layout and communication, which do not change the result of training.
LAYOUT = (
    *MESH,
    "mesh.activations",
    "mesh.expert_weights",
    "mesh.context",
    "mesh.context_stripe",
    "mesh.context_exchange",
)
EXCHANGE = (
    "route",
    "route_chunks",
    "route_chunks_backward",
    "moe.headroom",
    "moe.slots",
    "moe.slots_from",
)
REDUCTION = ("train.reduction_bytes", "mesh.gather_dense", "mesh.gather_across")
STAGES = ("mesh.schedule", "mesh.stage_keeps", "mesh.stage_slices")
CHUNKS = "model.stage_chunks"  # each chunk is a layer group of the arrays
# Settings that reorder or recompute the same sums.
MEMORY = (
    "model.remat",
    "train.micro_batches",
    "memory.optimizer",
    "memory.experts",
    "memory.residuals",
)
CODECS = tuple(f"compression.{kind}" for kind in PRESETS["strong"])
CHOSEN = (*LAYOUT, *STAGES, CHUNKS, *EXCHANGE, *REDUCTION, *MEMORY, *CODECS)

# A config file's settings for one cluster. Codecs change training, and chunks of layers change
# checkpoints, so a file's codecs and chunks stay.
ANSWER = (*LAYOUT, *STAGES, *EXCHANGE, *REDUCTION, *MEMORY)

MODES = ("default", "auto", "hand")


def by_hand(cfg: Config) -> frozenset[str]:
    """Returns the settings among `CHOSEN` that are not at their defaults."""
    names = {name for name in CHOSEN if get_value(cfg, name) != fields()[name].default}
    if cfg.compression.preset != "none":
        names |= set(CODECS)
    return frozenset(names)


def pinned(cfg: Config) -> frozenset[str]:
    """Returns the settings that a search must not change: those set by hand, and `plan.keep`."""
    return by_hand(cfg).union(*map(chosen_names, cfg.plan.keep))


def chosen_names(name: str) -> tuple[str, ...]:
    """Returns a setting that plans choose, or all of a group such as `mesh`; empty if neither."""
    return tuple(known for known in CHOSEN if known == name or known.startswith(f"{name}."))


def is_planned(cfg: Config) -> bool:
    """Returns whether the planner chooses the mesh and the rest of `CHOSEN`."""
    if cfg.plan.mode == "default":
        return not by_hand(cfg)
    return cfg.plan.mode != "hand"


def check_chosen(name: str, source: str) -> None:
    """Raises InputError for a name that is neither a setting that plans choose nor a group of them.

    Args:
      source: where the name stands.
    """
    if not chosen_names(name):
        raise InputError(
            f"{source} has `{one_line(name)}`, which no plan chooses. It must be among "
            f"{', '.join(CHOSEN)}, or a group of them. Correct it."
        )


def check_plan(cfg: Config) -> None:
    """Raises InputError for a plan that is neither a mode nor a file, or unknown names to keep."""
    for name in cfg.plan.keep:
        check_chosen(name, "`plan.keep`")
    mode = cfg.plan.mode
    if mode not in MODES and not mode.endswith(".json"):
        raise InputError(
            f"`plan` = {short(mode)} is not a planning mode. It must be {', '.join(MODES)}, or "
            "the path of a plan file, which ends in .json. Choose one of them."
        )


def check_nodes(cfg: Config, nodes: int, source: str) -> None:
    """Raises InputError if `mesh.nodes` differs from the nodes of a cluster or plan.

    A search would divide the mesh for other nodes than the run.

    Args:
      nodes: nodes of the cluster or plan.
      source: its name, for the message.
    """
    if cfg.mesh.nodes not in (None, nodes):
        raise InputError(
            f"`mesh.nodes` = {cfg.mesh.nodes}, but {source} has {nodes}. They must be equal. Leave "
            "mesh.nodes open, or name a cluster of as many nodes."
        )
