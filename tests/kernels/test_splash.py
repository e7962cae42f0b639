"""The splash kernel, in JAX's interpreter, against the library's whole-batch form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.attention import splash
from moejax.kernels.attention.attention import attention
from moejax.kernels.attention.splash import splash_attention
from moejax.plan.trace.reader import read

LENGTH = 512


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks each way, in little time."""
    monkeypatch.setattr(splash, "BLOCK", 128)
    monkeypatch.setattr(splash, "FUSED_BLOCK", 256)


def run(forward, arrays, gradient):
    """The result, and gradients of all arrays."""
    y, pull = jax.jit(lambda arrays: jax.vjp(forward, *arrays))(arrays)
    return [y, *pull(gradient)]


def check(*, heads=(2, 2), widths=(32, 32), window=None, sinks=False, isolated=True, seed=0):
    """Compares results and gradients where documents end inside blocks."""
    rng = np.random.default_rng(seed)
    counts = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])]
    shapes = [(2, LENGTH, *count) for count in counts]
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    if sinks:
        arrays.append(jnp.asarray(rng.standard_normal(heads[0]), jnp.float32))
    dy = jnp.asarray(rng.standard_normal((2, LENGTH, heads[0], widths[1])), jnp.float32)
    segment = jnp.asarray(np.sort(rng.integers(0, 4, (2, LENGTH)), axis=1), jnp.int32)
    segment = segment if isolated else jnp.zeros_like(segment)

    def kernel(q, k, v, *sinks):
        told = {"window": window, "scale": 0.2, "sinks_H": sinks[0] if sinks else None}
        return splash_attention(q, k, v, segment if isolated else None, interpret=True, **told)

    def reference(q, k, v, *sinks):
        told = {"window": window, "scale": 0.2, "sinks_H": sinks[0] if sinks else None}
        return attention(q, k, v, segment, implementation="reference", **told)

    got, wanted = run(kernel, arrays, dy), run(reference, arrays, dy)
    for have, want in zip(got, wanted, strict=True):
        bound = 8 * LENGTH * np.finfo(np.float32).eps * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"isolated": False}, marks=pytest.mark.slow),
        {"heads": (4, 2), "widths": (24, 16)},
        pytest.param({"window": 5}, marks=pytest.mark.slow),
        {"heads": (4, 1), "window": 130, "sinks": True},
    ],
    ids=str,
)
def test_documents_windows_grouped_heads_widths_and_sinks(case):
    check(**case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 300, 512, 600])
@pytest.mark.parametrize(("heads", "widths"), [((2, 2), (16, 16)), ((6, 2), (24, 16))])
def test_every_form(heads, widths, window, sinks, isolated):
    check(heads=heads, widths=widths, window=window, sinks=sinks, isolated=isolated)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 8])
def test_gradients_are_the_same_in_one_kernel_and_in_two(monkeypatch, parts):
    monkeypatch.setattr(splash, "FUSED_PARTS", parts)
    check(widths=(16, 16))


def test_bfloat16_stays_near_float32():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((1, LENGTH, 2, 16)), jnp.float32) for _ in "qkvd"]
    segment = jnp.zeros((1, LENGTH), jnp.int32)

    def kernel(q, k, v):
        return splash_attention(q, k, v, segment, window=None, scale=0.25, interpret=True)

    def reference(q, k, v):
        return attention(q, k, v, segment, window=None, scale=0.25, implementation="reference")

    low = [x.astype(jnp.bfloat16) for x in arrays]
    got, wanted = run(kernel, low[:3], low[3]), run(reference, arrays[:3], arrays[3])
    for have, want in zip(got, wanted, strict=True):
        assert have.dtype == jnp.bfloat16
        assert np.abs(np.asarray(have, np.float32) - want).max() < 2**-5 * np.abs(want).max()


def priced(window, implementation="splash"):
    """FLOPs of the forward and the backward pass as the planner reads them."""
    q, k = (jax.ShapeDtypeStruct((2, LENGTH, heads, 16), jnp.bfloat16) for heads in (4, 2))
    v = jax.ShapeDtypeStruct((2, LENGTH, 2, 8), jnp.bfloat16)
    segment = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)

    def total(q, k, v, segment):
        y = attention(q, k, v, segment, window=window, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32))

    schedule = read(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, k, v, segment))
    return [op.flops for op in schedule.ops if op.flops]


@pytest.mark.parametrize("implementation", ["splash", "splash_whole"])
def test_blocks_that_it_visits_are_priced(implementation):
    """Of four blocks of queries, and as many of keys forward, half as many backward."""
    forward, backward = 10 * 128 * 128, 6 * 128 * 256
    assert priced(None, implementation) == [
        2 * 2 * 4 * forward * (16 + 8),
        2 * 2 * 4 * backward * (3 * 16 + 2 * 8),
    ]
    # A window leaves the block of the diagonal and the one before, and the backward pass two
    # kernels, which compute scores each.
    near = 7 * 128 * 128
    assert priced(100, implementation) == [
        2 * 2 * 4 * near * (16 + 8),
        2 * 2 * 4 * near * (4 * 16 + 3 * 8),
    ]
