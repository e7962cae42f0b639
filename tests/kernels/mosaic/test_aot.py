"""The kernels compiled for a described H200: resources, no spills, and the instructions they need.

The interpreter takes programs that the compiler refuses, so both must pass.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from moejax.kernels.experts.expert_mlp import expert_mlp
from moejax.kernels.experts.grouped_matmul import grouped_matmul
from moejax.kernels.experts.grouped_matmul_e4m3 import grouped_matmul_e4m3
from moejax.kernels.experts.quantize import Quantized, dequantize_sum, quantize
from moejax.kernels.experts.quantized_rows import dequantize_combine, permute_quantize
from moejax.kernels.formats import FORMATS
from tests.cases import part_of
from tests.kernels.mosaic.described import compile_kernels

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("compiled_anew")]


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    def compiled(function, *shapes):
        return compile_kernels(function, *shapes, monkeypatch=monkeypatch, directory=tmp_path)

    return compiled


def check(kernel, *, registers, blocks, loads=1, stores=1, wgmma=0):
    """`blocks`: at least so many share a multiprocessor."""
    print(kernel, f"{kernel.blocks} blocks")
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= registers
    assert kernel.blocks >= blocks
    assert kernel.bulk_loads >= loads
    assert kernel.bulk_stores >= stores
    assert kernel.wgmma >= wgmma


def bytes_a_block(name, block=128):
    return block * FORMATS[name].bits // 8


@pytest.mark.parametrize(("dtype", "name"), part_of([jnp.float32, jnp.bfloat16], [*FORMATS]))
def test_quantize(kernels, name, dtype):
    def run(x):
        return quantize(x, name, block=128, implementation="mosaic")

    (kernel,) = kernels(run, ((1000, 4096), dtype))
    check(kernel, registers=96, blocks=5, stores=2)


@pytest.mark.parametrize(("peers", "name"), part_of([1, 8], [*FORMATS]))
def test_dequantize_sum(kernels, name, peers):
    def run(values, scale):
        q = Quantized(values, scale)
        return dequantize_sum(q, name, 4096, dtype=jnp.bfloat16, implementation="mosaic")

    values = (peers, 1000, 32, bytes_a_block(name))
    (kernel,) = kernels(run, (values, jnp.uint8), ((peers, 1000, 32), jnp.float32))
    check(kernel, registers=160, blocks=3, loads=2)


@pytest.mark.parametrize("block", [32, 64, 256])
def test_other_blocks(kernels, block):
    def run(x):
        q = quantize(x, "int4", block=block, implementation="mosaic")
        return dequantize_sum(q, "int4", 1000, implementation="mosaic")

    for kernel in kernels(run, ((3, 11, 1000), jnp.bfloat16)):
        check(kernel, registers=255, blocks=1, loads=1)


# Of OLMoE and Qwen3-30B-A3B, Mixtral and Qwen3-235B-A22B, DeepSeek-V3.
ROWS = part_of([2048, 4096, 7168], ["int8", "int4", "e4m3"], parts=3)


@pytest.mark.parametrize(("width", "name"), ROWS)
@pytest.mark.parametrize("weighted", [False, True])
def test_permute_quantize(kernels, width, name, weighted):
    def run(x, source, *weight):
        options = {"weight_M": weight[0]} if weight else {}
        return permute_quantize(x, source, name, block=128, implementation="mosaic", **options)

    shapes = [((4096, width), jnp.bfloat16), ((32768,), jnp.int32), ((32768,), jnp.float32)]
    (kernel,) = kernels(run, *shapes[: 2 + weighted])
    check(kernel, registers=104, blocks=4, stores=2)


@pytest.mark.parametrize(("width", "name"), ROWS)
def test_dequantize_combine(kernels, width, name):
    N, K, M, B = 4096, 8, 32768, width // 128

    def run(values, scale, weight, place):
        options = {"dtype": jnp.bfloat16, "implementation": "mosaic"}
        return dequantize_combine(Quantized(values, scale), weight, place, name, width, **options)

    shapes = [((M, B, bytes_a_block(name)), jnp.uint8), ((M, B), jnp.float32)]
    (kernel,) = kernels(run, *shapes, ((N, K), jnp.float32), ((N, K), jnp.int32))
    check(kernel, registers=168, blocks=2, loads=2)


@pytest.mark.parametrize("block", [32, 64, 256])
def test_rows_of_other_blocks(kernels, block):
    N, K, M, D = 4096, 8, 32768, 2048

    def run(x, source, weight_M, weight, place):
        q = permute_quantize(
            x, source, "int8", block=block, weight_M=weight_M, implementation="mosaic"
        )
        options = {"dtype": jnp.bfloat16, "implementation": "mosaic"}
        return dequantize_combine(q, weight, place, "int8", D, **options)

    shapes = [((N, D), jnp.bfloat16), ((M,), jnp.int32), ((M,), jnp.float32)]
    found = kernels(run, *shapes, ((N, K), jnp.float32), ((N, K), jnp.int32))
    assert [kernel.name for kernel in found] == ["permute_quantize_tile", "combine_tile"]
    for kernel in found:
        check(kernel, registers=255, blocks=1)


# Rows, width, hidden width and experts of a device: OLMoE and Mixtral on 8, Qwen3-30B-A3B on 16.
SHAPES = [
    (65536, 2048, 1024, 8),
    *(
        pytest.param(*shape, marks=pytest.mark.exhaustive)
        for shape in ((16384, 4096, 14336, 1), (65536, 2048, 768, 8))
    ),
]


@pytest.mark.parametrize("implementation", ["mosaic", "mosaic_e4m3"])
@pytest.mark.parametrize(("M", "D", "F", "G"), SHAPES)
def test_expert_mlp_forward_and_backward(kernels, M, D, F, G, implementation):
    bfloat16, in_e4m3 = jnp.bfloat16, implementation == "mosaic_e4m3"
    M //= 1 + in_e4m3  # a kernel that was compiled before is not compiled again: nothing is said

    def run(x, w_in, w_out, sizes, gradient):
        def forward(*arrays):
            return expert_mlp(*arrays, sizes, implementation=implementation)

        y, pull = jax.vjp(forward, x, w_in, w_out)
        return y, pull(gradient)

    shapes = [((M, D), bfloat16), ((G, D, 2, F), bfloat16), ((G, F, D), bfloat16)]
    found = kernels(run, *shapes, ((G,), jnp.int32), ((M, D), bfloat16))
    found = [kernel for kernel in found if kernel.wgmma or not in_e4m3]
    # Forward, and each of its gradients by rows and by weights.
    forward = "multiply_e4m3_tiles" if in_e4m3 else "multiply_tiles"
    wanted = Counter([forward] * 2 + ["multiply_tiles"] * 2 + ["sum_outer"] * 2)
    assert Counter(kernel.name for kernel in found) == wanted
    for kernel in found:
        # Of 65,536 registers for 384 threads; those that multiply take what the third gives up.
        check(kernel, registers=168, blocks=1, loads=3, wgmma=8)
        assert kernel.threads == 384
        assert not kernel.serialized
        assert kernel.wgmma_e4m3 == kernel.wgmma * (kernel.name == "multiply_e4m3_tiles")


@pytest.mark.parametrize("multiply", [grouped_matmul, grouped_matmul_e4m3])
def test_products_of_sizes_that_fill_no_tile(kernels, multiply):
    def run(x, w, sizes):
        return multiply(x, w, sizes, implementation="mosaic")

    shapes = ((1001, 2880), jnp.bfloat16), ((3, 2880, 960), jnp.bfloat16), ((3,), jnp.int32)
    (kernel,) = (kernel for kernel in kernels(run, *shapes) if kernel.wgmma)
    check(kernel, registers=168, blocks=1, loads=3, wgmma=8)
