"""Gradients summed hop by hop: the form in which they are scattered changes nothing."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm.weights.path import GatherSpec, ParamPath, reduction_hops
from moejax.comm.weights.reduce import sum_copies, sum_shards
from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout
from moejax.plan.trace.reader import collectives

MESH = {"replica": 2, "fsdp": 2, "expert": 2}


@pytest.mark.slow
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


@pytest.mark.parametrize(("micro_bytes", "pieces"), [(64, 8), (100, 5), (480, 1)])
def test_a_piece_has_at_most_so_many_bytes_of_all_shards_together(micro_bytes, pieces):
    """Four shards of 30 values, 480 bytes; pieces are equal but for the last."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(MESH))
    path = ParamPath(1, ("fsdp", "expert"), ("replica",), ())
    spec = GatherSpec(path, "float32", "float32", micro_bytes=micro_bytes)
    found = jax.eval_shape(
        jax.shard_map(
            lambda gradient: sum_shards(gradient, spec),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        ),
        jax.ShapeDtypeStruct((3, 8, 5), "float32"),
    )
    sizes = [part.size for part in found]
    assert len(sizes) == pieces
    assert sum(sizes) == 30
    assert max(sizes) * 4 * 4 <= micro_bytes


@pytest.mark.parametrize(
    ("replica", "fsdp", "nodes", "hops"), [(1, 1, 1, 1), (1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 4, 3)]
)
def test_hops_of_a_dense_gradient_are_inside_nodes_between_them_and_over_copies(
    replica, fsdp, nodes, hops
):
    mesh = MeshConfig(nodes=nodes, replica=replica, fsdp=fsdp, expert=8, tensor=1)
    assert reduction_hops("DHC", build_layout(mesh)) == hops


@pytest.mark.parametrize(("across", "hops"), [("use", ["expert", "fsdp"]), ("step", ["expert"])])
def test_a_micro_batch_leaves_the_hop_between_nodes_where_weights_cross_once_a_step(across, hops):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(MESH))
    path = ParamPath(1, ("fsdp", "expert"), (), ("fsdp",))
    spec = GatherSpec(path, "float32", "float32", across=across)
    summed = jax.shard_map(
        lambda gradient: sum_shards(gradient, spec),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    traced = jax.make_jaxpr(summed)(jax.ShapeDtypeStruct((3, 8, 5), "float32"))
    assert [one.axes for one in collectives(traced.jaxpr)] == [(axis,) for axis in hops]
