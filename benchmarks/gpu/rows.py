"""What only moves and rounds rows: permutes, quantisers, and both at once; bound by memory.

Bytes are what must cross memory at least: rows that several copy are read once, and stay in cache.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.case import Case, Reporter
from benchmarks.gpu.shapes import DEEPSEEK, MIXTRAL, QWEN3, TINY, Placement, Shape, place_tokens
from benchmarks.gpu.timing import Form, jax_form, torch_form
from moejax.kernels import permute as plain
from moejax.kernels.experts.quantize import Quantized, dequantize_sum, quantize
from moejax.kernels.experts.quantized_rows import dequantize_combine, permute_quantize
from moejax.kernels.formats import FORMATS

PERMUTE, UNPERMUTE = "permute", "unpermute + weighted sum"
TAKE, TAKE_WEIGHTED = "take rows of a chunk", "weighted rows to buckets"
BLOCK = 128  # values that share a scale
XLA = "XLA"  # plain JAX, as the compiler makes it


@cache
def jitted(function: Callable[..., Any], *options: Any, **named: Any) -> Callable[..., Any]:
    """The function of arrays, jitted once for all cases; options come after the arrays."""
    return jax.jit(lambda *arrays: function(*arrays, *options, **named))


def implementations(report: Reporter) -> dict[str, str]:
    """Name -> what the functions know it by."""
    return ({"mosaic": "mosaic"} if report.gpu else {}) | {XLA: "reference"}


def bytes_of_values(count: int, name: str) -> float:
    """Bytes of so many quantised values and their scales."""
    return count * FORMATS[name].bits / 8 + count / BLOCK * 4


def compare_permutes(report: Reporter, shape: Shape, tokens: int, skewed: bool) -> None:
    """Rows to their experts in bfloat16, and their results back."""
    N, D, K = tokens, shape.D, shape.K
    where = Placement(*map(jnp.asarray, place_tokens(N, shape, skewed=skewed)))
    x, y = report.draw(0, N, D), report.draw(1, N * K, D)
    weight = jnp.abs(report.draw(2, N, K, dtype=jnp.float32))
    forms: dict[str, Callable[[], Form]] = {
        "moejax": partial(jax_form, jitted(plain.permute), x, where.token_M, where.slot_NK),
        "XLA (jnp.take)": partial(
            jax_form, jitted(jnp.take, axis=0, mode="clip"), x, where.token_M
        ),
    }
    back = {"moejax": partial(jax_form, jitted(plain.weighted_sum), y, weight, *where[1:])}
    back["XLA (scatter-add)"] = partial(
        jax_form, jitted(_scatter_back), y, weight, where.token_M, where.assignment_M
    )
    if report.torch:
        forms["torch"], back["torch"] = _torch_permutes(report.torch, where, D)
    moved = 2.0 * D * (N + N * K)
    report.compare(PERMUTE, forms, bytes=moved)
    report.compare(UNPERMUTE, back, bytes=moved)
    compare_takes(report, x, y, weight, where)


def compare_takes(
    report: Reporter, x: jax.Array, y: jax.Array, weight: jax.Array, where: Placement
) -> None:
    """Rows in buckets to the order of experts, and gradients of results to buckets, weighted."""
    D, K, rows = x.shape[1], weight.shape[1], where.assignment_M
    inverse = where.slot_NK.reshape(-1)
    run = jitted(plain.take_rows, 0)
    taken = {"moejax": partial(jax_form, run, y, rows[None], inverse[None])}
    report.compare(TAKE, taken, bytes=4.0 * D * len(rows))

    def to_buckets(x: jax.Array, weight: jax.Array, rows: jax.Array) -> jax.Array:
        return plain.weighted_rows_at(x, rows // K, plain.weight_at(weight, rows))

    weighted = {"moejax": partial(jax_form, jax.jit(to_buckets), x, weight, rows)}
    report.compare(TAKE_WEIGHTED, weighted, bytes=2.0 * D * (len(x) + len(rows)))


def _scatter_back(
    y: jax.Array, weight: jax.Array, token_M: jax.Array, assignment_M: jax.Array
) -> jax.Array:
    rows = y.astype(jnp.float32) * weight.reshape(-1)[assignment_M][:, None]
    zeros = jnp.zeros((weight.shape[0], y.shape[1]), jnp.float32)
    return zeros.at[token_M].add(rows).astype(y.dtype)


def _torch_permutes(torch: Any, where: Placement, D: int) -> tuple[Any, Any]:
    """Forms of permute and its way back; the sum is a batched product with the weights."""
    M, (N, K) = len(where.token_M), where.slot_NK.shape
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, y, weight = normal(N, D), normal(M, D), normal(N, 1, K)
    token = torch.tensor(np.array(where.token_M), device="cuda")
    place = torch.tensor(np.array(where.slot_NK).reshape(-1), device="cuda")

    def back() -> Any:
        return torch.bmm(weight, y.index_select(0, place).view(N, K, D))

    return partial(torch_form, torch, partial(x.index_select, 0, token)), partial(
        torch_form, torch, back
    )


def compare_quantized_rows(
    report: Reporter, shape: Shape, tokens: int, skewed: bool, name: str
) -> None:
    """Rows quantised on their way out; on their way back dequantised, weighted and summed."""
    N, D, K = tokens, shape.D, shape.K
    where = Placement(*map(jnp.asarray, place_tokens(N, shape, skewed=skewed)))
    x, weight = report.draw(0, N, D), jnp.abs(report.draw(1, N, K, dtype=jnp.float32))
    moved = 2.0 * N * D + bytes_of_values(N * K * D, name)
    out, back = {}, {}
    # Any rows will do for the way back, of the right dtypes.
    rows = quantize(report.draw(2, N * K, D), name, block=BLOCK)
    for label, kind in implementations(report).items():
        run = jitted(permute_quantize, name, block=BLOCK, implementation=kind)
        out[label] = partial(jax_form, run, x, where.token_M)
        run = jitted(_combine, name, D, kind)
        back[label] = partial(jax_form, run, *rows, weight, where.slot_NK)
    report.compare(f"permute + quantise {name}", out, bytes=moved)
    report.compare(f"dequantise {name} + unpermute + weighted sum", back, bytes=moved)


def _combine(values: Any, scale: Any, weight: Any, place: Any, *options: Any) -> Any:
    name, width, kind = options
    how = {"dtype": jnp.bfloat16, "implementation": kind}
    return dequantize_combine(Quantized(values, scale), weight, place, name, width, **how)


def compare_quantisers(report: Reporter, name: str, dtype: str) -> None:
    """Block quantisation of many values."""
    rows = 64 if report.small else 2**28 // 4096
    x = report.draw(0, rows, 4096, dtype=jnp.dtype(dtype))
    forms = {
        label: partial(jax_form, jitted(quantize, name, block=BLOCK, implementation=kind), x)
        for label, kind in implementations(report).items()
    }
    moved = x.nbytes + bytes_of_values(x.size, name)
    report.compare(f"quantise {dtype} to {name}", forms, bytes=moved)


def compare_sums(report: Reporter, name: str, peers: int) -> None:
    """What peers sent, dequantised and added up."""
    rows = 8 if report.small else 2**28 // 4096 // peers
    q = quantize(report.draw(0, peers, rows, 4096), name, block=BLOCK)
    forms = {
        label: partial(jax_form, jitted(_sum, name, kind), *q)
        for label, kind in implementations(report).items()
    }
    count = peers * rows * 4096
    moved = bytes_of_values(count, name) + 4.0 * count / peers
    report.compare(f"dequantise-reduce {peers} x {name} to float32", forms, bytes=moved)


def _sum(values: jax.Array, scale: jax.Array, name: str, kind: str) -> jax.Array:
    return dequantize_sum(Quantized(values, scale), name, 4096, implementation=kind)


def row_cases(*, small: bool) -> list[Case]:
    """What the targets name first; then other formats, shapes and routings."""
    shapes = [(TINY, 64)] if small else [(DEEPSEEK, 4096), (QWEN3, 16384), (MIXTRAL, 16384)]
    found = []
    for skewed in (False, True):
        for shape, tokens in shapes:
            name = f"{shape.model}, {tokens} tokens, {'skewed' if skewed else 'uniform'}"
            where = {"shape": shape, "tokens": tokens, "skewed": skewed}
            found.append(Case(name, partial(compare_permutes, **where)))
            for kind in ("e4m3",) if skewed else ("e4m3", "int8", "int4"):
                found.append(Case(name, partial(compare_quantized_rows, **where, name=kind)))
    values = "tiny" if small else "2^28 values"
    pairs = [("int8", "bfloat16"), ("e4m3", "bfloat16"), ("int4", "float32"), ("int4", "bfloat16")]
    pairs += [("int8", "float32"), ("e5m2", "bfloat16")]
    quantisers = [
        Case(values, partial(compare_quantisers, name=name, dtype=dtype)) for name, dtype in pairs
    ]
    sums = [
        Case(values, partial(compare_sums, name=name, peers=peers))
        for name, peers in (("int4", 8), ("int8", 8), ("e4m3", 1))
    ]
    if small:
        return [*quantisers[:1], *sums[:1], *found[:2]]
    return [*quantisers[:4], *sums[:1], *found, *sums[1:], *quantisers[4:]]
