"""Every kernel on the device against the plain form, in float64 on the host where it is a sum.

A check gives the largest error over what is allowed: at most 1 is right. On a machine without a
GPU the kernels run in Mosaic's interpreter, on sizes that it manages.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.case import Case, Reporter
from benchmarks.gpu.chunks import route_to_itself
from benchmarks.gpu.layers import build_layer, draw_weights, layer_config, one_device_step
from benchmarks.gpu.products import (
    BY_ROWS,
    BY_WEIGHTS,
    FORWARD,
    IN_E4M3,
    fused_product,
    mlp_both_ways,
    product,
    product_e4m3,
)
from benchmarks.gpu.shapes import OLMOE, QWEN3, Shape, place_tokens
from moejax.kernels.experts.grouped_matmul_e4m3 import BLOCK, dequantize_weights, quantize_weights
from moejax.kernels.experts.quantize import Quantized, dequantize, dequantize_sum, quantize
from moejax.kernels.experts.quantized_rows import dequantize_combine, permute_quantize
from moejax.kernels.formats import FORMATS, TINY

EPS = float(np.finfo(np.float32).eps)
HALF_STEP = 2.0**-8  # of bfloat16, over the value
# Matrix units keep about 14 bits of products of e4m3, below the largest of a block of 128, which
# is about four times the mean.
UNITS_STEP = 2.0**-11
# Of the quantisers' formats: on a GPU a division is off by up to 2 units in the last place.
DIVISION = 4 * EPS
SMALL = Shape("small", 64, 64, 4, 2)  # for the interpreter


@contextlib.contextmanager
def on_device(report: Reporter) -> Iterator[None]:
    """Kernels traced inside run on the GPU, or else in the interpreter."""
    if report.gpu:
        yield
        return
    from jax.experimental.pallas import mosaic_gpu as plgpu

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


def check(
    report: Reporter, operation: str, compute: Callable[[], float], kernel: str = "mosaic"
) -> None:
    """Writes how far the kernel is off."""

    def run() -> float:
        with on_device(report):
            return compute()

    worst = report.attempt(operation, kernel, run)
    if worst is not None:
        # What is not a number is infinitely wrong.
        report.row(operation, kernel, worst=min(worst, 1e30), ok=bool(worst <= 1))


def worst_of(have: Any, want: Any, allowed: Any) -> float:
    """The largest error over what is allowed; both may be NaN in the same places."""
    have, want, allowed = (np.asarray(x, np.float64) for x in (have, want, allowed))
    if have.shape != want.shape or not np.array_equal(np.isnan(have), np.isnan(want)):
        return float("inf")
    with np.errstate(invalid="ignore"):  # equal infinities
        error, known = np.abs(have - want), ~np.isnan(want)
    where = known & (error > 0)
    return float(np.max((error / np.maximum(allowed, 1e-300))[where], initial=0.0))


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Normal numbers of bfloat16, the same on every machine."""
    return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)


def check_products(report: Reporter, sizes: tuple[int, ...], spare: int, K: int, N: int) -> None:
    """A product and its gradients; rows past the last group must be zero."""
    rng, M = np.random.default_rng(0), sum(sizes) + spare
    arrays = draw(rng, M, K), draw(rng, len(sizes), K, N), draw(rng, M, N)
    counts = jnp.asarray(sizes, jnp.int32)
    exact = exact_products(*(np.asarray(x, np.float64) for x in arrays), sizes)
    lengths = {FORWARD: K, BY_ROWS: N, BY_WEIGHTS: max(sizes)}

    def compute(operation: str) -> float:
        have, want = product(operation, "mosaic")(*arrays, counts), exact[operation]
        noise = lengths[operation] * EPS * np.abs(want).max(initial=0)
        return worst_of(have, want, np.abs(want) * HALF_STEP + noise)

    for operation in exact:
        check(report, operation, partial(compute, operation))


