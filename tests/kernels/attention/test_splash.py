"""The splash kernel, in JAX's interpreter, told ranges of keys, against every pair in float64."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.attention import splash
from moejax.kernels.attention.attention import attention
from moejax.kernels.attention.ranged import Extent, Keys, ranged_attention, ranges
from moejax.plan.trace.reader import read
from moejax.plan.trace.schedule import walk
from tests.kernels.attention.test_ranged import dense

LENGTH = 512


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks each way, in little time."""
    monkeypatch.setattr(splash, "BLOCK", 128)
    monkeypatch.setattr(splash, "FUSED_BLOCK", 256)
    monkeypatch.setattr(splash, "INTERPRET", True)


def run(forward, arrays, gradient):
    """The result, and gradients of all arrays."""
    y, pull = jax.jit(lambda arrays: jax.vjp(forward, *arrays))(arrays)
    return [y, *pull(gradient)]


def check(
    *, heads=(2, 2), widths=(16, 16), keys=(256, 512), run_of=256, window=None, sinks=False, seed=0
):
    """Compares results and gradients with the formula, in pieces of keys that end at `keys`.

    Queries are the last run of `run_of` positions of each piece, so that they lie in two runs.
    Documents end inside blocks. The first sequence's first query sees nothing.
    """
    rng, length = np.random.default_rng(seed), keys[-1]
    borders = [0, *keys]
    position = np.concatenate([np.arange(end - run_of, end) for end in keys])
    counts = (heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])
    lengths = len(position), length, length
    q, k, v = (
        rng.standard_normal((2, size, *count)) for size, count in zip(lengths, counts, strict=True)
    )
    dy = rng.standard_normal((2, len(position), heads[0], widths[1]))
    segment = jnp.asarray(np.sort(rng.integers(0, 4, (2, length)), axis=1), jnp.int32)
    first, last = (np.array(x) for x in ranges(segment, jnp.asarray(position), window))
    last[0, 0] = -1
    sink = rng.standard_normal(heads[0]) if sinks else np.full(heads[0], -np.inf)

    def kernel(q, k, v, *sinks):
        pieces = tuple(
            Keys(k[:, a:b], v[:, a:b], jnp.maximum(first - a, 0), jnp.minimum(last, b - 1) - a)
            for a, b in pairwise(borders)
        )
        extents = (Extent((0,), window, window, run=run_of),) * len(pieces)
        options = {"scale": 0.3, "implementation": "splash"}
        return ranged_attention(q, pieces, extents, sinks_H=sinks[0] if sinks else None, **options)

    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, *([sink] if sinks else []))]
    got = run(kernel, arrays, jnp.asarray(dy, jnp.float32))
    place = np.arange(length)
    seen = (place >= first[..., None]) & (place <= last[..., None])
    wanted = dense(q, k, v, sink, seen, 0.3, dy)
    for have, want in zip(got, wanted[: len(got)], strict=True):
        bound = 8 * length * np.finfo(np.float32).eps * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


WHOLE = {"keys": (LENGTH,), "run_of": LENGTH}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(WHOLE, marks=pytest.mark.slow),
        WHOLE | {"heads": (4, 1), "window": 130, "sinks": True},
        pytest.param({"window": 5}, marks=pytest.mark.slow),
        {"heads": (4, 2), "widths": (24, 16), "run_of": 128, "window": 100},
        pytest.param({"run_of": 50, "sinks": True}, marks=pytest.mark.slow),
        pytest.param({"keys": (70, 300), "run_of": 45, "window": 90}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_documents_windows_runs_pieces_grouped_heads_widths_and_sinks(case):
    check(**case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run_of", [256, 128, 100])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 300, 512, 600])
@pytest.mark.parametrize(("heads", "widths"), [((2, 2), (16, 16)), ((6, 2), (24, 16))])
def test_every_form(heads, widths, window, sinks, run_of):
    check(heads=heads, widths=widths, window=window, sinks=sinks, run_of=run_of)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [0, 8])
def test_gradients_are_the_same_in_one_kernel_and_in_two(monkeypatch, parts):
    monkeypatch.setattr(splash, "FUSED_PARTS", parts)
    check()


def test_bfloat16_stays_near_float32():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((1, LENGTH, 2, 16)), jnp.float32) for _ in "qkvd"]
    segment = jnp.zeros((1, LENGTH), jnp.int32)

    def by(implementation):
        form = {"window": None, "scale": 0.25, "implementation": implementation}
        return lambda q, k, v: attention(q, k, v, segment, **form)

    low = [x.astype(jnp.bfloat16) for x in arrays]
    got = run(by("splash"), low[:3], low[3])
    wanted = run(by("reference"), arrays[:3], arrays[3])
    for have, want in zip(got, wanted, strict=True):
        assert have.dtype == jnp.bfloat16
        assert np.abs(np.asarray(have, np.float32) - want).max() < 2**-5 * np.abs(want).max()


def test_the_program_does_not_grow_with_the_sequence():
    def size(length, window):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.bfloat16)
        segment = jax.ShapeDtypeStruct((1, length), jnp.int32)
        form = {"window": window, "implementation": "splash"}

        def total(q, k, v, segment):
            return jnp.sum(attention(q, k, v, segment, **form))

        return str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(x, x, x, segment)).count(" = ")

    for window in (None, 1000):
        assert size(2**14, window) == size(2**18, window)


def test_windows_that_do_not_fit_beside_a_place_are_refused():
    assert splash.fits(2**20 - 1024, 4095)
    assert not splash.fits(2**20 - 1024, 4096)
    x = jax.ShapeDtypeStruct((1, 2**20 - 1024, 1, 16), jnp.bfloat16)
    segment = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)
    with pytest.raises(ValueError, match="takes no window of 4096"):
        jax.eval_shape(
            lambda *x: attention(*x, window=4096, implementation="splash"), x, x, x, segment
        )


def priced(window):
    """FLOPs of the forward and the backward pass as the planner reads them."""
    q, k = (jax.ShapeDtypeStruct((2, LENGTH, heads, 16), jnp.bfloat16) for heads in (4, 2))
    v = jax.ShapeDtypeStruct((2, LENGTH, 2, 8), jnp.bfloat16)
    segment = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)

    def total(q, k, v, segment):
        y = attention(q, k, v, segment, window=window, implementation="splash")
        return jnp.sum(y.astype(jnp.float32))

    schedule = read(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, k, v, segment))
    return [op.flops * times for op, times in walk(schedule) if op.flops]


def test_blocks_that_it_visits_are_priced():
    """Of four blocks of queries, and as many of keys forward, half as many backward."""
    forward, backward = 10 * 128 * 128, 6 * 128 * 256
    assert priced(None) == [
        2 * 2 * 4 * forward * (16 + 8),
        2 * 2 * 4 * backward * (3 * 16 + 2 * 8),
    ]
    # A window leaves the block of the diagonal and the one before, and the backward pass two
    # kernels, which compute scores each.
    near = 7 * 128 * 128
    assert priced(100) == [
        2 * 2 * 4 * near * (16 + 8),
        2 * 2 * 4 * near * (4 * 16 + 3 * 8),
    ]
