"""tokamax's products and attention, where it is installed: the reference's numbers, for Hopper."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.attention.ranged import Extent, Keys, ranged_attention, ranges
from moejax.kernels.experts import reference
from moejax.kernels.experts.grouped_matmul import grouped_matmul
from moejax.runtime.patches import described_gpu
from tests.kernels.mosaic.described import compile_kernels
from tests.kernels.mosaic.interpreter import interpreted
from tests.kernels.mosaic.test_grouped_matmul import HALF_STEP, draw, exactly

pytest.importorskip("tokamax", reason="tokamax is not installed: it is moejax[kernels]")


@pytest.fixture(autouse=True)
def for_hopper():
    with described_gpu():
        yield


def pulled(sizes, x, w, gradient):
    """The product, and its gradients by rows and by weights."""
    counts = jnp.asarray(sizes, jnp.int32)
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, counts, implementation="tokamax"), x, w)
    return y, *pull(gradient)


@pytest.mark.aot
@pytest.mark.parametrize("sizes", [[70, 0, 50], [120]])
def test_its_products_are_those_of_the_reference(sizes):
    """Gradients are compiled below and not run: their left side is in registers, where JAX's
    interpreter (0.12.0.1) takes none."""
    rng, K, N, M = np.random.default_rng(0), 128, 256, 128
    x, w, counts = draw(rng, M, K), draw(rng, len(sizes), K, N), jnp.asarray(sizes)
    with interpreted():
        got = np.asarray(grouped_matmul(x, w, counts, implementation="tokamax"), np.float64)
    want, *_ = exactly(lambda x, w: reference.grouped_matmul(x, w, counts), x, w, jnp.zeros((M, N)))
    noise = K * np.finfo(np.float32).eps * np.abs(want).max()
    assert np.all(np.abs(got - want) <= np.abs(want) * HALF_STEP + noise)
    assert not got[sum(sizes) :].any()


@pytest.mark.aot
def test_its_kernels_compile_for_hopper(monkeypatch, tmp_path):
    M, K, N, G = 65536, 2048, 1024, 8
    shapes = [((G,), jnp.int32)]
    shapes += [(shape, jnp.bfloat16) for shape in ((M, K), (G, K, N), (M, N))]
    found = compile_kernels(pulled, *shapes, monkeypatch=monkeypatch, directory=tmp_path)
    assert len(found) == 3, "the product, and its gradients by rows and by weights"
    for kernel in found:
        print(kernel)
        assert kernel.wgmma
        assert kernel.spilled_bytes == 0


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore:core.Jaxpr is missing a DebugInfo:DeprecationWarning")
def test_its_attention_is_told_what_its_kernels_take(monkeypatch):
    """By its plain forms, which take the same arguments and run here."""
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu, pallas_mosaic_gpu_vjp

    attend, pull = "PallasMosaicGpuFlashAttention", "PallasMosaicGpuFlashAttentionVjp"
    monkeypatch.setattr(pallas_mosaic_gpu, attend, base.DotProductAttention)
    monkeypatch.setattr(pallas_mosaic_gpu_vjp, pull, base.DotProductAttentionVjp)
    rng = np.random.default_rng(0)
    shapes = (12, 4, 8), (20, 2, 8), (20, 2, 8), (12, 4, 8)
    q, k, v, dy = (jnp.asarray(rng.standard_normal((2, *s)), jnp.float32) for s in shapes)
    segment = jnp.asarray(np.sort(rng.integers(0, 3, (2, 20)), axis=1), jnp.int32)
    first, last = ranges(segment, jnp.asarray(rng.permutation(20)[:12]), 7)

    def run(name, cuts, sinks):
        def attend(q, k, v):
            pieces = [
                Keys(k[:, a:b], v[:, a:b], jnp.maximum(first - a, 0), jnp.minimum(last, b - 1) - a)
                for a, b in pairwise(cuts)
            ]
            options = {"scale": 0.7, "implementation": name, "sinks_H": sinks}
            extents = (Extent((0,), None, None),) * len(pieces)
            return ranged_attention(q, tuple(pieces), extents, **options)

        return jax.vjp(attend, q, k, v)

    y, _ = run("tokamax", (0, 9, 20), sinks := jnp.array([-1.0, 0, 1, 2]))
    np.testing.assert_allclose(y, run("blocked", (0, 9, 20), sinks)[0], atol=2e-5)
    # The plain form computes maximum and sum again, so that they are those of one piece alone.
    results = [run(name, (0, 20), None)[1](dy) for name in ("tokamax", "blocked")]
    for have, want in zip(*results, strict=True):
        np.testing.assert_allclose(have, want, atol=2e-5)


@pytest.mark.aot
@pytest.mark.parametrize(("keys", "values"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_its_attention_compiles_for_hopper(monkeypatch, tmp_path, keys, values):
    """With sinks, in two pieces: forward, and backward by queries and by keys, of each."""

    def total(q, k, v, first, last, sinks):
        pieces = tuple(
            Keys(k[:, a:b], v[:, a:b], jnp.maximum(first - a, 0), jnp.minimum(last, b - 1) - a)
            for a, b in ((0, 512), (512, 1024))
        )
        options = {"scale": 0.1, "implementation": "tokamax", "sinks_H": sinks}
        y = ranged_attention(q, pieces, (Extent((512,), None, None),) * 2, **options)
        return jnp.sum(y.astype(jnp.float32))

    shapes = [((1, 512, 8, keys), jnp.bfloat16), ((1, 1024, 2, keys), jnp.bfloat16)]
    shapes += [((1, 1024, 2, values), jnp.bfloat16), *[((1, 512), jnp.int32)] * 2]
    shapes += [((8,), jnp.float32)]
    gradients = jax.grad(total, (0, 1, 2, 5))
    found = compile_kernels(gradients, *shapes, monkeypatch=monkeypatch, directory=tmp_path)
    for kernel in found:
        print(kernel)
        assert kernel.wgmma
    assert len(found) >= 3
