"""How far apart the weights of sites are, as this process can see without asking others."""

import math

import jax
import numpy as np

from moejax.step.state import TrainState


def router_distance(state: TrainState) -> float | None:
    """Returns how far routers of sites are from the outer ones, over the norm of those.

    Of the sites and parts of routers that this process's devices hold: nothing is sent. None
    without an outer loop, and without routers.
    """
    if state.sites is None:
        return None
    apart = norm = 0.0
    own, outer = (dict(jax.tree.leaves_with_path(tree)) for tree in (state.sites.params, state.params))
    for path in (path for path in outer if "router" in jax.tree_util.keystr(path)):
        shared = {part.device: part.data for part in outer[path].addressable_shards}
        for part in own[path].addressable_shards:
            wanted = np.asarray(shared[part.device], np.float64)
            apart += float(((np.asarray(part.data[0], np.float64) - wanted) ** 2).sum())
            norm += float((wanted**2).sum())
    return math.sqrt(apart / norm) if norm else None
