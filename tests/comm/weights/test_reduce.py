"""Gradients summed hop by hop: the form in which they are scattered changes nothing."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm.weights.path import GatherSpec, ParamPath
from moejax.comm.weights.reduce import sum_copies, sum_shards

MESH = {"replica": 2, "fsdp": 2, "expert": 2}


@pytest.mark.parametrize("micro_bytes", [None, 64])
@pytest.mark.parametrize("slow", [(), ("fsdp",), ("replica",)])
@pytest.mark.parametrize(
    ("gather", "copies"), [(("fsdp", "expert"), ("replica",)), (("replica", "fsdp"), ())]
)
def test_a_gradient_scattered_by_rows_is_the_same_sum(gather, copies, slow, micro_bytes):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(MESH))
    gradients = np.random.default_rng(0).integers(-9, 9, (8, 3, 8, 5)).astype(np.float32)

    def summed(rows):
        path = ParamPath(1, gather, copies, slow)
        spec = GatherSpec(path, "float32", "float32", micro_bytes=micro_bytes, rows=rows)

        def body(gradient):
            parts = sum_shards(gradient[0], spec)
            return sum_copies(parts, (3, 2, 5), spec, None, None)[0][None]

        every = P(tuple(MESH))
        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
        )(gradients)

    np.testing.assert_array_equal(summed(rows=True), summed(rows=False))
