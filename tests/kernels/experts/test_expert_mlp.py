"""Every implementation of the expert MLP against the reference, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moejax.kernels.costs import named_cost
from moejax.kernels.experts import blocked_mlp
from moejax.kernels.experts.activation import Gate, activate
from moejax.kernels.experts.expert_mlp import expert_mlp, expert_mlp_adding
from moejax.kernels.experts.expert_weights import ExpertWeights, Factors
from moejax.kernels.experts.grouped_matmul_e4m3 import grouped_matmul_e4m3
from moejax.runtime import program_cache
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


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sizes", [[0, 1, 0, 1], [0, 20, 0, 3], [9, 8, 1, 7], [0, 0, 0, 0]])
def test_few_rows_without_gradients_read_the_weights_of_their_groups_alone(
    sizes, biased, compiler, monkeypatch
):
    """Whose weights have no rows, not even NaN reaches the result."""
    if not compiler:
        monkeypatch.setattr(blocked_mlp, "_register_few_rows", lambda: False)
    x, w_in, w_out, _ = operands(sizes, 2)
    counts = jnp.asarray(sizes, jnp.int32)
    rng = np.random.default_rng(1)
    biases = (rng.standard_normal((4, 2, 4)), rng.standard_normal((4, 6)))
    form = {
        "biases": tuple(jnp.asarray(b, jnp.float32) for b in biases),
        "gate": Gate("clamped_swiglu", 1.0),
    }
    form = form if biased else {}
    want = expert_mlp(x, w_in, w_out, counts, implementation="reference", **form)
    unread = [w.at[jnp.flatnonzero(counts == 0)].set(np.nan) for w in (w_in, w_out)]
    have = expert_mlp(x, *unread, counts, implementation="blocked", **form)
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-5)


@few(30)
@given(
    sizes=st.lists(st.sampled_from([*range(10), 33, 70]), min_size=1, max_size=6),
    unused=st.integers(0, 3),
    K=st.sampled_from([1, 3, 4, 7, 64]),
    N=st.sampled_from([1, 5, 511, 513, 1100]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 99),
)
def test_products_of_few_rows_are_right_for_any_shape(sizes, unused, K, N, dtype, seed):
    """Beside float64 of the same operands: sums are of float32, and rounded once."""
    rng, rows = np.random.default_rng(seed), sum(sizes)
    x = jnp.asarray(rng.standard_normal((rows + unused, K)), dtype)
    w = jnp.asarray(rng.standard_normal((len(sizes), K, N)), dtype)
    if rows + unused == 0:
        return
    got = blocked_mlp.multiply_few_rows(x, w, jnp.asarray(sizes, jnp.int32))
    group_M = np.repeat(np.arange(len(sizes)), sizes)
    exact_MKN = np.asarray(x, np.float64)[:rows, :, None] * np.asarray(w, np.float64)[group_M]
    want_MN = np.zeros((rows + unused, N))
    want_MN[:rows] = exact_MKN.sum(1)
    bound_MN = np.zeros_like(want_MN)
    bound_MN[:rows] = K * np.finfo(np.float32).eps * np.abs(exact_MKN).sum(1)
    if dtype == jnp.bfloat16:
        bound_MN += 2.0**-8 * np.abs(want_MN)
    assert got.dtype == dtype
    assert (np.abs(np.asarray(got, np.float64) - want_MN) <= bound_MN).all()


def test_without_a_compiler_a_line_says_that_few_rows_are_slower(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program_cache.shutil, "which", lambda name: None)
    blocked_mlp._register_few_rows.cache_clear()
    x = jnp.ones((1, 2))
    try:
        assert not blocked_mlp.takes_few_rows(x, jnp.ones((1, 2, 3)))
        assert not blocked_mlp.takes_few_rows(x, jnp.ones((1, 2, 3)))
    finally:
        blocked_mlp._register_few_rows.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moejax: experts of few rows run by XLA")
    assert "there is no C++ compiler (g++)" in line


def test_blocked_takes_groups_larger_than_its_largest_block(monkeypatch):
    monkeypatch.setattr(blocked_mlp, "BLOCK_ROWS", (4, 8))
    value_and_gradients.cache_clear()  # traced with the blocks of before
    check("blocked", [3, 21, 0, 8, 9], 5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chunks_add_their_weight_gradients_to_those_of_the_chunk_before(dtype):
    """In float32, and a chunk that has no rows of a group leaves its sums alone."""
    sizes, earlier = [40, 0, 30], 7.0
    x, w_in, w_out, dy = operands(sizes, 3, dtype)
    counts = jnp.asarray(sizes, jnp.int32)
    weights = ExpertWeights(w_in, w_out)
    sums = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)

    def adding(x, sums):
        return expert_mlp_adding(x, weights, sums, counts)

    (y, same), pull = jax.vjp(adding, x, sums)
    start = jax.tree.map(lambda x: x + earlier, sums)
    dx, (dw_in, dw_out, *_) = pull((dy, start))
    assert same[0].dtype == dw_in.dtype == dw_out.dtype == jnp.float32
    want = run("blocked", sizes, x, w_in, w_out, dy)
    np.testing.assert_array_equal(y, want[0])
    np.testing.assert_array_equal(dx, want[1])
    for have, whole in zip((dw_in, dw_out), want[2:], strict=True):
        assert np.all(have[1] == earlier)
        scale = np.abs(np.asarray(whole, np.float32)).max()
        error = np.abs(np.asarray(have - earlier) - np.asarray(whole, np.float32)).max()
        assert error < jnp.finfo(dtype).eps * (scale + earlier)


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

    def compute(block, done, weights):
        return done + block.rows(jnp.ones((4096, 1))).shape[0]

    nothing = jnp.int32(0)
    done = blocked_mlp._blocks(compute, nothing, 1024, nothing, jnp.int32(rows), None)
    assert int(done) == blocked_mlp.rows_computed(rows, 1024)


# Of random numbers some lie at it, and more beyond.
LIMIT = 1.5
PLAIN, CLAMPED, GEGLU = Gate(), Gate("clamped_swiglu", LIMIT), Gate("geglu")
RELU2 = Gate("relu2")  # without a gate


def with_biases(sizes, spare_rows, dtype=np.float32):
    """`operands` and biases; a gate and an up lie at the limit, and spare rows are noise."""
    x, w_in, w_out, gradient = operands(sizes, spare_rows, dtype)
    rng, (G, D, _, F) = np.random.default_rng(1), w_in.shape
    b_in = rng.standard_normal((G, 2, F)).astype(np.float32)
    x, w_in = x.at[0].set(0), np.asarray(w_in)
    b_in[np.flatnonzero(sizes)[0], :, 0] = LIMIT, -LIMIT  # of the first row, which is zero
    b_out = rng.standard_normal((G, D)).astype(np.float32)
    return x, jnp.asarray(w_in), w_out, jnp.asarray(b_in), jnp.asarray(b_out), gradient


def one_by_one(sizes, activation, x, w_in, w_out, b_in=None, b_out=None):
    """Each group on its own, in plain jax.numpy."""
    parts, start = [], 0
    for g, size in enumerate(sizes):
        rows = x[start : start + size]
        gate, up = rows @ w_in[g, :, 0], rows @ w_in[g, :, -1]
        if b_in is not None:
            gate, up = gate + b_in[g, 0], up + b_in[g, -1]
        limit = activation.limit
        if activation == RELU2:
            hidden = jnp.where(up > 0, up * up, 0)
        elif activation == GEGLU:
            hidden = gate * up * jax.nn.sigmoid(1.59576912 * gate + 0.07135481 * gate**3)
        elif limit is None:
            hidden = gate * up / (1 + jnp.exp(-gate))
        else:
            # The gradient at the limit is that of the value, not of the limit.
            gate = gate - jax.nn.relu(gate - limit)
            up = up - jax.nn.relu(up - limit) + jax.nn.relu(-limit - up)
            hidden = gate * (1 + up) / (1 + jnp.exp(-1.702 * gate))
        parts.append(hidden @ w_out[g] + (0 if b_out is None else b_out[g]))
        start += size
    return jnp.concatenate([*parts, jnp.zeros_like(x[start:])])


def test_the_gradient_of_ones_counts_the_output_bias_too():
    """It is the product of the row's result and that result's gradient: of a router's weight."""
    sizes = [2, 0, 1]
    x, w_in, w_out, b_in, b_out, gradient = with_biases(sizes, 0)
    form = {"implementation": "blocked", "gate": CLAMPED, "biases": (b_in, b_out)}
    counts, ones = jnp.asarray(sizes, jnp.int32), jnp.ones((3, 1))

    def result(one_M1):
        return expert_mlp(x, w_in, w_out, counts, one_M1=one_M1, **form)

    @jax.jit
    def pulled(one_M1):
        return jax.vjp(result, one_M1)[1](gradient)[0]

    y = one_by_one(sizes, CLAMPED, x, w_in, w_out, b_in, b_out)
    np.testing.assert_allclose(pulled(ones)[:, 0], (y * gradient).sum(axis=1), rtol=1e-4, atol=1e-4)


