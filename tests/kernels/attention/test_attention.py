"""Attention against the formula, forward and backward; what is never made."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.comm.jaxprs import inner_jaxprs, opened
from moejax.kernels.attention.attention import attention
from moejax.kernels.attention.blocked import blocks_of
from moejax.kernels.attention.ranged import Extent
from moejax.kernels.costs import attention_cost
from moejax.runtime.patches import described_gpu
from tests.cases import few
from tests.kernels.attention.test_ranged import dense


def operands(length, heads, groups, seed=0, dtype=np.float32, values=8):
    """Queries, keys, values and a gradient of two sequences of random documents."""
    rng = np.random.default_rng(seed)
    counts = [(heads, 8), (groups, 8), (groups, values), (heads, values)]
    shapes = [(2, length, *count) for count in counts]
    segment = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1), jnp.int32)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes], segment


def run(implementation, arrays, segment, window, sinks=None, scale=None):
    """The result, and gradients of queries, keys and values, and of sinks if there are any."""
    options = {"window": window, "implementation": implementation, "scale": scale}

    def forward(q, k, v, *sinks):
        return attention(q, k, v, segment, sinks_H=sinks[0] if sinks else None, **options)

    @jax.jit
    def both(*inputs, gradient):
        y, pull = jax.vjp(forward, *inputs)
        return [y, *pull(gradient)]

    inputs = arrays[:3] if sinks is None else [*arrays[:3], jnp.asarray(sinks, jnp.float32)]
    return both(*inputs, gradient=arrays[3])


@few(6)
@given(
    length=st.sampled_from([1, 7, 64, 65, 130, 150]),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 5, 70]),
    values=st.sampled_from([8, 4, 12]),
    sinks=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
def test_blocked_is_the_formula(length, heads, window, values, sinks, scale, seed):
    arrays, segment = operands(length, *heads, seed=seed, values=values)
    sinks = np.random.default_rng(seed).standard_normal(heads[0]) if sinks else None
    got = run("blocked", arrays, segment, window, sinks, scale)
    q, k, v, dy = (np.asarray(x, np.float64) for x in arrays)
    back, documents = np.arange(length)[:, None] - np.arange(length), np.asarray(segment)
    seen = (back >= 0) & (back < (window or length))
    seen = seen & (documents[:, :, None] == documents[:, None, :])
    exact = np.full(heads[0], -np.inf) if sinks is None else sinks
    wanted = dense(q, k, v, exact, seen, scale or 8**-0.5, dy)
    for have, want in zip(got, wanted[: len(got)], strict=True):
        # Sums over at most `length` positions and 8 channels, of terms of order one.
        bound = 8 * length * np.finfo(np.float32).eps * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


@pytest.mark.parametrize("implementation", ["blocked", "reference"])
def test_sinks_scale_and_width_of_values_are_those_of_the_formula(implementation):
    """In float64, with every pair of positions at once; gradients by differences."""
    (q, k, v, dy), segment = operands(9, 4, 2, values=4)
    sinks = np.array([-1.0, 0.5, 2.0, 0.0])
    got = run(implementation, [q, k, v, dy], segment, 5, sinks, 0.7)
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    segment = np.asarray(segment)
    back = np.arange(9)[:, None] - np.arange(9)
    seen = (back >= 0) & (back < 5) & (segment[:, :, None] == segment[:, None, :])

    def plain(q, k, v, sinks):
        score = 0.7 * np.einsum("bthc,bshc->bhts", q, np.repeat(k, 2, axis=2))
        weight = np.exp(score) * seen[:, None]
        total = weight.sum(axis=3, keepdims=True) + np.exp(sinks)[:, None, None]
        return np.einsum("bhts,bshc->bthc", weight / total, np.repeat(v, 2, axis=2))

    inputs = [q, k, v, sinks]
    np.testing.assert_allclose(got[0], plain(*inputs), atol=1e-5)
    for place, have in enumerate(got[1:]):
        flat, wanted = inputs[place].reshape(-1), []
        for entry in range(flat.size):
            near = []
            for step in (1e-6, -1e-6):
                moved = [x.copy() for x in inputs]
                moved[place].reshape(-1)[entry] += step
                near.append(np.sum(plain(*moved) * dy))
            wanted.append((near[0] - near[1]) / 2e-6)
        np.testing.assert_allclose(np.asarray(have).reshape(-1), wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "values"), [(None, 8), (1, 8), (5, 8), (5, 4), (None, 12)])
@pytest.mark.parametrize("implementation", ["cudnn", "cudnn_masked"])
def test_what_cudnn_is_asked_for_is_the_same(monkeypatch, implementation, window, values):
    """Computed by the library's plain form, which takes the same arguments."""
    arrays, segment = operands(34, 4, 2, values=values)
    if implementation == "cudnn":
        segment = jnp.zeros_like(segment)
    scale = None if values == 8 else 0.7
    wanted = run("reference", arrays, segment, window, scale=scale)
    asked = []

    def plain(*arrays, implementation, **options):
        asked.append(implementation)
        return library(*arrays, implementation="xla", **options)

    library = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    got = run(implementation, arrays, segment, window, scale=scale)
    assert set(asked) == {"cudnn"}
    for have, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-5)


