"""The products that tokamax makes, where it is installed: the reference's numbers, for Hopper."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend

from moejax.kernels.experts import reference
from moejax.kernels.experts.grouped_matmul import grouped_matmul
from tests.kernels.mosaic.described import compile_kernels
from tests.kernels.mosaic.interpreter import interpreted
from tests.kernels.mosaic.test_grouped_matmul import HALF_STEP, draw, exactly

pytest.importorskip("tokamax", reason="tokamax is not installed: it is moejax[kernels]")


@dataclass(frozen=True)
class Hopper:
    """What tokamax asks of JAX's default device: it writes its kernels for that."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"
    core_count: int = 132


@pytest.fixture(autouse=True)
def for_hopper(monkeypatch):
    monkeypatch.setattr(backend, "get_default_device", Hopper)


def pulled(sizes, x, w, gradient):
    """The product, and its gradients by rows and by weights."""
    counts = jnp.asarray(sizes, jnp.int32)
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, counts, implementation="tokamax"), x, w)
    return y, *pull(gradient)


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