def exact_products(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, sizes: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """In float64, group by group."""
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for g, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rows = slice(start, end)
        y[rows], dx[rows] = x[rows] @ w[g], dy[rows] @ w[g].T
        dw[g] = x[rows].T @ dy[rows]
    return {FORWARD: y, BY_ROWS: dx, BY_WEIGHTS: dw}


def check_e4m3(report: Reporter, sizes: tuple[int, ...], spare: int, K: int, N: int) -> None:
    """The product of rows and weights that are rounded already."""
    rng, M = np.random.default_rng(0), sum(sizes) + spare
    q = plainly(quantize, "e4m3", block=BLOCK)(draw(rng, M, K))
    w = jax.jit(quantize_weights)(draw(rng, len(sizes), K, N))
    x = np.asarray(plainly(dequantize, "e4m3", K)(q), np.float64)
    matrices = np.asarray(plainly(dequantize_weights, (K, N))(w), np.float64)
    none = np.zeros((M, N))
    want = exact_products(x, matrices, none, sizes)[FORWARD]
    size = exact_products(np.abs(x), np.abs(matrices), none, sizes)[FORWARD]

    def compute() -> float:
        have = product_e4m3("mosaic")(q, w, jnp.asarray(sizes, jnp.int32))
        return worst_of(have, want, np.abs(want) * HALF_STEP + size * UNITS_STEP)

    check(report, IN_E4M3, compute)


def check_mlp(report: Reporter, sizes: tuple[int, ...], spare: int, D: int, F: int) -> None:
    """The fused product, and the whole MLP with all its gradients against the plain form."""
    rng, G, M = np.random.default_rng(0), len(sizes), sum(sizes) + spare
    x, w_in, w_out, dy = draw(rng, M, D), draw(rng, G, D, 2, F), draw(rng, G, F, D), draw(rng, M, D)
    counts = jnp.asarray(sizes, jnp.int32)

    def fused() -> float:
        wanted = fused_product("reference")(*(a.astype(jnp.float32) for a in (x, w_in)), counts)
        got = fused_product("mosaic")(x, w_in, counts)
        return max(of_largest(have, want) for have, want in zip(got, wanted, strict=True))

    def whole() -> float:
        arrays = [a.astype(jnp.float32) for a in (x, w_in, w_out, dy)]
        wanted = jax.tree.leaves(mlp_both_ways("reference")(*arrays, counts))
        got = jax.tree.leaves(mlp_both_ways("mosaic")(x, w_in, w_out, dy, counts))
        return max(of_largest(have, want) for have, want in zip(got, wanted, strict=True))

    def rounded() -> float:
        arrays = x, w_in, w_out, dy, counts
        wanted = jax.tree.leaves(mlp_both_ways("reference_e4m3")(*arrays))
        got = jax.tree.leaves(mlp_both_ways("mosaic_e4m3")(*arrays))
        # The hidden layer is rounded to e4m3 too, for y and the gradient of w_out: where its last
        # bit of bfloat16 differs, so may the scale of a block, and all roundings in it.
        of_hidden = (2, 1, 1, 2, 1)
        each = zip(got, wanted, of_hidden, strict=True)
        return max(of_largest(have, want) / share for have, want, share in each)

    check(report, "gate, up and SwiGLU", fused)
    check(report, "expert MLP, forward + backward", whole)
    check(report, "expert MLP in e4m3, forward + backward", rounded)


def check_layer(report: Reporter, shape: Shape, tokens: int, chunks: int) -> None:
    """A whole expert layer in chunks, with all its gradients, against the plain form in one."""
    train_step = one_device_step(layer_config(shape), jax.devices())
    route = route_to_itself(train_step.spec.layout, chunks)
    # The interpreter takes minutes for a layer, and JAX recomputes no kernel that runs in it.
    kernel = "mosaic" if report.gpu else "blocked"
    ours = build_layer(train_step, route=route, remat="attention", experts=kernel)
    plain = build_layer(train_step, experts="reference", dtype="float32")
    params, bias = draw_weights(report, ours)
    x, dy = (report.draw(seed, 1, tokens, shape.D) for seed in (10, 11))

    def compute() -> float:
        exact = (jax.tree.map(lambda a: a.astype(jnp.float32), a) for a in (params, x, dy))
        wide, x_exact, dy_exact = exact
        wanted = jax.tree.leaves(plain.both_ways(wide, bias, x_exact, dy_exact))
        got = jax.tree.leaves(ours.both_ways(params, bias, x, dy))
        return max(of_largest(have, want) for have, want in zip(got, wanted, strict=True))

    check(report, f"expert layer in {chunks} chunks", compute, kernel)


def of_largest(have: Any, want: Any) -> float:
    """Rows and hidden layer are rounded to bfloat16 on the way: 2^-5 of the largest value."""
    return worst_of(have, want, np.full(np.shape(want), 2.0**-5 * np.abs(want).max(initial=0)))


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Blocks of many magnitudes; in the first ones a value each that is hard to treat."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, (*shape[:-1], 1)))
    rows = x.reshape(-1, shape[-1])
    for row, number in enumerate([0.0, 1e-40, TINY, 3e38, np.inf, -np.inf, np.nan]):
        rows[row % len(rows)] = 0 if abs(number) < 1e-3 else rows[row % len(rows)]
        rows[row % len(rows), rng.integers(shape[-1])] = number
    return x


@cache
def plainly(function: Callable[..., Any], *options: Any, **named: Any) -> Callable[..., Any]:
    """The plain form, jitted: op by op a GPU would compile each of its operations alone."""
    return jax.jit(lambda x: function(x, *options, **named))


def check_quantise(report: Reporter, rows: int, size: int, name: str, dtype: str) -> None:
    """Bytes and scales within the format's own error, as the plain form is."""
    x = jnp.asarray(numbers(np.random.default_rng(0), rows, size), jnp.float32).astype(dtype)

    def compute() -> float:
        run = jax.jit(partial(quantize, name=name, block=128, implementation="mosaic"))
        return _quantised_error(run(x), x, name)

    check(report, f"quantise {dtype} to {name}", compute)


def _quantised_error(q: Quantized, x: jax.Array, name: str) -> float:
    """Of scales against the plain form's, and of what comes back against what went in."""
    size, kind = x.shape[-1], FORMATS[name]
    want = plainly(quantize, name, block=128)(x)
    # A scale that is denormal may be flushed to zero: its block then decodes to zeros.
    scales = worst_of(q.scale, want.scale, np.abs(want.scale) * DIVISION + TINY)
    back = np.asarray(plainly(dequantize, name, size)(q), np.float64)
    scale = np.repeat(np.asarray(want.scale, np.float64), 128, axis=-1)[..., :size]
    exact = np.where(np.isnan(scale), np.nan, np.asarray(x, np.float64))
    step = np.maximum(np.abs(exact) * kind.relative, scale * kind.absolute)
    allowed = step + (np.abs(exact) + kind.largest * scale) * DIVISION + kind.largest * TINY
    return max(scales, worst_of(back, exact, allowed))


def check_sum(report: Reporter, peers: int, rows: int, size: int, name: str) -> None:
    """What peers sent, added up: in float64 from the same bytes."""
    x = jnp.asarray(numbers(np.random.default_rng(0), peers, rows, size), jnp.float32)
    q = plainly(quantize, name, block=128)(x)

    def compute() -> float:
        run = jax.jit(partial(dequantize_sum, name=name, size=size, implementation="mosaic"))
        parts = np.asarray(plainly(dequantize, name, size)(q), np.float64)
        allowed = peers * EPS * np.sum(np.abs(parts), axis=0)
        return worst_of(run(q), np.sum(parts, axis=0), allowed)

    check(report, f"dequantise-reduce {peers} x {name}", compute)


def check_rows(report: Reporter, shape: Shape, tokens: int, name: str) -> None:
    """Rows quantised on the way out, and weighted and summed on the way back."""
    D, K, rng = shape.D, shape.K, np.random.default_rng(0)
    token, place, _ = map(jnp.asarray, place_tokens(tokens, shape, skewed=True))
    token = token.at[0].set(tokens)  # a row of zeros
    x = jnp.asarray(numbers(rng, tokens, D), jnp.float32).astype(jnp.bfloat16)
    weight = jnp.asarray(rng.random((tokens, K)), jnp.float32)
    rows = jnp.concatenate([x, jnp.zeros_like(x[:1])])[token]
    q = plainly(quantize, name, block=128)(rows)

    def out() -> float:
        run = partial(permute_quantize, name=name, block=128, implementation="mosaic")
        return _quantised_error(jax.jit(run)(x, token), rows, name)

    def weighted() -> float:
        each = jnp.asarray(rng.random(len(token)), jnp.float32)
        run = partial(permute_quantize, name=name, block=128, implementation="mosaic")
        exact = each[:, None] * rows.astype(jnp.float32)
        return _quantised_error(jax.jit(run)(x, token, weight_M=each), exact, name)

    def back() -> float:
        def run(q: Quantized) -> jax.Array:
            return dequantize_combine(q, weight, place, name, D, implementation="mosaic")

        parts = np.asarray(plainly(dequantize, name, D)(q), np.float64)[np.asarray(place)]
        parts = parts * np.asarray(weight, np.float64)[:, :, None]
        allowed = 2 * K * EPS * np.sum(np.abs(parts), axis=1)
        # Beyond float32 a sum is infinite.
        with np.errstate(over="ignore"):
            want = np.sum(parts, axis=1).astype(np.float32)
        return worst_of(jax.jit(run)(q), want, allowed + np.abs(want) * EPS)

    check(report, f"permute + quantise {name}", out)
    check(report, f"permute + weight + quantise {name}", weighted)
    check(report, f"dequantise {name} + unpermute + weighted sum", back)


def _case(name: str, run: Callable[..., None], *arguments: Any) -> Case:
    return Case(name, lambda report: run(report, *arguments))


def check_cases(*, small: bool) -> list[Case]:
    """Odd sizes, empty groups, one group, spare rows; then widths of published models."""
    products = [
        ((70, 0, 3), 4, 64, 192),
        ((0, 150, 0), 5, 128, 320),
        ((513, 0, 1, 2048, 300), 11, 512, 768),
        ((1000,), 0, 2048, 1536),
        (tuple(range(1, 65)), 7, 768, 2048),
    ]
    mlps = [((70, 0, 3), 6, 128, 64), ((300, 0, 700, 129), 9, 1024, 512)]
    found = []
    if small:
        products = mlps = [((9, 0, 3), 4, 64, 64)]
    for sizes, spare, K, N in products:
        shown = sizes if len(sizes) < 8 else f"1 to {len(sizes)}"
        name = f"groups of {shown} rows, {spare} spare, K={K}, N={N}"
        found.append(_case(name, check_products, sizes, spare, K, N))
        found.append(_case(name, check_e4m3, sizes, spare, K, N))
    for sizes, spare, D, F in mlps:
        found.append(_case(f"groups of {sizes}, D={D}, F={F}", check_mlp, sizes, spare, D, F))
    narrow = Shape("", 1024, 0, 4, 2)
    if small:
        found += _quantiser_cases(("int8",), (9, 300), ("bfloat16",), 2, narrow, 16)
        return [*found, *_layer_cases(((SMALL, 12),), (4,))]
    rows = (3001, 1000)
    found += _quantiser_cases(tuple(FORMATS), rows, ("bfloat16", "float32"), 8, narrow, 500)
    for width in (7168, 2048, 4096):
        wide = Shape("", width, 0, 16, 8)
        found += _quantiser_cases(("e4m3", "int8", "int4"), rows, (), 0, wide, 500)
    return [*found, *_layer_cases(((OLMOE, 1024), (QWEN3, 1024)), (1, 4))]


def _layer_cases(sizes: tuple[tuple[Shape, int], ...], chunks: tuple[int, ...]) -> list[Case]:
    """Returns the checks of layers: each shape with its tokens, in each number of chunks."""
    return [
        _case(f"{shape.model}, {tokens} tokens", check_layer, shape, tokens, n)
        for shape, tokens in sizes
        for n in chunks
    ]


def _quantiser_cases(
    names: tuple[str, ...],
    size: tuple[int, int],
    dtypes: tuple[str, ...],
    peers: int,
    shape: Shape,
    tokens: int,
) -> list[Case]:
    """Of each format: values alone, sums over peers (0: none), and rows on their way."""
    found = []
    for name in names:
        shown = "{} x {}".format(*size)
        found += [_case(shown, check_quantise, *size, name, dtype) for dtype in dtypes]
        if peers:
            found.append(_case(shown, check_sum, peers, *size, name))
        words = f"{tokens} tokens of width {shape.D}, K={shape.K}"
        found.append(_case(words, check_rows, shape, tokens, name))
    return found
