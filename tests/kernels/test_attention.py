"""Attention against the library's whole-batch form, forward and backward; what is never made."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.comm.jaxprs import inner_jaxprs, opened
from moejax.kernels.attention import _blocks, attention
from moejax.kernels.costs import attention_cost
from moejax.runtime.compiler import described_cudnn
from tests.cases import few


def operands(length, heads, groups, seed=0, dtype=np.float32):
    """Queries, keys, values and a gradient of two sequences of random documents."""
    rng = np.random.default_rng(seed)
    shapes = [(2, length, count, 8) for count in (heads, groups, groups, heads)]
    segment = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1), jnp.int32)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes], segment


def run(implementation, arrays, segment, window):
    def forward(*qkv):
        return attention(*qkv, segment, window=window, implementation=implementation)

    @jax.jit
    def both(*qkv, gradient):
        y, pull = jax.vjp(forward, *qkv)
        return [y, *pull(gradient)]

    return both(*arrays[:3], gradient=arrays[3])


@pytest.mark.slow
@few(12)
@given(
    length=st.sampled_from([1, 7, 64, 65, 130, 150]),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 5, 70]),
    seed=st.integers(0, 99),
)
def test_blocked_equals_the_reference(length, heads, window, seed):
    arrays, segment = operands(length, *heads, seed=seed)
    got, wanted = (run(name, arrays, segment, window) for name in ("blocked", "reference"))
    for have, want in zip(got, wanted, strict=True):
        # Sums over at most `length` positions and 8 channels, of terms of order one.
        bound = 8 * length * np.finfo(np.float32).eps * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("implementation", ["cudnn", "cudnn_masked"])
def test_what_cudnn_is_asked_for_is_the_same(monkeypatch, implementation, window):
    """Computed by the library's plain form, which takes the same arguments."""
    arrays, segment = operands(34, 4, 2)
    if implementation == "cudnn":
        segment = jnp.zeros_like(segment)
    wanted = run("reference", arrays, segment, window)
    asked = []

    def plain(*arrays, implementation, **options):
        asked.append(implementation)
        return library(*arrays, implementation="xla", **options)

    library = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    got = run(implementation, arrays, segment, window)
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

    with described_cudnn():
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


@pytest.mark.parametrize(("window", "pairs"), [(None, 64 * 65 // 2), (10, 55 + 54 * 10)])
def test_what_cudnn_computes_is_priced(window, pairs):
    """Of the pairs that causality and the window let through; a mask hides none from it."""
    q = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.bfloat16)
    segment = jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def priced(implementation):
        def forward(q, segment):
            return attention(q, q, q, segment, window=window, implementation=implementation)

        with described_cudnn():
            program = jax.make_jaxpr(forward)(q, segment)
        named = [(eqn.primitive.name, eqn) for eqn in equations(program)]
        costs = [cost for name, eqn in named if (cost := attention_cost(name, eqn)) is not None]
        return {cost["flops"] for cost in costs}

    assert priced("cudnn") == {4 * 2 * 4 * 16 * pairs}
    assert priced("cudnn_masked") == {4 * 2 * 4 * 16 * 64 * 65 // 2}


def test_large_scores_overflow_nothing():
    (q, k, v, dy), segment = operands(70, 2, 2)
    for x in run("blocked", [q * 1e4, k * 1e4, v, dy], segment, None):
        assert np.isfinite(x).all()


def test_bfloat16_stays_near_float32():
    arrays, segment = operands(130, 4, 2)
    low = run("blocked", [a.astype(jnp.bfloat16) for a in arrays], segment, None)
    full = run("reference", arrays, segment, None)
    for have, want in zip(low, full, strict=True):
        assert have.dtype == jnp.bfloat16
        assert np.abs(np.asarray(have, np.float32) - want).max() < 2**-5 * np.abs(want).max()


@pytest.mark.parametrize("length", [1, 100, 1024, 4097])
def test_blocks_visit_little_more_than_they_must(length):
    visited = sum((q.stop - q.start) * (k.stop - k.start) for q, k in _blocks(length, None))
    rows = max(q.stop - q.start for q, _ in _blocks(length, None))
    assert visited <= (length + rows) * length // 2 + rows * rows
    near = _blocks(length, 16)
    assert all(k.start == max(0, q.start - 15) and k.stop == q.stop for q, k in near)