SIZES = [40, 0, 90, 1, 79, 0]


def factors(shapes, dtype=np.float32):
    rng = np.random.default_rng(3)
    return Factors(*(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "activation", "biased", "adapted"),
    [
        ("blocked", PLAIN, False, ""),
        ("blocked", CLAMPED, True, ""),
        ("blocked", PLAIN, False, "in out"),
        ("blocked", CLAMPED, True, "in"),
        ("blocked", PLAIN, True, "out"),
        ("ragged_dot", PLAIN, True, ""),
        ("ragged_dot", CLAMPED, False, ""),
        ("ragged_dot", CLAMPED, True, "in out"),
        ("reference", CLAMPED, True, ""),
        ("reference", PLAIN, False, "out"),
        ("blocked", GEGLU, False, ""),
        ("ragged_dot", GEGLU, True, "in"),
        ("blocked", RELU2, True, ""),
        ("ragged_dot", RELU2, False, "in"),
    ],
)
def test_value_and_gradients_are_those_of_the_plain_form(
    implementation, activation, biased, adapted
):
    """Gradients of the trained arrays, and of ones that the results are multiplied by."""
    x, w_in, w_out, b_in, b_out, gradient = with_biases(SIZES, 5)
    U = 1 if activation == RELU2 else 2
    weights = [w_in[:, :, :U], w_out, *((b_in[:, :U], b_out) if biased else ())]
    counts, G, rows = jnp.asarray(SIZES, jnp.int32), len(SIZES), sum(SIZES)
    of_in, of_out = factors([(G, 6, 3), (G, 3, U, 4)]), factors([(G, 4, 3), (G, 3, 6)])
    adapters = of_in if "in" in adapted else None, of_out if "out" in adapted else None
    trained, one_M1 = adapters if adapted else weights, jnp.ones((len(gradient), 1))

    def with_kernel(x, trained, one_M1):
        (w_in, w_out, *biases), own = (weights, trained) if adapted else (trained, adapters)
        options = {"implementation": implementation, "gate": activation, "adapters": own}
        options |= {"biases": tuple(biases) or None, "one_M1": one_M1}
        return expert_mlp(x, w_in, w_out, counts, **options)

    def by_hand(x, trained, one_M1):
        (w_in, w_out, *biases), own = (weights, trained) if adapted else (trained, adapters)
        w_in, w_out = (
            w if pair is None else w + jnp.einsum("gka,ga...->gk...", *pair)
            for w, pair in zip((w_in, w_out), own, strict=True)
        )
        return one_by_one(SIZES, activation, x, w_in, w_out, *biases) * one_M1

    arrays = x, trained, one_M1
    got, wanted = (value_and_pulled(f, arrays, gradient) for f in (with_kernel, by_hand))
    assert not got[0][rows:].any(), "rows past the last group are zero"
    for have, want in zip(got, wanted, strict=True):
        bound = rows * np.finfo(np.float32).eps * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


