"""How far sites are apart."""

import jax
import numpy as np
import pytest

from moejax.train.records.metrics import router_distance
from tests.cases import small_config, step_for
from tests.step.test_outer import outer_config


@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (2, 2, 2, 1)], ids=str)
def test_the_distance_is_that_of_all_routers(mesh):
    """Routers of site s are the outer ones times 1 + s / 8, all else is far away."""
    state = step_for(outer_config(mesh, every=3)).init()

    def moved(path, x):
        far = [1, 1 + 1 / 8] if "router" in jax.tree_util.keystr(path) else [5, 7]
        factor = np.reshape(far, (2, *(1,) * (x.ndim - 1)))
        return jax.device_put(np.asarray(x) * factor, x.sharding)

    params = jax.tree_util.tree_map_with_path(moved, state.sites.params)
    state = state._replace(sites=state.sites._replace(params=params))
    np.testing.assert_allclose(router_distance(state), np.sqrt(1 / 2) / 8, rtol=1e-6)


def test_a_run_without_an_outer_loop_has_none():
    assert router_distance(step_for(small_config((2, 1, 1, 1))).init()) is None
