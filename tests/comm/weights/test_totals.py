"""Gradients of micro-batches: adding up what devices keep, and reducing once, gives the same bits.

Cotangents are whole numbers, whose sums are exact in any order.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moejax.comm import wire
from moejax.comm.weights.gather import empty_totals, gather_float32, replicated_weight
from moejax.comm.weights.residuals import attach_residuals, detach_residuals, residual_shapes
from moejax.comm.weights.shard import attach
from moejax.config.schema import CompressionConfig
from tests.cases import part_of, small_config, step_for

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

SIZES = dict(zip("DHCEUFV", (8, 4, 4, 8, 2, 4, 8), strict=True))
PARTS = 3
CASES = [  # mesh, nodes, codec, largest piece
    ((2, 2, 1, 2), 1, "none", None),
    ((2, 2, 2, 1), 1, "none", 64),
    ((2, 2, 2, 1), 1, "none", 24),  # below a norm's 32 bytes
    ((2, 2, 2, 1), 2, "none", None),
    ((4, 2, 1, 1), 2, "none", 64),
    ((1, 4, 2, 1), 2, "none", None),
    ((2, 4, 1, 1), 4, "none", None),  # shards in nodes and across, copies across
    ((4, 2, 1, 1), 2, "int8+feedback", None),
    ((2, 4, 1, 1), 4, "int8+feedback", None),
]


def train_step(mesh, nodes, codec, micro_bytes):
    cfg = small_config(mesh, train={"reduction_bytes": micro_bytes})
    policy = CompressionConfig(block=8, dense_gradient=codec, expert_gradient=codec)
    return step_for(
        dataclasses.replace(
            cfg, compression=policy, mesh=dataclasses.replace(cfg.mesh, nodes=nodes)
        )
    )


def gradients(step, dims, parts):
    """The gradient and the codec's state of every device, [devices, ...], in one and in parts."""
    param = jnp.ones([SIZES[letter] for letter in dims])
    return jax.jit(mapped(step, dims, parts, param))(param)


def mapped(step, dims, parts, param):
    """What computes `gradients`."""
    layout, spec = step.layout, step.model.spec
    shape = residual_shapes(spec, param, dims, spec.layout)

    def enter(entry):
        held = nnx.Param(entry, dims=dims)
        return replicated_weight(held) if layout.is_replicated(dims) else gather_float32(held, spec)

    def pull(entry, cotangent):
        return jax.vjp(enter, entry)[1](cotangent)[0]

    def body(shard):
        state = None if shape is None else jax.tree.map(lambda s: jnp.ones(s.shape[1:]), shape)
        state = jax.tree.map(lambda s: s[None], state)
        own = jax.random.fold_in(jax.random.key(7), wire.index(layout.mesh_axes))
        gathered = jax.eval_shape(enter, shard).shape
        drawn = jax.random.randint(own, (PARTS, *gathered), -50, 50).astype(jnp.float32)
        entry = attach_residuals(shard, state, dims, jnp.int32(3))
        if parts == 1:
            found = pull(entry, drawn.sum(axis=0))
        else:
            total = empty_totals(shard, dims, spec)
            for cotangent in drawn[:-1]:
                own = pull(attach(shard, totals=total, last=False), cotangent).total
                total = jax.tree.map(jnp.add, total, own)
            found = pull(attach(entry, totals=total), drawn[-1])
        return jax.tree.map(lambda x: x[None], detach_residuals(found, dims))

    return jax.shard_map(
        body,
        mesh=step.mesh,
        in_specs=layout.param_spec(dims, len(dims)),
        out_specs=P(layout.mesh_axes),
        check_vma=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dims"), part_of([(case,) for case in CASES], ["DHC", "EDUF", "VD", "D"], parts=4)
)
def test_parts_give_the_bits_of_their_sum(case, dims):
    step = train_step(*case)
    one, several = gradients(step, dims, 1), gradients(step, dims, PARTS)
    assert np.abs(one[0]).max() > 50
    assert jax.tree.structure(one) == jax.tree.structure(several)
    for alone, summed in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
        np.testing.assert_array_equal(np.asarray(summed), np.asarray(alone))


@settings(max_examples=12)
@given(
    piece=st.integers(1, 80),
    mesh=st.sampled_from([((2, 2, 2, 1), 1), ((4, 2, 1, 1), 2)]),
    dims=st.sampled_from(["D", "HC", "DHC"]),
)
@example(1, ((2, 2, 2, 1), 1), "D")
@example(31, ((4, 2, 1, 1), 2), "D")  # a byte less than it has
def test_pieces_of_any_size_add_up(piece, mesh, dims):
    """Tracing alone: a sum and what is added to it have the same parts."""
    step = train_step(*mesh, "none", piece)
    param = jax.ShapeDtypeStruct([SIZES[letter] for letter in dims], jnp.float32)
    found = jax.eval_shape(mapped(step, dims, PARTS, param), param)[0]
    wanted = jax.eval_shape(mapped(step, dims, 1, param), param)[0]
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
