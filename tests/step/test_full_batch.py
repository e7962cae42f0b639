"""What a step does once for all micro-batches: adaptive codecs choose one level on all devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.comm.cpu.gloo import shard_map
from moejax.comm.weights.compressed import ReduceState
from moejax.config.compression import CodecSpec
from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.step.full_batch import choose_levels
from moejax.step.state import Reduction

# Of 10 squares each device loses so many at level 1: each tensor rank has shards of its own.
LOST = np.array([9, 1, 9, 1], np.float32)  # replica 0: tensor 0 and 1, replica 1: the same


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(("keep", "level"), [(0.4, 1), (0.6, 0)])
def test_all_devices_take_the_level_that_their_errors_together_allow(keep, level):
    """Together half of the squares are kept; one tensor rank alone keeps 0.9, the other 0.1."""
    layout = build_layout(MeshConfig(replica=2, tensor=2, nodes=2))
    mesh = build_mesh(layout, jax.devices()[:4])
    levels = (CodecSpec("int8"), CodecSpec("topk", 0.2))
    codec = CodecSpec("adaptive", keep, levels=levels, measures=True)
    codecs = SimpleNamespace(dense_gradient=codec, expert_gradient=None)
    spec = SimpleNamespace(codecs=codecs)
    model = SimpleNamespace(spec=spec, layout=layout, dims={"w": "DHC"})

    def body(lost_1: jax.Array, before: jax.Array) -> jax.Array:
        # The end of a state: squared errors of both levels, then the sum of squares.
        parts = jnp.stack([jnp.float32(0), lost_1[0], jnp.float32(10)])[None]
        after = choose_levels(model, Reduction(None, before), {"w": ReduceState(parts, None)})
        return after.levels[None]

    every = P(layout.mesh_axes)
    found = jax.jit(shard_map(body, mesh, (every, P()), every))(LOST, np.array([0, 7], np.int32))
    np.testing.assert_array_equal(found, [[level, 7]] * 4)