def equations(jaxpr):
    for eqn in opened(jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def squares(implementation, window, length=2050):
    """The shapes of all arrays of a step of attention that grow with the square of the length."""
    shapes = [(2, length, count, 16) for count in (4, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    segment = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def total(q, k, v, segment):
        y = attention(q, k, v, segment, window=window, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32))

    with described_gpu():
        program = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*arrays, segment)
    eqns = list(equations(program))
    found = {x.aval.shape for eqn in eqns for x in eqn.outvars if hasattr(x.aval, "shape")}
    calls = {eqn.primitive.name for eqn in eqns}
    return {s for s in found if math.prod(s) >= length * length}, calls


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("implementation", ["blocked", "cudnn"])
def test_nothing_grows_with_the_square_of_the_length(implementation, window):
    found, calls = squares(implementation, window)
    # Blocks of 256 queries see up to all keys, for all heads of one sequence.
    assert all(math.prod(shape) <= 256 * 2050 * 4 for shape in found)
    assert all(2050 not in shape or 256 in shape or shape.count(2050) < 2 for shape in found)
    assert any("dot_product_attention" in call for call in calls) == (implementation == "cudnn")


def test_documents_cost_cudnn_a_mask():
    found, _ = squares("cudnn_masked", None)
    assert (2, 1, 2050, 2050) in found


def priced(run, *shapes):
    """The FLOPs of each of cuDNN's operations in a program, where no GPU is."""
    arrays = [jax.ShapeDtypeStruct((2, 64, *shape), jnp.bfloat16) for shape in shapes]
    segment = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    with described_gpu():
        program = jax.make_jaxpr(run)(*arrays, segment)
    costs = (attention_cost(eqn.primitive.name, eqn) for eqn in equations(program))
    return [cost["flops"] for cost in costs if cost is not None]


@pytest.mark.parametrize(("window", "pairs"), [(None, 64 * 65 // 2), (10, 55 + 54 * 10)])
def test_what_cudnn_computes_is_priced(window, pairs):
    """Of the pairs that causality and the window let through; a mask hides none from it."""
    for name, counted in (("cudnn", pairs), ("cudnn_masked", 64 * 65 // 2)):

        def forward(q, segment, name=name):
            return attention(q, q, q, segment, window=window, implementation=name)

        assert set(priced(forward, (4, 16))) == {4 * 2 * 4 * 16 * counted}


def test_heads_of_two_widths_are_priced_as_cudnn_pads_them():
    """DeepSeek-V3's: 192 channels of keys, 128 of values."""

    def total(q, v, segment):
        y = attention(q, q, v, segment, window=None, implementation="cudnn", scale=0.1)
        assert y.shape == v.shape
        return jnp.sum(y.astype(jnp.float32))

    flops = sum(priced(jax.grad(total, (0, 1)), (4, 192), (4, 128)))
    assert flops == (4 + 10) * 2 * 4 * 192 * (64 * 65 // 2)


def test_large_scores_overflow_nothing():
    (q, k, v, dy), segment = operands(70, 2, 2)
    for sinks in (None, [1e4, -1e4]):
        for x in run("blocked", [q * 1e4, k * 1e4, v, dy], segment, None, sinks):
            assert np.isfinite(x).all()


def test_bfloat16_stays_near_float32():
    arrays, segment = operands(130, 4, 2, values=4)
    sinks = np.arange(4.0)
    low = run("blocked", [a.astype(jnp.bfloat16) for a in arrays], segment, None, sinks)
    full = run("reference", arrays, segment, None, sinks)
    assert [x.dtype for x in low] == [jnp.bfloat16] * 4 + [jnp.float32]
    for have, want in zip(low, full, strict=True):
        assert np.abs(np.asarray(have, np.float32) - want).max() < 2**-5 * np.abs(want).max()


@pytest.mark.parametrize("window", [None, 16, 700])
@pytest.mark.parametrize("length", [1, 100, 1024, 4097])
def test_blocks_visit_little_more_than_they_must(length, window):
    blocks = blocks_of(length, length, Extent((0,), window, window))
    pairs = sum(min(place + 1, window or length) for place in range(length))
    rows = -(-length // blocks.queries)
    most = pairs / (blocks.queries * blocks.keys) + 2 * rows
    assert pairs / (blocks.queries * blocks.keys) <= blocks.visits <= most


@pytest.mark.parametrize("sinks", [False, True])
def test_the_program_does_not_grow_with_the_sequence(sinks):
    """Nor what it holds at a time, but for what it reads and returns."""

    def traced(length):
        shapes = [(1, length, count, 64) for count in (8, 2, 2)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        arrays.append(jax.ShapeDtypeStruct((8,), jnp.float32))
        segment = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def total(q, k, v, sinks_H, segment):
            options = {"window": None, "implementation": "blocked"}
            y = attention(q, k, v, segment, sinks_H=sinks_H if sinks else None, **options)
            return jnp.sum(y.astype(jnp.float32))

        eqns = list(equations(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*arrays, segment)))
        sizes = [math.prod(x.aval.shape) for eqn in eqns for x in eqn.outvars]
        return len(eqns), max(sizes) / length

    (few_eqns, small), (many_eqns, large) = traced(4096), traced(131_072)
    assert few_eqns == many_eqns < 1000
    assert large <= small