def value_and_pulled(function, arrays, gradient):
    """A function's value and the gradients of its arrays; of rows past the last group none."""

    @jax.jit
    def both(arrays, gradient):
        y, pull = jax.vjp(function, *arrays)
        return y, pull(gradient)

    y, *found = map(np.array, jax.tree.leaves(both(arrays, gradient)))
    for of_rows in (array for array in found if len(array) == len(gradient)):
        of_rows[sum(SIZES) :] = 0
    return [y, *found]


def test_in_e4m3_products_are_rounded_and_biases_are_not():
    *arrays, gradient = with_biases(SIZES, 5)
    counts = jnp.asarray(SIZES, jnp.int32)
    group_M = np.repeat(np.arange(len(SIZES)), SIZES)

    def in_e4m3(x, w_in, w_out, *biases):
        options = {"implementation": "reference_e4m3", "gate": CLAMPED}
        return expert_mlp(x, w_in, w_out, counts, biases=biases, **options)

    def by_hand(x, w_in, w_out, b_in, b_out):
        multiply = functools.partial(grouped_matmul_e4m3, implementation="reference")
        w_in, rows = w_in.reshape(*w_in.shape[:2], -1), len(group_M)
        h = multiply(x[:rows], w_in, counts) + b_in.reshape(len(SIZES), -1)[group_M]
        y = multiply(activate(h, CLAMPED), w_out, counts) + b_out[group_M]
        return jnp.concatenate([y, jnp.zeros_like(x[rows:])])

    got, wanted = (value_and_pulled(f, arrays, gradient) for f in (in_e4m3, by_hand))
    for have, want in zip(got, wanted, strict=True):
        bound = len(group_M) * np.finfo(np.float32).eps * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


