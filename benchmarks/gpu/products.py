"""Products of rows and the matrix of their expert: forward, both gradients, and the fused MLP.

Legend: M rows sorted by group, G groups, K summed over, N columns.
"""

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.case import Case, Reporter
from benchmarks.gpu.shapes import DEEPSEEK, MIXTRAL, MODELS, OLMOE, QWEN3, TINY, Shape, group_sizes
from benchmarks.gpu.timing import Form, jax_form, jit_product, torch_form
from moejax.kernels.experts.expert_mlp import expert_mlp
from moejax.kernels.experts.grouped_matmul import grouped_matmul, swiglu
from moejax.kernels.experts.grouped_matmul_e4m3 import BLOCK, QuantizedWeights, multiply_quantized
from moejax.kernels.experts.quantize import Quantized

FORWARD, BY_ROWS, BY_WEIGHTS = "forward", "data gradient", "weight gradient"
IN_E4M3 = "forward, e4m3"
FUSED, MLP = "gate, up and SwiGLU", "expert MLP, forward + backward"
EQUAL = "equal groups (einsum)"
TARGET_ROWS, SWEPT_ROWS = (2048, 512), (1024, 256, 128, 64, 4096, 8192)
MAX_ELEMENTS = 2**31  # of an array: an index fits in 32 bits


