"""Megablox, in JAX's interpreter, against the specification; the tiles that it gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.experts import reference
from moejax.kernels.experts.megablox import TILE_BYTES, grouped_matmul, outer_tiles, product_tiles
from moejax.plan.trace.reader import read


def check(sizes, rows, K=128, N=256, dtype=jnp.bfloat16):
    """Compares the product and its gradients; what follows the last group is not even finite."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((rows, K), (len(sizes), K, N), (rows, N))]
    x, w, dy = (jnp.asarray(a, dtype) for a in arrays)
    sizes = jnp.asarray(sizes, jnp.int32)
    last = (jnp.arange(rows) < sizes.sum())[:, None]

    def run(multiply, x, dy, dtype):
        y, pull = jax.vjp(lambda x, w: multiply(x, w, sizes), x.astype(dtype), w.astype(dtype))
        return [y, *pull(dy.astype(dtype))]

    def kernel(x, w, sizes):
        return grouped_matmul(x, w, sizes, interpret=True)

    got = run(kernel, jnp.where(last, x, np.nan), jnp.where(last, dy, np.nan), dtype)
    wanted = run(
        reference.grouped_matmul, jnp.where(last, x, 0), jnp.where(last, dy, 0), jnp.float32
    )
    for have, want in zip(got, wanted, strict=True):
        assert have.dtype == dtype
        # Sums in float32, each result rounded once.
        bound = (2**-8 if dtype == jnp.bfloat16 else 1e-5) * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(np.asarray(have, np.float32), want, rtol=0, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[100, 0, 156], [3, 130, 60], [0, 0, 0]])
def test_product_and_gradients_are_those_of_the_specification(sizes):
    check(sizes, 256)


def test_rows_that_fill_no_tile():
    check([10, 20, 33], 70)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [256, 300, 1024])
@pytest.mark.parametrize("sizes", [[256], [0, 1, 255], [64] * 4, [128, 128], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize(("K", "N"), [(128, 128), (384, 256)])
def test_every_form(sizes, rows, K, N, dtype):
    check(sizes, rows, K, N, dtype)


# Rows, groups, width and hidden width: OLMoE, Qwen3-30B-A3B, Mixtral, DeepSeek-V3, gpt-oss.
SHAPES = [
    (20480, 8, 2048, 1024),
    (20480, 16, 2048, 768),
    (20480, 1, 4096, 14336),
    (20480, 16, 7168, 2048),
    (128, 4, 2944, 2944),
    (20608, 1, 4096, 14336),  # rows that larger tiles do not divide
]


@pytest.mark.parametrize(("M", "G", "D", "F"), SHAPES)
def test_tiles_divide_what_they_cover_and_fit(M, G, D, F):
    for K, N in ((D, 2 * F), (F, D)):
        for m, k, n in (product_tiles(M, G, K, N), product_tiles(M, G, N, K)):
            assert (M % m, K % k, N % n) == (0, 0, 0) or (M % m, N % k, K % n) == (0, 0, 0)
            assert 4 * (m * k + k * n + m * n) <= TILE_BYTES
        m, k, n = outer_tiles(M, K, N, G)
        assert (M % m, K % k, N % n) == (0, 0, 0)
        assert 4 * (m * k + m * n + 2 * k * n) <= TILE_BYTES


def test_matrices_are_read_once_a_group_where_a_tile_holds_all_that_is_summed_over():
    assert product_tiles(20480, 8, 2048, 2048) == (128, 2048, 1024)
    # 14336 rows of a matrix leave no room: larger tiles of rows read it less often.
    m, k, _ = product_tiles(20480, 1, 14336, 4096)
    assert (m, k < 14336) == (512, True)


def test_all_three_products_are_priced():
    x, w = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16), jnp.zeros((2, 128, 384), jnp.bfloat16)

    def total(x, w):
        return jnp.sum(grouped_matmul(x, w, jnp.array([100, 100])).astype(jnp.float32))

    schedule = read(jax.make_jaxpr(jax.value_and_grad(total, (0, 1)))(x, w))
    priced = [op for op in schedule.ops if op.flops]
    assert [op.flops for op in priced] == [2 * 256 * 128 * 384] * 3
    assert all(op.scales_with_fill for op in priced)
