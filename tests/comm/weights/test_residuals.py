"""What enters beside a weight: a context of its own for each parameter, layer and device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.comm.codecs.codec import EncodeContext
from moejax.comm.weights.compressed import ReduceState
from moejax.comm.weights.residuals import attach_residuals, from_floats, to_floats
from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh

LAYOUT = build_layout(MeshConfig(2, 1, 2, 2, nodes=2))
DIMS = {"query": "DHC", "table": "VD"}
LAYERS = 3


@pytest.mark.parametrize("step", [0, 1, 2**16 - 1, 2**24 + 1, 2**31 - 1])
def test_a_moment_travels_as_floats_without_loss(step):
    context = EncodeContext(jnp.int32(step), jax.random.key(2**31 + 7))
    found = from_floats(to_floats(context))
    assert int(found.step) == step
    keys = [jax.random.key_data(one.key) for one in (found, context)]
    np.testing.assert_array_equal(keys[0], keys[1])


def carried_keys(step, key):
    """The key words of every device, parameter and layer."""

    def body(step):
        params = {"query": jnp.zeros((LAYERS, 2, 2, 2)), "table": jnp.zeros((2, 2))}
        states = dict.fromkeys(params, ReduceState(None, None))
        carried = attach_residuals(
            params, states, DIMS, EncodeContext(step, jax.random.key(key)), LAYOUT
        )
        floats = {name: shard.residual.context for name, shard in carried.items()}
        moments = [jax.vmap(from_floats)(floats["query"])]
        moments += [jax.tree.map(lambda x: x[None], from_floats(floats["table"]))]
        words = [jax.random.key_data(one.key) for one in moments]
        return jnp.concatenate(words)[None]

    mesh = build_mesh(LAYOUT, jax.devices()[:8])
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P(), out_specs=P(LAYOUT.mesh_axes), check_vma=False
    )
    return np.asarray(jax.jit(mapped)(jnp.int32(step)))


def test_no_two_devices_parameters_or_layers_round_alike():
    words = carried_keys(5, 3)
    assert words.shape[:2] == (8, LAYERS + 1)
    each = words.reshape(8 * (LAYERS + 1), -1)
    assert len(np.unique(each, axis=0)) == len(each)
    np.testing.assert_array_equal(carried_keys(5, 3), words)
    assert not np.any(np.all(carried_keys(5, 4) == words, axis=-1))
