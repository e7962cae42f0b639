"""The experts in blocks, for CPUs: no row is computed for an expert that it is not bound for.

Per device. Legend: M rows, B rows of a block, G groups (experts), D width, F hidden, W = 2 F gate
and up; X and Y columns of two arrays of rows.

`lax.ragged_dot` costs G times the FLOPs on CPU. The blocked form computes each group's rows and no
others: sizes are known only at run time and shapes must be static, so a group is cut into blocks,
and each block runs at the smallest size in `BLOCK_ROWS` that holds it. Groups without rows cost
nothing: a chunk of tokens that meets few experts reads the weights of those alone.

Without gradients few rows a group go by `few_rows.cc`, which reads weights where they lie: XLA
copies what a loop slices. Of such a product K are summed over and N are columns.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.kernels.costs import jitted
from moejax.kernels.experts.activation import SWIGLU, Gate, activate, row_dots
from moejax.kernels.experts.expert_weights import (
    ExpertWeights,
    Factors,
    flat,
    times,
    times_transposed,
    weight_gradients,
)
from moejax.kernels.experts.grouped_matmul import add_bias
from moejax.kernels.kept import GATE_AND_UP
from moejax.runtime.program_cache import LibraryError, load_library

# Each size is compiled, forward and backward, for each bucket size of the exchange.
BLOCK_ROWS = (64, 128, 256, 384, 512)

# Most rows a group, on average, that go by `few_rows.cc`. Places of buckets that hold no row count
# too, but are not multiplied. benchmarks/results/ops.md has both forms by rows.
FEW_ROWS = 64
SOURCE = Path(__file__).with_name("few_rows.cc")
# Vectors as wide as this processor has; the order of a sum may differ between kinds of processors.
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast")
DTYPES = (jnp.float32, jnp.bfloat16)


class MlpForm(NamedTuple):
    """The static settings of the experts.

    Attributes:
      gate: the activation.
      met: groups that are likely to have rows, for the price; None for all.
    """

    gate: Gate = SWIGLU
    met: int | None = None


@dataclass(frozen=True)
class RowBlock:
    """Rows of a group that are computed at one time.

    Attributes:
      start: place of the first row.
      inside_B: false for surplus rows, which belong to another group or to none.
    """

    start: jax.Array
    inside_B: jax.Array

    @classmethod
    def at(cls, start: jax.Array, end: jax.Array, size: int, num_rows: int) -> "RowBlock":
        """The block of the rows from `start`, up to `end`; it begins earlier at the array's end."""
        first = jnp.minimum(start, num_rows - size)
        row_B = first + jnp.arange(size)
        return cls(first, (row_B >= start) & (row_B < end))

    def rows(self, x_MD: jax.Array) -> jax.Array:
        """The block's rows of an array, zero where they are surplus."""
        return jnp.where(self.inside_B[:, None], self._slice(x_MD), 0)

    def write(self, y_MD: jax.Array, y_BD: jax.Array) -> jax.Array:
        """Writes the block's rows; surplus rows stay as they are."""
        y_BD = jnp.where(self.inside_B[:, None], y_BD, self._slice(y_MD))
        return lax.dynamic_update_slice_in_dim(y_MD, y_BD, self.start, 0)

    def _slice(self, x_MD: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x_MD, self.start, self.inside_B.shape[0])

    def biased(self, y_BN: jax.Array, bias_N: jax.Array | None) -> jax.Array:
        """Adds a bias in float32; surplus rows become zero."""
        if bias_N is None:
            return y_BN
        biased_BN = (y_BN.astype(jnp.float32) + bias_N).astype(y_BN.dtype)
        return jnp.where(self.inside_B[:, None], biased_BN, 0)


def _named(which: str, function: Callable, weights: ExpertWeights, x_MD, form: MlpForm) -> Callable:
    """Returns the function under a name with its sizes, for its price."""
    M, D = x_MD.shape
    G, F = weights.w_out.shape[:2]
    adapters = weights.in_adapter, weights.out_adapter
    ranks = [0 if adapter is None else adapter.a.shape[2] for adapter in adapters]
    if which == "backward" and any(ranks):
        which = "frozen"
    sizes = (M, D, F, form.met or G, *(ranks if any(ranks) else ()))
    return jitted(function, f"experts_{which}", *sizes, gate=form.gate)


def rows_computed(rows: float, M: int) -> float:
    """Returns the rows that the blocked form computes for a group: whole blocks."""
    sizes = _block_sizes(M)
    whole, rest = divmod(rows, sizes[-1])
    last = next(size for size in sizes if size >= rest) if rest or not whole else 0
    return whole * sizes[-1] + last


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blocked_mlp(
    form: MlpForm,
    x_MD: jax.Array,
    weights: ExpertWeights,
    sizes_G: jax.Array,
    one_M1: jax.Array | None,
) -> jax.Array:
    """Returns `expert_mlp` by blocks of rows."""
    return _named("forward", _only_forward, weights, x_MD, form)(x_MD, weights, sizes_G)


