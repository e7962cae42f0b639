"""Refuses settings that leave a trained parameter without a gradient.

Such a gradient is rounding noise alone. Adam divides by its size, so the parameter walks at random
in full steps, and the loss does not show it. Biases of keys on channels that do not rotate are left
alone: without sinks they shift all scores of a query alike, so that no result depends on them. A
balance loss of zero takes nothing from a router, whose weights scale the output, nor does a bias
rate of zero. A gate is a sigmoid and a sink one of several terms: they always have a gradient.
"""

from fnmatch import fnmatchcase

from moejax.config.checks.text import require
from moejax.config.pattern import layer_groups
from moejax.config.schema import Config

ROUTER = "moe.w_router"


def check_gradients(cfg: Config) -> None:
    """Raises InputError at a setting that leaves a trained parameter without a gradient."""
    model, one = cfg.model, _is_alone(cfg)
    why = "`moe.num_experts` = 1 makes" if one else "`moe.router.renormalize` = true makes"
    switch = "moe.router.renormalize=false, so that the weight is the expert's probability (Switch)"
    require(
        not (has_fixed_weight(cfg) and _trains_router(cfg)),
        f"`moe.experts_per_token` = {cfg.moe.experts_per_token} and {why} the weight of a token's "
        "only expert one, whatever the router says. The loss then gives the router no gradient. "
        f"Set {'model.moe_every=none for a dense model' if one else switch}, choose more experts, "
        "or train adapters that leave the router out.",
    )
    length, window = cfg.data.sequence_length, model.sliding_window
    name = "data.sequence_length" if length == 1 else "model.sliding_window"
    require(
        (model.attention_sinks and (model.full_attention.sinks or length > 1))
        or (length > 1 and window != 1),
        f"`{name}` = 1 lets a position attend to itself alone, with a weight of one, whatever "
        "query and key are. The loss then gives them no gradient. Choose at least 2.",
    )


def has_fixed_weight(cfg: Config) -> bool:
    """Returns whether the weight of each token's only expert is always one."""
    moe = cfg.moe
    fixed = moe.router.renormalize or _is_alone(cfg)
    return cfg.model.has_experts and moe.experts_per_token == 1 and fixed


def _is_alone(cfg: Config) -> bool:
    """Returns whether a softmax goes over one expert."""
    return cfg.moe.num_experts == 1 and cfg.moe.router.score == "softmax"


def _trains_router(cfg: Config) -> bool:
    """Returns whether the router or an adapter of it is trained."""
    if cfg.lora.rank is None:
        return True
    groups = enumerate(layer_groups(cfg.model))
    places = [f"groups.{g}.blocks.{b}." for g, (kinds, _) in groups for b in range(len(kinds))]
    names = [f"{place}{ROUTER}" for place in ("", "predict_ahead.group.blocks.0.", *places)]
    return any(fnmatchcase(name, pattern) for name in names for pattern in cfg.lora.targets or ())
