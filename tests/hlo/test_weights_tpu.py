"""Gradients of weights summed on described TPU slices of sixteen: `make aot-tpu` only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.aot.compiled import CompiledText
from moejax.aot.target import TARGETS, describe_devices
from moejax.comm import wire
from moejax.comm.weights.path import GatherSpec, ParamPath
from moejax.comm.weights.reduce import sum_shards
from moejax.runtime.compiler import compiler_options

AXES = {"fsdp": 2, "expert": 8}
WIDTH = 2048
slices = pytest.mark.parametrize("name", ["v5p_16", "v6e_16"])
pytestmark = [pytest.mark.aot_tpu, pytest.mark.usefixtures("compiled_anew")]


def spec_of(dim, gather):
    path = ParamPath(dim, gather, copies=(), slow=("fsdp",))
    return GatherSpec(path, dtype="bfloat16", gradient_dtype="float32", rows=True)


def layers(x, weights, experts):
    """Four layers of products, of which each sums the gradients of its two weights."""

    def layer(x, _):
        dense = jnp.einsum("td,tf->df", x, x, preferred_element_type=jnp.float32)
        rows = x.reshape(8, -1, WIDTH)
        group = jnp.einsum("gtd,gtf->gdf", rows, rows, preferred_element_type=jnp.float32)
        sums = sum_shards(dense, spec_of(1, ("fsdp", "expert")))
        sums += sum_shards(group, spec_of(1, ("fsdp",)))
        gathered = wire.all_gather(weights, ("fsdp", "expert"), dim=0, tag=None)
        x = jax.nn.relu(x @ gathered)
        wide = wire.all_gather(experts, ("fsdp",), dim=1, tag=None)
        return jnp.einsum("gtd,gdf->gtf", x.reshape(rows.shape), wide).reshape(x.shape), sums

    return jax.lax.scan(layer, x[0], None, length=4)


@functools.cache
def exchanges(name, **options):
    """The large collectives of the layers, compiled with the trainer's options or with others."""
    devices = describe_devices(TARGETS[name], 2)
    mesh = Mesh(np.array(devices).reshape(tuple(AXES.values())), tuple(AXES))
    every = P(tuple(AXES))
    arrays = [((16, 8192, WIDTH), every), ((WIDTH, WIDTH), every)]
    arrays += [((8, WIDTH, WIDTH), P(None, "fsdp"))]
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in arrays
    ]
    mapped = jax.shard_map(
        layers,
        mesh=mesh,
        in_specs=tuple(spec for _, spec in arrays),
        out_specs=P(),
        check_vma=False,
    )
    chosen = options or compiler_options("tpu", hops=1)
    text = jax.jit(mapped, compiler_options=chosen).lower(*arguments).compile().as_text()
    return [one for one in CompiledText(text, AXES).exchanges() if one.bytes > 1e6]


@slices
def test_gradients_are_scattered_and_never_sent_twice(name):
    sums = {(one.kind, one.axes) for one in exchanges(name) if one.kind != "all_gather"}
    assert sums == {("reduce_scatter", ("expert",)), ("reduce_scatter", ("fsdp",))}


@slices
def test_weights_and_gradients_travel_while_products_run(name):
    sent = {True: 0.0, False: 0.0}
    for one in exchanges(name):
        sent[one.hides] += one.wire_bytes(AXES)
    assert sent[True] > 2 * sent[False]


def test_control_by_default_weights_are_waited_for():
    assert not any(one.hides for one in exchanges("v6e_16", xla_tpu_enable_async_all_to_all="true"))
