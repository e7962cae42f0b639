"""The mesh of a model that is only read: weights spread over as many devices as they fit."""

from collections.abc import Callable
from dataclasses import replace

from moejax.config.checks.mesh import check_expert_axis, check_width
from moejax.config.schema import Config
from moejax.errors import InputError


def spread(
    cfg: Config, num_devices: int, check: Callable[[Config], None] = lambda cfg: None
) -> Config | None:
    """Returns a config on a mesh of `num_devices` devices; None if it fits none.

    Experts are spread first, then the width; devices that neither can use hold copies.

    Args:
      check: raises `InputError` for a mesh that something else forbids.
    """
    sizes = [size for size in range(num_devices, 0, -1) if num_devices % size == 0]
    meshes = [
        replace(cfg.mesh, replica=num_devices // expert // fsdp, fsdp=fsdp, expert=expert)
        for expert in (sizes if cfg.model.has_experts else [1])
        for fsdp in sizes
        if num_devices % (expert * fsdp) == 0
    ]
    fitting = [found for mesh in meshes if _fits(found := replace(cfg, mesh=mesh), check)]
    return max(fitting, key=lambda c: (c.mesh.fsdp * c.mesh.expert, c.mesh.expert), default=None)


def _fits(cfg: Config, check: Callable[[Config], None]) -> bool:
    try:
        check_expert_axis(cfg)
        check_width(cfg)
        check(cfg)
    except InputError:
        return False
    return True
