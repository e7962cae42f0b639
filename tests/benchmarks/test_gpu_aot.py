"""What the GPU benchmark runs, compiled for a described H200: it fits and has our kernels."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.gpu import chunks, layers, products, shapes
from moejax.aot.target import TARGETS, describe_devices
from moejax.config.load import load_config
from moejax.runtime.patches import described_gpu
from tests.kernels.mosaic.described import compile_kernels

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("compiled_anew")]


def test_the_step_fits_one_gpu_and_has_our_kernels():
    devices = describe_devices(TARGETS["h200"], 1)
    train_step = layers.one_device_step(load_config(layers.CONFIG), devices)
    assert (train_step.spec.experts, train_step.spec.attention) == ("mosaic", "cudnn_masked")
    with described_gpu():
        lowered = train_step.step.lower(train_step.abstract, train_step.abstract_batch())
    compiled = lowered.compile()
    peak = compiled.memory_analysis().peak_memory_in_bytes
    print(f"peak {peak / 2**30:.1f} GiB")
    assert peak < TARGETS["h200"].memory_bytes
    assert "mosaic_gpu" in compiled.as_text()


def compiled_layer(layer, mesh):
    """The text of a layer of OLMoE, forward and backward, on 4,096 tokens."""
    whole = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((1, 4096, shapes.OLMOE.D), jnp.bfloat16)
    arrays = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
        (layer.params, layer.bias, x, x),
    )
    return layer.both_ways.lower(*arrays).compile().as_text()


def test_the_layer_compiles_with_our_kernels():
    devices = describe_devices(TARGETS["h200"], 1)
    train_step = layers.one_device_step(layers.layer_config(shapes.OLMOE), devices)
    text = compiled_layer(layers.build_layer(train_step), train_step.mesh)
    assert "mosaic_gpu" in text


@pytest.mark.exhaustive
def test_each_chunk_has_its_own_products():
    """Forward two kernels, backward four; where gate and up are kept, none runs twice."""
    devices = describe_devices(TARGETS["h200"], 1)
    mesh = layers.one_device_step(layers.layer_config(shapes.OLMOE), devices).mesh
    for count, remat in ((1, "none"), (4, "none"), (4, "experts")):
        layer = chunks.layer_in_chunks(shapes.OLMOE, devices, count, remat)
        kernels = compiled_layer(layer, mesh).count('custom_call_target="mosaic_gpu')
        assert kernels == 6 * count, (count, remat)


@pytest.mark.parametrize("operation", ["forward", "data gradient", "weight gradient"])
def test_a_gradient_is_one_kernel(monkeypatch, tmp_path, operation):
    """So that what is timed is that one and not the forward product too."""
    run = products.product(operation, "mosaic")
    bfloat16 = jnp.bfloat16
    shapes = [((4096, 2048), bfloat16), ((8, 2048, 1536), bfloat16), ((4096, 1536), bfloat16)]
    shapes.append(((8,), jnp.int32))
    found = compile_kernels(run, *shapes, monkeypatch=monkeypatch, directory=tmp_path)
    assert len(found) == 1
    assert found[0].spilled_bytes == 0
