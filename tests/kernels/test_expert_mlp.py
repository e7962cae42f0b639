"""Every implementation of the expert MLP against the reference, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moejax.kernels import expert_mlp as module
from moejax.kernels.expert_mlp import expert_mlp
from tests.cases import few


def operands(sizes, spare_rows, dtype=np.float32, seed=0):
    """Rows for the groups plus spare ones filled with noise that must not matter."""
    rng = np.random.default_rng(seed)
    M, G, D, F = sum(sizes) + spare_rows, len(sizes), 6, 4
    shapes = [(M, D), (G, D, 2, F), (G, F, D), (M, D)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def run(implementation, sizes, x, w_in, w_out, gradient):
    counts = jnp.asarray(sizes, jnp.int32)
    return value_and_gradients(implementation)(counts, x, w_in, w_out, gradient)


@functools.cache
def value_and_gradients(implementation):
    def both(counts, x, w_in, w_out, gradient):
        def forward(*arrays):
            return expert_mlp(*arrays, counts, implementation=implementation)

        y, pull = jax.vjp(forward, x, w_in, w_out)
        return [y, *pull(gradient)]

    return jax.jit(both)


def check(implementation, sizes, spare_rows):
    args = operands(sizes, spare_rows)
    rows = sum(sizes)
    # The gradient of rows that hold nothing must not reach the weights.
    got = run(implementation, sizes, *args)
    wanted = run("reference", sizes, *args)
    assert not np.asarray(got[0])[rows:].any(), "rows past the last group are zero"
    for have, want in zip(got, wanted, strict=True):
        have, want = np.asarray(have), np.asarray(want)
        if have.shape == args[0].shape:
            have, want = have[:rows], want[:rows]
        bound = max(rows, 8) * np.finfo(np.float32).eps * max(np.abs(want).max(initial=0), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


@pytest.mark.slow
@few(12)
@example(sizes=[40, 0, 90, 1, 79])
@given(sizes=st.lists(st.integers(0, 42), min_size=1, max_size=5))
def test_blocked_equals_the_reference(sizes):
    """Always five groups and 210 rows, which need one program."""
    check("blocked", [*sizes, *[0] * (5 - len(sizes))], 210 - sum(sizes))


def test_blocked_takes_groups_larger_than_its_largest_block(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ROWS", (4, 8))
    value_and_gradients.cache_clear()  # traced with the blocks of before
    check("blocked", [3, 21, 0, 8, 9], 5)


@pytest.mark.parametrize("sizes", [[5, 0, 7], [0, 0, 12], [1, 1, 1]])
def test_ragged_dot_equals_the_reference(sizes):
    check("ragged_dot", sizes, 2)


def test_blocked_in_bfloat16_stays_near_float32():
    sizes = [70, 3, 90]
    args = operands(sizes, 4)
    low = run("blocked", sizes, *(a.astype(jnp.bfloat16) for a in args))
    full = run("reference", sizes, *args)
    for have, want in zip(low, full, strict=True):
        have, want = np.asarray(have, np.float32), np.asarray(want)
        assert np.abs(have[:160] - want[:160]).max() < 2**-5 * np.abs(want).max()


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 160, 320, 512, 513, 700, 1024])
def test_the_rows_that_are_computed_are_those_of_the_blocks(rows):
    """What prices count is what the loop over a group's blocks runs."""

    def block(start, rows, done, w_in_DH, w_out_FD):
        return done + rows(jnp.ones((4096, 1))).shape[0]

    nothing = jnp.int32(0)
    done = module._blocks(block, nothing, 1024, nothing, jnp.int32(rows), None, None)
    assert int(done) == module.rows_computed(rows, 1024)
