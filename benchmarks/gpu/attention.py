"""Attention that takes ranges of keys: against our own form, and beside cuDNN's causal one.

tokamax's kernel is taken where it is installed (`moejax[kernels]`). Documents, windows, sinks and
stripes of a shared sequence are checked; what is timed is one causal sequence, which cuDNN needs no
mask for, and the stripes of one of eight devices that share it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.case import Case, Reporter
from benchmarks.gpu.correct import check, of_largest
from benchmarks.gpu.timing import Form, jax_form
from moejax.config.schema import MeshConfig
from moejax.kernels.attention.ranged import Extent, Keys, ranged_attention, ranges
from moejax.kernels.attention.tokamax import INSTALLED

CAUSAL, STRIPES = "attention, forward + backward", "attention of stripes, forward + backward"
DEVICES, STRIPE = 8, MeshConfig().context_stripe


class Heads(NamedTuple):
    """Heads of a model: of queries, of keys, and their width; the window and sinks of gpt-oss."""

    model: str
    H: int
    G: int
    C: int
    window: int | None = None
    sinks: bool = False


QWEN3 = Heads("Qwen3-30B-A3B", 32, 4, 128)
GPT_OSS = Heads("gpt-oss", 64, 8, 64, window=128, sinks=True)
TINY = Heads("tiny", 4, 2, 16, window=40, sinks=True)  # where there is no GPU


class Operands(NamedTuple):
    """Queries, keys, values, sinks, the result's gradient, and the range of each query."""

    q_BTHC: jax.Array
    k_BSGC: jax.Array
    v_BSGC: jax.Array
    sinks_H: jax.Array | None
    dy_BTHC: jax.Array
    first_BT: jax.Array
    last_BT: jax.Array


def draw(report: Reporter, heads: Heads, position_T: np.ndarray, length: int) -> Operands:
    """Numbers in bfloat16; documents of a few hundred positions if the model has a window."""
    documents = 1 if heads.window is None else max(2, length // 400)
    segment_BS = jnp.asarray(np.arange(length)[None] * documents // length, jnp.int32)
    each = (1, len(position_T), heads.H, heads.C), (1, length, heads.G, heads.C)
    q, dy = (report.draw(seed, *each[0]) for seed in (0, 3))
    k, v = (report.draw(seed, *each[1]) for seed in (1, 2))
    sinks = report.draw(4, heads.H, dtype=jnp.float32) if heads.sinks else None
    return Operands(q, k, v, sinks, dy, *ranges(segment_BS, jnp.asarray(position_T), heads.window))


def both_ways(
    implementation: str, scale: float, extent: Extent, cuts: Sequence[int], operands: Operands
) -> tuple[jax.Array, ...]:
    """Returns the result and the gradients of queries, keys, values and sinks.

    Args:
      cuts: where the keys are cut in pieces, as along a ring.
    """
    q, k, v, sinks, dy, first, last = operands
    borders = list(pairwise((0, *cuts, k.shape[1])))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        pieces = tuple(
            Keys(k[:, a:b], v[:, a:b], jnp.maximum(first - a, 0), jnp.minimum(last, b - 1) - a)
            for a, b in borders
        )
        options = {"scale": scale, "sinks_H": sinks, "implementation": implementation}
        return ranged_attention(q, pieces, (extent,) * len(pieces), **options)

    y, pull = jax.vjp(attend, q, k, v, sinks)
    return (y, *pull(dy.astype(y.dtype)))


def positions(length: int, rank: int | None) -> np.ndarray:
    """All positions, or the stripes of one of the devices, dealt back and forth."""
    if rank is None:
        return np.arange(length)
    stripe = min(STRIPE, length // (2 * DEVICES))
    rounds = np.arange(length).reshape(-1, 2 * DEVICES, stripe)
    return rounds[:, [rank, 2 * DEVICES - 1 - rank]].reshape(-1)


def form_of(
    heads: Heads, position_T: np.ndarray, implementation: str, cuts: Sequence[int] = ()
) -> Callable[..., Any]:
    """Returns the jitted function of operands."""
    extent = Extent((int(position_T[0]),), heads.window, heads.window)
    return jax.jit(partial(both_ways, implementation, heads.C**-0.5, extent, cuts))


def kernel_of(report: Reporter) -> str:
    """The kernel that takes ranges here."""
    return "tokamax" if report.gpu and INSTALLED else "blocked"


def check_ranges(report: Reporter, heads: Heads, length: int, rank: int | None) -> None:
    """The kernel, on all keys and on halves, against our own form of the numbers in float32."""
    position_T, kernel = positions(length, rank), kernel_of(report)
    operands = draw(report, heads, position_T, length)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), operands[:5])

    def compute() -> float:
        with jax.default_matmul_precision("highest"):
            wanted = form_of(heads, position_T, "blocked")(Operands(*wide, *operands[5:]))
        worst = []
        for cuts in ((), (length // 2,)):
            found = form_of(heads, position_T, kernel, cuts)(operands)
            both = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
            worst += [of_largest(have, want) for have, want in both]
        return max(worst)

    check(report, "ranged attention", compute, kernel)


def cudnn(operands: Operands) -> tuple[jax.Array, ...]:
    """One causal sequence by cuDNN, forward and backward."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    y, pull = jax.vjp(attend, *operands[:3])
    return (y, *pull(operands.dy_BTHC))


def compare(report: Reporter, heads: Heads, length: int, rank: int | None) -> None:
    """Times one sequence, whole or the stripes of a device; FLOPs are those of seen pairs."""
    position_T = positions(length, rank)
    operands = draw(report, heads, position_T, length)
    kernel = kernel_of(report)
    forms: dict[str, Callable[[], Form]] = {
        f"ranges, {kernel}": partial(jax_form, form_of(heads, position_T, kernel), operands)
    }
    if rank is None and report.gpu:
        forms["cuDNN"] = partial(jax_form, jax.jit(cudnn), operands)
    seen = float(jnp.sum(operands.last_BT - operands.first_BT + 1.0))
    flops = 7 * 2 * heads.H * heads.C * seen  # two products forward, five backward
    report.compare(CAUSAL if rank is None else STRIPES, forms, flops=flops)


def attention_checks(*, small: bool) -> list[Case]:
    """Returns the checks: whole sequences and stripes, with and without windows and sinks."""
    cases = [(GPT_OSS, 4_096, None), (GPT_OSS, 8_192, 3), (QWEN3, 4_096, None)]
    return _cases(check_ranges, [(TINY, 256, None), (TINY, 256, 3)] if small else cases)


def attention_cases(*, small: bool) -> list[Case]:
    """Returns the timed cases, shorter sequences first."""
    tiny = TINY._replace(window=None, sinks=False)
    cases = [(QWEN3, length, rank) for length in (16_384, 131_072) for rank in (None, 3)]
    return _cases(compare, [(tiny, 256, None)] if small else cases)


def _cases(run: Callable[..., None], sizes: Sequence[tuple[Heads, int, int | None]]) -> list[Case]:
    found = []
    for heads, length, rank in sizes:
        name = f"{heads.model}, {length} positions" + ("" if rank is None else ", stripes")
        found.append(Case(name, partial(run, heads=heads, length=length, rank=rank)))
    return found