def _only_forward(x_MD, weights, sizes_G, *, gate):
    def by_blocks():
        return _compute_rows(x_MD, weights, sizes_G, None, gate)[0]

    few = x_MD.shape[0] <= FEW_ROWS * sizes_G.shape[0]
    if not (few and takes_few_rows(x_MD, weights.w_out)):
        return by_blocks()
    read_once = partial(_few_rows, x_MD, weights, sizes_G, gate)
    return lax.platform_dependent(cpu=read_once, default=by_blocks)


def _few_rows(x_MD: jax.Array, weights: ExpertWeights, sizes_G: jax.Array, gate) -> jax.Array:
    """The forward pass of so few rows that reading the weights takes longer: [M, D] -> [M, D]."""
    weights = flat(weights)

    def multiply(x_MX, w_GXY, adapter: Factors | None, bias_GY):
        y_MY = multiply_few_rows(x_MX, w_GXY, sizes_G)
        if adapter is not None:
            z_MA = multiply_few_rows(x_MX, adapter.a, sizes_G)
            y_MY += multiply_few_rows(z_MA, adapter.b, sizes_G)
        return y_MY if bias_GY is None else add_bias(y_MY, bias_GY, sizes_G)

    h_MW = multiply(x_MD, weights.w_in, weights.in_adapter, weights.b_in)
    return multiply(activate(h_MW, gate), weights.w_out, weights.out_adapter, weights.b_out)


def multiply_few_rows(
    x_MK: Float[Array, "M K"], w_GKN: Float[Array, "G K N"], sizes_G: Int[Array, " G"]
) -> Float[Array, "M N"]:
    """Returns `reference.grouped_matmul`, summed in float32, without gradients.

    Matrices of groups without rows are not read, others once for each 32 rows of the group. On CPU
    only; see `takes_few_rows`.
    """
    name = f"moejax_few_rows_{x_MK.dtype.name}"
    result = jax.ShapeDtypeStruct((x_MK.shape[0], w_GKN.shape[2]), x_MK.dtype)
    return jax.ffi.ffi_call(name, result, vmap_method="sequential")(x_MK, w_GKN, sizes_G)


def takes_few_rows(x_MK: jax.Array, w_GKN: jax.Array) -> bool:
    """Returns whether `multiply_few_rows` takes arrays like these here.

    It needs a C++ compiler; stderr says it once if there is none.
    """
    known = x_MK.dtype == w_GKN.dtype and x_MK.dtype in DTYPES
    return known and jax.default_backend() == "cpu" and _register_few_rows()


@cache
def _register_few_rows() -> bool:
    names = [f"moejax_few_rows_{jnp.dtype(dtype).name}" for dtype in DTYPES]
    try:
        library = load_library(SOURCE, names, *FLAGS)
    except LibraryError as error:
        print(f"moejax: experts of few rows run by XLA, which is slower: {error}.", file=sys.stderr)
        return False
    for name in names:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return True


def _blocked_forward(form, x_MD, weights, sizes_G, one_M1):
    forward = _named("forward", _rows_forward, weights, x_MD, form)
    y_MD, h_MW = forward(x_MD, weights, sizes_G)
    h_MW = checkpoint_name(h_MW, GATE_AND_UP)
    return y_MD, (x_MD, h_MW, weights, sizes_G, one_M1)


def _rows_forward(x_MD, weights, sizes_G, *, gate):
    h_MW = jnp.zeros((x_MD.shape[0], math.prod(weights.w_in.shape[2:])), x_MD.dtype)
    return _compute_rows(x_MD, weights, sizes_G, h_MW, gate)


def _compute_rows(x_MD, weights, sizes_G, h_MW, gate):
    """Returns the forward result, and gate and up of the hidden layer unless `h_MW` is None."""

    def compute(block: RowBlock, carry, w: ExpertWeights):
        y_MD, h_MW = carry
        h_BW = block.biased(times(block.rows(x_MD), w.w_in, w.in_adapter), w.b_in)
        y_BD = times(activate(h_BW, gate), w.w_out, w.out_adapter)
        y_MD = block.write(y_MD, block.biased(y_BD, w.b_out))
        return y_MD, None if h_MW is None else block.write(h_MW, h_BW)

    def group(_, carry, w, start, end):
        return _blocks(compute, carry, x_MD.shape[0], start, end, w)

    return _each_group(group, (jnp.zeros_like(x_MD), h_MW), sizes_G, weights)


def _blocked_backward(form, saved, dy_MD):
    trained, _ = saved[2].split()
    sums = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)
    dx_MD, dots_M1, dweights = _add_gradients(form, saved, dy_MD, sums)
    return dx_MD, jax.tree.map(lambda g, w: g.astype(w.dtype), dweights, trained), None, dots_M1


