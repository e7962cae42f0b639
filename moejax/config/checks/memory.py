"""Rules on what lies in the host's memory."""

from moejax.config.checks.text import require
from moejax.config.schema import Config

# Values of `model.remat` that keep named values of tokens alone. What none and dots keep costs less
# to compute again than to move twice; collectives keeps weights that are gathered.
KEPT_ON_HOST = ("token_collectives", "attention", "experts")


def check_memory(cfg: Config) -> None:
    """Raises InputError if `memory` names what the other settings cannot have on the host."""
    if cfg.memory.experts == "host":
        _check_experts(cfg)
    if cfg.memory.residuals == "host":
        _check_residuals(cfg)


def _check_experts(cfg: Config) -> None:
    keep = "`memory.experts` is host, so that layers fetch their experts one after the other."
    require(
        cfg.mesh.stage == 1,
        f"{keep} `mesh.stage` is {cfg.mesh.stage}, and stages gather the weights of all layers at "
        "a step's start. Set memory.experts=device, or mesh.stage=1.",
    )
    require(
        cfg.mesh.gather_across != "step",
        f"{keep} `mesh.gather_across` is step, which gathers those of all layers at a step's "
        "start. Set mesh.gather_across=passes or use, or memory.experts=device.",
    )
    require(
        cfg.compression.start_layer == 0,
        f"{keep} `compression.start_layer` is {cfg.compression.start_layer}, which cuts their "
        "layers in two parts. Set compression.start_layer=0, or memory.experts=device.",
    )


def _check_residuals(cfg: Config) -> None:
    if cfg.mesh.stage > 1:
        require(
            cfg.mesh.stage_keeps == "residuals",
            "`memory.residuals` is host, and `mesh.stage_keeps` is input, so that stages keep "
            "little. Set mesh.stage_keeps=residuals, or memory.residuals=device.",
        )
        return
    require(
        cfg.model.remat in KEPT_ON_HOST,
        f"`memory.residuals` is host, and `model.remat` is {cfg.model.remat}. Values that go to "
        f"the host have names. Set model.remat to one of {', '.join(KEPT_ON_HOST)}, or "
        "memory.residuals=device.",
    )
