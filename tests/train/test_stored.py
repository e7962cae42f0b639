"""Parts of a checkpoint's weights, read without devices: the same bits, however they were saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.hf.load import flat
from moejax.train.checkpoint import Checkpoints
from moejax.train.stored import StoredWeights
from tests.cases import small_config, step_for

MESHES = [(1, 1, 1, 1), (1, 1, 8, 1), (2, 1, 2, 2), (1, 2, 2, 2), (8, 1, 1, 1)]
ALL = slice(None)


def weights_of(state):
    return {**flat(state.params), **flat(state.router_bias)}


def assert_read(step, arrays):
    stored = StoredWeights(step)
    for path, array in arrays.items():
        wanted = np.asarray(array)
        indices = {
            (),
            (-1 % wanted.shape[0],),
            (ALL,) * (wanted.ndim - 1) + (wanted.shape[-1] // 2,),
        }
        if wanted.ndim > 2:
            indices |= {(at, 0, ALL, 0)[: wanted.ndim] for at in (0, wanted.shape[0] - 1)}
        for index in indices:
            read = stored.read(path, index)
            assert read.dtype == wanted.dtype, path
            assert read.tobytes() == wanted[index].tobytes(), (path, index)


def state_on(mesh, dtype="float32"):
    """A state whose selection biases are not zero."""
    state = step_for(small_config(mesh, router={"bias_update_rate": 0.01})).init()
    bias = jax.tree.map(lambda x: x + jnp.arange(x.shape[-1]), state.router_bias)
    params = jax.tree.map(lambda x: x.astype(dtype), state.params)
    return state._replace(params=params, router_bias=bias)


@pytest.mark.parametrize("mesh", MESHES)
def test_parts_are_read_whatever_mesh_saved_them(tmp_path, mesh):
    state = state_on(mesh)
    writer = Checkpoints(tmp_path, keep=1)
    writer.save(3, state, {})
    writer.close()
    assert_read(tmp_path / "3", weights_of(state))