def _add_gradients(form, saved, dy_MD, sums):
    x_MD, h_MW, weights, sizes_G, one_M1 = saved
    backward = _named("backward", _rows_backward, weights, dy_MD, form)
    (dx_MD, dots_M1), sums = backward(x_MD, weights, sizes_G, h_MW, dy_MD, sums, one_M1)
    return dx_MD, dots_M1, sums


def _rows_backward(x_MD, weights, sizes_G, h_MW, dy_MD, sums, one_M1, *, gate):
    """Returns gradients of rows and ones, and `sums` plus the trained weights' gradients."""
    M = dy_MD.shape[0]

    def compute(block: RowBlock, carry, w: ExpertWeights):
        (dx_MD, dots_M1), dw = carry
        dy_BD = block.rows(dy_MD)
        a_BF, pull = jax.vjp(partial(activate, gate=gate), block.rows(h_MW))
        da_BF = times_transposed(dy_BD, w.w_out, w.out_adapter)
        dh_BW = pull(da_BF)[0]
        if dots_M1 is not None:
            dots_B1 = row_dots(a_BF, da_BF)
            dots_B1 += 0 if w.b_out is None else row_dots(dy_BD, w.b_out[None])
            dots_M1 = block.write(dots_M1, dots_B1)
        part = weight_gradients(w, block.rows(x_MD), dh_BW, a_BF, dy_BD)
        dw = part if dw is None else jax.tree.map(jnp.add, dw, part)
        dx_BD = times_transposed(dh_BW, w.w_in, w.in_adapter)
        return (block.write(dx_MD, dx_BD), dots_M1), dw

    def group(number, carry, w, start, end):
        rows, sums = carry
        rows, dw = _blocks(compute, (rows, None), M, start, end, w)

        def add(total_G, part):
            total = lax.dynamic_index_in_dim(total_G, number, keepdims=False)
            total = total + part.reshape(total.shape)
            return lax.dynamic_update_index_in_dim(total_G, total, number, 0)

        return rows, jax.tree.map(add, sums, dw)

    dots_M1 = None if one_M1 is None else jnp.zeros_like(one_M1)
    start = (jnp.zeros_like(dy_MD), dots_M1), sums
    return _each_group(group, start, sizes_G, weights)


blocked_mlp.defvjp(_blocked_forward, _blocked_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blocked_mlp_adding(
    form: MlpForm,
    x_MD: jax.Array,
    weights: ExpertWeights,
    sums: ExpertWeights,
    sizes_G: jax.Array,
    one_M1: jax.Array | None,
) -> tuple[jax.Array, ExpertWeights]:
    """Returns `expert_mlp_adding` by blocks of rows."""
    return blocked_mlp(form, x_MD, weights, sizes_G, one_M1), sums


def _adding_forward(form, x_MD, weights, sums, sizes_G, one_M1):
    y_MD, saved = _blocked_forward(form, x_MD, weights, sizes_G, one_M1)
    return (y_MD, sums), saved


def _adding_backward(form, saved, gradients):
    dx_MD, dots_M1, sums = _add_gradients(form, saved, *gradients)
    return dx_MD, None, sums, None, dots_M1


blocked_mlp_adding.defvjp(_adding_forward, _adding_backward)


def _block_sizes(num_rows: int) -> tuple[int, ...]:
    """Returns the block sizes to compile for `num_rows` rows; the last is at most that."""
    smaller = [size for size in BLOCK_ROWS if size < num_rows]
    largest = BLOCK_ROWS[: len(smaller) + 1][-1]
    return (*(size for size in smaller if size < largest), min(largest, num_rows))


def _each_group(compute: Callable, carry, sizes_G, weights: ExpertWeights):
    """Folds `compute(group, carry, weights, start, end)` over the groups that have rows."""
    ends_G = jnp.cumsum(sizes_G)

    def advance(state):
        start, carry = state
        group = jnp.sum(ends_G <= start, dtype=jnp.int32)
        w = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, group, keepdims=False), weights)
        return ends_G[group], compute(group, carry, flat(w), start, ends_G[group])

    first = (jnp.zeros((), ends_G.dtype), carry)
    return lax.while_loop(lambda state: state[0] < ends_G[-1], advance, first)[1]


def _blocks(compute: Callable, carry, num_rows: int, start, end, weights):
    """Folds `compute(block, carry, weights)` over one group's blocks.

    The largest size comes first, then the smallest that holds the rest.
    """
    sizes = _block_sizes(num_rows)

    def sized(size: int, start, carry):
        return compute(RowBlock.at(start, end, size, num_rows), carry, weights)

    def advance(state):
        start, carry = state
        level = jnp.sum(end - start > jnp.array(sizes[:-1]), dtype=jnp.int32)
        carry = lax.switch(level, [partial(sized, size) for size in sizes], start, carry)
        return start + sizes[-1], carry

    # Most groups are one block: it starts the sums that others add to.
    return lax.while_loop(lambda state: state[0] < end, advance, advance((start, carry)))[1]
