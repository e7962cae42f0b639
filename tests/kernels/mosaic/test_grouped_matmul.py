"""The matrix kernels against the reference in float64: odd groups, gradients, spare rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moejax.kernels.experts import reference
from moejax.kernels.experts.activation import Gate
from moejax.kernels.experts.expert_mlp import expert_mlp
from moejax.kernels.experts.grouped_matmul import grouped_matmul
from moejax.kernels.mosaic.quantize import ALIGNED
from moejax.kernels.mosaic.tiles import ROWS, schedule_rows
from tests.cases import few
from tests.kernels.mosaic.interpreter import interpreted

HALF_STEP = 2.0**-8  # of bfloat16, over the value


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def exactly(function, *arrays):
    """A function's value and gradients in float64, of bfloat16 numbers."""
    *arrays, gradient = (np.asarray(x, np.float64) for x in arrays)
    with jax.enable_x64(True):
        y, pull = jax.vjp(function, *map(jnp.asarray, arrays))
        return [np.asarray(x) for x in (y, *pull(jnp.asarray(gradient)))]


def run(function, *arrays):
    with interpreted():
        y, pull = jax.vjp(function, *arrays[:-1])
        return [np.asarray(x, np.float64) for x in (y, *pull(arrays[-1]))]


def check_product(sizes, spare, K, N, seed=0):
    """The result, and the gradients of rows and of weights."""
    rng, rows = np.random.default_rng(seed), sum(sizes)
    M, counts = rows + spare, jnp.asarray(sizes, jnp.int32)
    arrays = draw(rng, M, K), draw(rng, len(sizes), K, N), draw(rng, M, N)
    got = run(lambda x, w: grouped_matmul(x, w, counts, implementation="mosaic"), *arrays)
    wanted = exactly(lambda x, w: reference.grouped_matmul(x, w, counts), *arrays)
    assert not got[0][rows:].any(), "rows past the last group are zero"
    assert not got[1][rows:].any()
    for have, want, length in zip(got, wanted, (K, N, M), strict=True):
        # Summed in float32, which rounds less than the last step, to bfloat16.
        noise = length * np.finfo(np.float32).eps * np.abs(want).max(initial=0)
        assert np.all(np.abs(have - want) <= np.abs(want) * HALF_STEP + noise)


def test_products_and_gradients():
    """An empty group, rows that fill no copy, columns that fill no tile."""
    check_product([70, 0, 3], 4, 64, 192)


@pytest.mark.slow
def test_all_rows_in_one_group():
    check_product([0, 150, 0], 4, 64, 320)


@pytest.mark.exhaustive
@few(8)
@example(sizes=[0, 0, 0], spare=4, K=64, N=320, seed=0)
# A long group that begins inside a copy.
@example(sizes=[5, 140], spare=4, K=64, N=64, seed=0)
@given(
    sizes=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    spare=st.integers(1, 20),
    K=st.sampled_from([64, 192]),
    N=st.sampled_from([64, 320]),
    seed=st.integers(0, 99),
)
def test_drawn_products_and_gradients(sizes, spare, K, N, seed):
    check_product(sizes, spare, K, N, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "fused"),
    [([1, 129], True), pytest.param([70, 0, 3], False, marks=pytest.mark.exhaustive)],
)
def test_experts_equal_the_reference_in_one_kernel_and_where_biases_stand_between(sizes, fused):
    rng, D, F = np.random.default_rng(0), 128, 64
    M, G, counts = sum(sizes) + 6, len(sizes), jnp.asarray(sizes, jnp.int32)
    arrays = draw(rng, M, D), draw(rng, G, D, 2, F) / 8, draw(rng, G, F, D)
    arrays += () if fused else (draw(rng, G, 2, F), draw(rng, G, D))
    arrays += (draw(rng, M, D),)

    def with_kernel(name):
        def forward(x, w_in, w_out, *biases):
            # No value is at it: rounded, it could fall on either side.
            options = {"gate": Gate("clamped_swiglu", 20.0), "biases": biases} if biases else {}
            return expert_mlp(x, w_in, w_out, counts, implementation=name, **options)

        return forward

    got = run(with_kernel("mosaic"), *arrays)
    wanted = exactly(with_kernel("reference"), *arrays)
    assert not got[0][sum(sizes) :].any(), "rows past the last group are zero"
    for have, want in zip(got, wanted, strict=True):
        # Rows and hidden layer are rounded to bfloat16 on the way.
        assert np.abs(have - want).max() < 2**-5 * np.abs(want).max()


@pytest.mark.slow
@few(6)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=9), spare=st.integers(0, 300))
def test_every_row_counts_in_one_tile_of_its_group(sizes, spare):
    M, G = sum(sizes) + spare, len(sizes)
    schedule = schedule_rows(jnp.asarray(sizes), M)
    count = int(schedule.count_1[0])
    assert count <= schedule.group_T.shape[0]
    seen = np.full(M, -1)
    for tile in range(count):
        group, first, start, end = (int(array[tile]) for array in schedule[:4])
        assert first % ALIGNED == 0
        rows = slice(max(first, start), min(first + ROWS, end))
        assert np.all(seen[rows] == -1)
        seen[rows] = group
    np.testing.assert_array_equal(seen, np.repeat(np.arange(G + 1), [*sizes, spare]))