@pytest.mark.parametrize("sizes", [[0, 20, 0, 3], [9, 8, 1, 7]])
def test_few_rows_have_adapters_too(sizes):
    x, w_in, w_out, _ = operands(sizes, 2)
    counts = jnp.asarray(sizes, jnp.int32)
    adapters = factors([(4, 6, 3), (4, 3, 2, 4)]), factors([(4, 4, 3), (4, 3, 6)])
    have, want = (
        expert_mlp(x, w_in, w_out, counts, implementation=name, adapters=adapters)
        for name in ("blocked", "reference")
    )
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["blocked", "ragged_dot", "reference"])
@pytest.mark.parametrize("rows", [5, 300])
def test_what_a_young_adapter_adds_to_experts_in_bfloat16_is_right(implementation, rows):
    """After ten steps of Adam; 23 % off where it is added to the weight before rounding.

    Halves of the hidden layer are equal and those of the weight opposites, so that the product
    without the adapter is zero, and its rounding hides nothing.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 64)), jnp.bfloat16)
    half_in = np.tile(rng.normal(size=(1, 64, 2, 128)) / 8, (1, 1, 1, 2))
    half_out = 0.02 * rng.normal(size=(1, 128, 64))
    w_in, w_out = jnp.asarray(half_in), jnp.asarray(np.concatenate([half_out, -half_out], axis=1))
    a = rng.uniform(-1, 1, (1, 256, 16)) / 16
    b = 2e-3 * rng.choice([-1, 1], (1, 16, 64)) * rng.uniform(0.5, 1, (1, 16, 64))
    adapter = Factors(jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16))

    low = (jnp.asarray(w, jnp.bfloat16) for w in (w_in, w_out))
    counts = jnp.asarray([rows], jnp.int32)
    options = {"implementation": implementation, "adapters": (None, adapter)}
    got = np.asarray(expert_mlp(x, *low, counts, **options), np.float64)
    h = np.asarray(x, np.float64) @ np.asarray(w_in[0], np.float64).reshape(64, -1)
    gate, up = h[:, :256], h[:, 256:]
    wanted = (gate * up / (1 + np.exp(-gate))) @ a[0] @ b[0]
    assert np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["blocked", "reference"])
def test_gradients_of_biases_in_bfloat16_are_summed_in_float32(implementation):
    """4096 equal terms, of which a sum in bfloat16 would lose all but some 256."""
    rows, counts = 4096, jnp.array([4096], jnp.int32)
    x, w_in, w_out = (jnp.ones(s, jnp.bfloat16) for s in [(rows, 8), (1, 8, 2, 8), (1, 8, 8)])
    biases = jnp.zeros((1, 2, 8)), jnp.zeros((1, 8))

    def forward(biases):
        options = {"implementation": implementation, "gate": Gate("clamped_swiglu", 100.0)}
        return expert_mlp(x, w_in, w_out, counts, biases=biases, **options)

    y, pull = jax.vjp(forward, biases)
    ((d_in, d_out),) = pull(jnp.ones_like(y))
    assert d_in.dtype == d_out.dtype == jnp.float32
    np.testing.assert_array_equal(d_out, rows)
    # gate 8, up 8, and a gradient of 8 from each output.
    np.testing.assert_allclose(d_in[0, 1], rows * 64, rtol=2**-7)


def test_clamped_swiglu_passes_what_is_not_a_number_and_gradients_at_the_limit():
    h = jnp.array([[7.0, 8.0, jnp.nan, 1.0, 7.0, -7.0, 2.0, -8.0]])
    y, pull = jax.vjp(lambda h: activate(h, Gate("clamped_swiglu", 7.0)), h)
    assert np.isnan(y[0, 2])
    assert np.isfinite(y[0, [0, 1, 3]]).all()
    (dh,) = pull(jnp.ones_like(y))
    gate, up = dh[0, :4], dh[0, 4:]
    assert gate[0] != 0
    assert gate[1] == 0
    assert (up[:2] != 0).all()
    assert up[3] == 0


def test_the_price_of_frozen_experts_has_adapters_and_no_gradients_of_weights():
    M, D, F, G, A = 8, 4, 2, 3, 2
    weights = 2.0 * M * 3 * D * F
    assert named_cost(f"experts_backward_{M}x{D}x{F}x{G}", [])["flops"] == 2 * weights
    of_factors = 2.0 * M * A * (D + 2 * F)
    for which, share in (("forward", 1), ("frozen", 2.5)):
        cost = named_cost(f"experts_{which}_{M}x{D}x{F}x{G}x{A}x0", [])
        assert cost["flops"] == weights + share * of_factors
        assert cost["blocks"] == (M, G)
    weights = ExpertWeights(jnp.ones((G, D, 2, F)), jnp.ones((G, F, D)))
    weights = weights._replace(in_adapter=factors([(G, D, A), (G, A, 2, F)]))
    x_MD, sizes_G = jnp.ones((M, D)), jnp.array([8, 0, 0])

    def loss(x_MD, weights):
        form = blocked_mlp.MlpForm()
        return jnp.sum(blocked_mlp.blocked_mlp(form, x_MD, weights, sizes_G, None))

    program = str(jax.make_jaxpr(jax.grad(loss))(x_MD, weights))
    assert f"experts_frozen_{M}x{D}x{F}x{G}x{A}x0" in program
    assert "experts_backward" not in program