@cache
def product(operation: str, implementation: str) -> Callable[..., jax.Array]:
    """The product or a gradient, jitted, of x [M, K], w [G, K, N], dy [M, N] and sizes [G]."""

    def multiply(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        if implementation == EQUAL:
            G, K, N = w.shape
            return jnp.einsum("gmk,gkn->gmn", x.reshape(G, -1, K), w).reshape(-1, N)
        return grouped_matmul(x, w, sizes, implementation=implementation)

    def run(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
        if operation == FORWARD:
            return multiply(x, w, sizes)
        if operation == BY_ROWS:
            return jax.vjp(lambda x: multiply(x, w, sizes), x)[1](dy)[0]
        return jax.vjp(lambda w: multiply(x, w, sizes), w)[1](dy)[0]

    return jit_product(run) if implementation == EQUAL else jax.jit(run)


@cache
def fused_product(implementation: str) -> Callable[..., Any]:
    """Activations [M, F], and gate and up [M, 2 F], jitted, of x [M, D], w [G, D, 2, F], sizes."""

    def in_two_steps(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        h = grouped_matmul(x, w.reshape(*w.shape[:2], -1), sizes, implementation=implementation)
        return swiglu(h), h

    if implementation != "mosaic":
        return jax.jit(in_two_steps)
    from moejax.kernels.mosaic.grouped_matmul import grouped_swiglu, schedule_products

    return jax.jit(lambda x, w, sizes: grouped_swiglu(x, w, schedule_products(sizes, len(x))))


@cache
def product_e4m3(implementation: str) -> Callable[..., jax.Array]:
    """The product of quantised rows and weights, jitted; see `multiply_quantized`."""
    return jax.jit(partial(multiply_quantized, implementation=implementation))


@cache
def mlp_both_ways(implementation: str) -> Callable[..., Any]:
    """Result and all gradients of the experts' MLP, jitted, of x, w_in, w_out, dy and sizes.

    The last gradient is that of the router's weights, as experts behind an exchange find it.
    """

    def run(*arrays: jax.Array) -> Any:
        *inputs, dy, sizes = arrays

        def form(x: jax.Array, w_in: jax.Array, w_out: jax.Array, one: jax.Array) -> jax.Array:
            return expert_mlp(x, w_in, w_out, sizes, implementation=implementation, one_M1=one)

        one_M1 = jnp.ones((dy.shape[0], 1), jnp.float32)
        y, pull = jax.vjp(form, *inputs, one_M1)
        return y, pull(dy)

    return jax.jit(run)


def torch_products(torch: Any, operation: str) -> dict[str, Callable[..., Any]]:
    """With torch._grouped_mm, weights as we keep them and as torch likes them, [G, N, K]."""
    multiply = torch._grouped_mm

    def turned(w: Any) -> Any:
        G, K, N = w.shape
        return w.view(G, N, K)

    kept = {
        FORWARD: lambda x, w, dy, ends: multiply(x, w, offs=ends),
        BY_ROWS: lambda x, w, dy, ends: multiply(dy, w.transpose(-2, -1), offs=ends),
        BY_WEIGHTS: lambda x, w, dy, ends: multiply(x.t(), dy, offs=ends),
    }
    liked = {
        FORWARD: lambda x, w, dy, ends: multiply(x, turned(w).transpose(-2, -1), offs=ends),
        BY_ROWS: lambda x, w, dy, ends: multiply(dy, turned(w), offs=ends),
        BY_WEIGHTS: lambda x, w, dy, ends: multiply(dy.t(), x, offs=ends),
    }
    return {"torch": kept[operation], "torch, weights transposed": liked[operation]}


def kernel_of(report: Reporter) -> str:
    """Ours where there is a GPU; else what runs anywhere."""
    return "mosaic" if report.gpu else "reference"


def implementations(report: Reporter, sizes: np.ndarray, *, dense: bool) -> list[str]:
    """What is compared.

    Args:
      dense: also `ragged_dot`, which multiplies every row by every matrix.
    """
    tokamax = report.gpu and importlib.util.find_spec("tokamax")
    return [
        kernel_of(report),
        *(["tokamax"] if tokamax else []),
        *(["ragged_dot"] if dense else []),
        *([EQUAL] if len(set(sizes.tolist())) == 1 else []),
    ]


def compare_products(report: Reporter, K: int, N: int, sizes: np.ndarray, *, dense: bool) -> None:
    """The product and its gradients, beside torch's and XLA's."""
    G, M, torch = len(sizes), int(sizes.sum()), report.torch
    arrays = [report.draw(0, M, K), report.draw(1, G, K, N), report.draw(2, M, N)]
    arrays.append(jnp.asarray(sizes))
    tensors: list[Any] = []
    if torch:
        shapes = [array.shape for array in arrays[:3]]
        tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
        tensors.append(torch.tensor(sizes.cumsum(), device="cuda", dtype=torch.int32))
    for operation in (FORWARD, BY_ROWS, BY_WEIGHTS):
        forms: dict[str, Callable[[], Form]] = {
            name: partial(jax_form, product(operation, name), *arrays)
            for name in implementations(report, sizes, dense=dense)
        }
        if torch:
            forms |= {
                name: partial(torch_form, torch, run, *tensors)
                for name, run in torch_products(torch, operation).items()
            }
        report.compare(operation, forms, flops=2.0 * M * K * N)


def compare_e4m3(report: Reporter, K: int, N: int, sizes: np.ndarray) -> None:
    """The product of what is rounded already; torch's has a scale a row and a column."""
    G, M, torch = len(sizes), int(sizes.sum()), report.torch
    J, B = -(-N // BLOCK), -(-K // BLOCK)
    # Random bytes would hold NaN; those of a normal draw are numbers, and scales of one will do.
    q = Quantized(_bytes(report.draw(0, M, B, BLOCK)), jnp.ones((M, B), jnp.float32))
    scale = jnp.ones((G, J, B), jnp.float32)
    w = QuantizedWeights(_bytes(report.draw(1, G, N, B * BLOCK)), scale)
    run = product_e4m3(kernel_of(report))
    forms: dict[str, Callable[[], Form]] = {
        kernel_of(report): partial(jax_form, run, q, w, jnp.asarray(sizes))
    }
    if torch:
        normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        x, y = (normal(*s).to(torch.float8_e4m3fn) for s in ((M, K), (G, N, K)))
        scales = [torch.ones(s, device="cuda") for s in ((M,), (G, N))]
        ends = torch.tensor(sizes.cumsum(), device="cuda", dtype=torch.int32)
        multiply = partial(torch._scaled_grouped_mm, offs=ends, out_dtype=torch.bfloat16)
        form = partial(torch_form, torch, multiply, x, y.transpose(-2, -1), *scales)
        forms["torch, a scale a row"] = form
    report.compare(IN_E4M3, forms, flops=2.0 * M * K * N)


_bytes = jax.jit(lambda x: jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8))


def compare_shape(report: Reporter, shape: Shape, rows: int, skewed: bool) -> None:
    """Products into the experts of a model, with so many rows in the mean."""
    D, F, G, M = shape.D, shape.F, shape.G, rows * shape.G
    sizes = group_sizes(M, G, skewed=skewed)
    dense = shape in (OLMOE, TINY) and rows <= TARGET_ROWS[-1] and not skewed
    compare_products(report, D, 2 * F, sizes, dense=dense)
    arrays = report.draw(0, M, D), report.draw(1, G, D, 2, F), jnp.asarray(sizes)
    forms = {kernel_of(report): partial(jax_form, fused_product(kernel_of(report)), *arrays)}
    report.compare(FUSED, forms, flops=4.0 * M * D * F)
    compare_e4m3(report, D, 2 * F, sizes)
    if report.torch:
        report.torch.cuda.empty_cache()


def compare_mlp(report: Reporter, shape: Shape, rows: int, skewed: bool) -> None:
    """The experts' MLP, forward and backward."""
    D, F, G, M = shape.D, shape.F, shape.G, rows * shape.G
    arrays = [report.draw(0, M, D), report.draw(1, G, D, 2, F), report.draw(2, G, F, D)]
    arrays += [report.draw(3, M, D), jnp.asarray(group_sizes(M, G, skewed=skewed))]
    kernels = ("mosaic", "mosaic_e4m3") if report.gpu else ("blocked",)
    forms = {name: partial(jax_form, mlp_both_ways(name), *arrays) for name in kernels}
    report.compare(MLP, forms, flops=18.0 * M * D * F)


def cases_of(
    run: Callable[..., None],
    models: tuple[Shape, ...],
    rows: tuple[int, ...],
    *skews: bool,
) -> list[Case]:
    """A case for each number of rows, model and skew, where arrays stay below `MAX_ELEMENTS`.

    Skews of a shape follow each other: they share what was compiled, which takes longest.
    """
    return [
        Case(
            f"{shape.model}, {each} rows an expert, {'skewed' if skewed else 'uniform'}",
            partial(run, shape=shape, rows=each, skewed=skewed),
        )
        for each in rows
        for shape in models
        if each * shape.G * max(shape.D, 2 * shape.F) < MAX_ELEMENTS
        for skewed in skews
    ]


def target_cases(*, small: bool) -> list[Case]:
    """The shapes that the targets are about."""
    if small:
        tiny = (TINY,), (16,)
        return [*cases_of(compare_shape, *tiny, False), *cases_of(compare_mlp, *tiny, True)]
    return [
        *cases_of(compare_shape, MODELS, TARGET_ROWS, False, True),
        *cases_of(compare_mlp, (MIXTRAL, QWEN3, DEEPSEEK), (1024,), False),
    ]


def swept_cases(*, small: bool) -> list[Case]:
    """From few rows an expert to many."""
    if small:
        return cases_of(compare_shape, (TINY,), (8,), True)
    return cases_of(compare_shape, MODELS, SWEPT_ROWS, False, True)
