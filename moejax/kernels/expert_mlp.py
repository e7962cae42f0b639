"""The experts: rows, sorted by expert, each through the gated MLP of its expert.

Per device. Legend: M rows, B rows of a block, G groups (experts), D width, F hidden, U gate and up,
W = 2 F; X and Y columns of two arrays of rows.

`lax.ragged_dot` costs G times the FLOPs on CPU, and on CUDA where no kernel takes it over. The
blocked form computes each expert's rows and no others: sizes are known only at run time and shapes
must be static, so a group is cut into blocks and each block runs at the smallest size in
`BLOCK_ROWS` that holds it. `benchmarks/cpu/ops.py` times it beside `ragged_dot` and one batched
product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.kernels.activation import activate, row_dots, with_dots
from moejax.kernels.costs import jitted
from moejax.kernels.grouped_matmul import (
    add_bias,
    grouped_matmul,
    schedule_experts,
    swiglu_mlp,
)
from moejax.kernels.grouped_matmul_e4m3 import grouped_matmul_e4m3
from moejax.kernels.kept import GATE_AND_UP

# Each size is compiled, forward and backward, for each bucket size of the exchange.
BLOCK_ROWS = (64, 128, 256, 384, 512)

# A forward pass without gradients that has at most so many rows a group goes by blocks of as many,
# and reads weights in pieces that fit into a core's cache.
FEW_ROWS = 8
PIECE_BYTES = 2**20

# Implementations whose products round rows and weights to e4m3 first.
IN_E4M3 = {"mosaic_e4m3": "mosaic", "reference_e4m3": "reference"}

Biases = tuple[Float[Array, "G 2 F"], Float[Array, "G D"]]


def expert_mlp(
    x_MD: Float[Array, "M D"],
    w_in_GDUF: Float[Array, "G D 2 F"],
    w_out_GFD: Float[Array, "G F D"],
    sizes_G: Int[Array, " G"],
    *,
    implementation: str,
    biases: Biases | None = None,
    limit: float | None = None,
    one_M1: Float[Array, "M 1"] | None = None,
    schedule: tuple[Int[Array, "C ..."], int] | None = None,
) -> Float[Array, "M D"]:
    """Returns `y_MD`; rows past the last group are zero.

    FLOPs: 6 * rows * D * F. With F sharded over tensor the results are partial sums.

    Args:
      x_MD: rows sorted by group; what lies past the last group is ignored.
      sizes_G: rows of each group, summing to at most M.
      implementation: "mosaic", "blocked", one of `grouped_matmul`'s, or of `IN_E4M3`, whose forward
        products round what they multiply; see `kernels.select`.
      biases: float32, added to the first product before the activation, and to the second.
      limit: of clamped SwiGLU; None for SwiGLU.
      one_M1: ones, which are not multiplied. Their gradient is each row's result times the gradient
        of that result, float32: found from the hidden layer, without the results.
      schedule: of all C chunks, from `schedule_experts`, and the number of this one; None for none.
    """
    if implementation == "mosaic" and biases is None and limit is None:
        if schedule is None:
            schedule = schedule_experts(sizes_G, x_MD.shape[0])[None], 0
        return swiglu_mlp(x_MD, w_in_GDUF, w_out_GFD, one_M1, *schedule)
    G, D = w_in_GDUF.shape[:2]
    weights = Weights(w_in_GDUF.reshape(G, D, -1), w_out_GFD)
    if biases is not None:
        weights = weights._replace(b_in=biases[0].reshape(G, -1), b_out=biases[1])
    if implementation == "blocked":
        return _blocked(limit, x_MD, weights, sizes_G, one_M1)
    if implementation in IN_E4M3:
        multiply = partial(grouped_matmul_e4m3, implementation=IN_E4M3[implementation])
    else:
        multiply = partial(grouped_matmul, implementation=implementation)
    h_MW = multiply(x_MD, weights.w_in, sizes_G)
    if biases is not None:
        h_MW = add_bias(h_MW, weights.b_in, sizes_G)
    a_MF = activate(checkpoint_name(h_MW, GATE_AND_UP), limit)
    if one_M1 is not None:
        a_MF = with_dots(a_MF, one_M1)
    y_MD = multiply(a_MF, weights.w_out, sizes_G)
    return y_MD if biases is None else add_bias(y_MD, weights.b_out, sizes_G, one_M1)


class Weights(NamedTuple):
    """Weights of all groups (G in front), or of one; their gradients."""

    w_in: jax.Array  # [D, W]
    w_out: jax.Array  # [F, D]
    b_in: jax.Array | None = None  # [W], float32
    b_out: jax.Array | None = None  # [D], float32


@dataclass(frozen=True)
class Block:
    """Rows of a group that are computed at one time.

    Attributes:
      start: place of the first row.
      inside_B: false for surplus rows, which lie past the end of the group.
    """

    start: jax.Array
    inside_B: jax.Array

    def rows(self, x_MD: jax.Array) -> jax.Array:
        """The block's rows of a padded array, zero where they are surplus."""
        size = self.inside_B.shape[0]
        return jnp.where(
            self.inside_B[:, None], lax.dynamic_slice_in_dim(x_MD, self.start, size), 0
        )

    def write(self, y_MD: jax.Array, y_BD: jax.Array) -> jax.Array:
        """Writes the block's rows. Surplus rows are overwritten by the next group."""
        return lax.dynamic_update_slice_in_dim(y_MD, y_BD, self.start, 0)

    def biased(self, y_BN: jax.Array, bias_N: jax.Array | None) -> jax.Array:
        """Adds a bias in float32; surplus rows become zero."""
        if bias_N is None:
            return y_BN
        biased_BN = (y_BN.astype(jnp.float32) + bias_N).astype(y_BN.dtype)
        return jnp.where(self.inside_B[:, None], biased_BN, 0)


def _named(which: str, function: Callable, weights: Weights, x_MD, limit) -> Callable:
    """Returns the function under a name with its sizes, for its price."""
    M, D = x_MD.shape
    G, F = weights.w_out.shape[:2]
    return jitted(function, f"experts_{which}", M, D, F, G, limit=limit)


def rows_computed(rows: float, M: int) -> float:
    """Returns the rows that the blocked form computes for a group: whole blocks."""
    sizes = _block_sizes(M)
    whole, rest = divmod(rows, sizes[-1])
    last = next(size for size in sizes if size >= rest) if rest or not whole else 0
    return whole * sizes[-1] + last


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(
    limit: float | None,
    x_MD: jax.Array,
    weights: Weights,
    sizes_G: jax.Array,
    one_M1: jax.Array | None,
) -> jax.Array:
    return _named("forward", _only_forward, weights, x_MD, limit)(x_MD, weights, sizes_G)


def _only_forward(x_MD, weights, sizes_G, *, limit):
    def compute(block: Block, y_MD, w: Weights):
        h_BW = block.biased(block.rows(x_MD) @ w.w_in, w.b_in)
        y_BD = activate(h_BW, limit) @ w.w_out
        return block.write(y_MD, block.biased(y_BD, w.b_out))

    M, G = x_MD.shape[0], sizes_G.shape[0]
    if M <= FEW_ROWS * G:
        return _few_rows(x_MD, weights, sizes_G, limit)
    x_MD = _padded(x_MD)
    return _each_block(compute, jnp.zeros_like(x_MD), M, sizes_G, weights)[:M]


def _few_rows(x_MD: jax.Array, weights: Weights, sizes_G: jax.Array, limit) -> jax.Array:
    """The forward pass of so few rows that reading the weights takes longer than the products.

    Weights of a group without rows are not read. Those of others are read in pieces that stay in a
    core's cache: XLA copies what a loop slices.
    """
    M, ends_G = x_MD.shape[0], jnp.cumsum(sizes_G)
    x_MD = jnp.pad(x_MD, ((0, FEW_ROWS), (0, 0)))

    def advance(state):
        start, y_MD = state
        group = jnp.sum(ends_G <= start, dtype=jnp.int32)
        block = Block(start, start + jnp.arange(FEW_ROWS) < ends_G[group])
        b_in, b_out = (None if b is None else b[group] for b in weights[2:])
        h_BW = block.biased(_in_pieces(block.rows(x_MD), weights.w_in, group), b_in)
        y_BD = _in_pieces(activate(h_BW, limit), weights.w_out, group)
        y_MD = block.write(y_MD, block.biased(y_BD, b_out))
        return jnp.minimum(start + FEW_ROWS, ends_G[group]), y_MD

    first = (jnp.int32(0), jnp.zeros_like(x_MD))
    return lax.while_loop(lambda state: state[0] < ends_G[-1], advance, first)[1][:M]


def _in_pieces(x_BX: jax.Array, w_GXY: jax.Array, group: jax.Array) -> jax.Array:
    """Returns x @ w[group], summed in float32 over pieces of P of X."""
    (B, X), Y = x_BX.shape, w_GXY.shape[2]
    most = max(1, PIECE_BYTES // (Y * w_GXY.dtype.itemsize))
    piece = next(size for size in range(min(most, X), 0, -1) if X % size == 0)

    def add(number, y_BY):
        w_PY = lax.dynamic_slice(w_GXY, (group, number * piece, 0), (1, piece, Y))[0]
        x_BP = lax.dynamic_slice(x_BX, (0, number * piece), (B, piece))
        return y_BY + jnp.dot(x_BP, w_PY, preferred_element_type=jnp.float32)

    y_BY = lax.fori_loop(0, X // piece, add, jnp.zeros((B, Y), jnp.float32))
    return y_BY.astype(x_BX.dtype)


def _blocked_forward(limit, x_MD, weights, sizes_G, one_M1):
    forward = _named("forward", _rows_forward, weights, x_MD, limit)
    y_MD, h_MW = forward(x_MD, weights, sizes_G)
    h_MW = checkpoint_name(h_MW, GATE_AND_UP)
    return y_MD, (x_MD, h_MW, weights, sizes_G, one_M1)


def _rows_forward(x_MD, weights, sizes_G, *, limit):
    """As above, and keeps the input of the experts' hidden layer, with rows for the last block."""

    def compute(block: Block, carry, w: Weights):
        y_MD, h_MW = carry
        h_BW = block.biased(block.rows(x_MD) @ w.w_in, w.b_in)
        y_BD = activate(h_BW, limit) @ w.w_out
        return block.write(y_MD, block.biased(y_BD, w.b_out)), block.write(h_MW, h_BW)

    M, x_MD = x_MD.shape[0], _padded(x_MD)
    h_MW = jnp.zeros((x_MD.shape[0], weights.w_in.shape[2]), x_MD.dtype)
    y_MD, h_MW = _each_block(compute, (jnp.zeros_like(x_MD), h_MW), M, sizes_G, weights)
    return y_MD[:M], h_MW


def _blocked_backward(limit, saved, dy_MD):
    x_MD, h_MW, weights, sizes_G, one_M1 = saved
    backward = _named("backward", _rows_backward, weights, dy_MD, limit)
    (dx_MD, dots_M1), dweights = backward(x_MD, weights, sizes_G, h_MW, dy_MD, one_M1)
    return dx_MD, dweights, None, dots_M1


def _rows_backward(x_MD, weights, sizes_G, h_MW, dy_MD, one_M1, *, limit):
    """Gradients of rows, ones and weights, block by block; those of weights add up in float32."""
    M, x_MD, dy_MD = dy_MD.shape[0], _padded(x_MD), _padded(dy_MD)

    def compute(block: Block, carry, w: Weights):
        (dx_MD, dots_M1), dw = carry
        dy_BD = block.rows(dy_MD)
        a_BF, pull = jax.vjp(partial(activate, limit=limit), block.rows(h_MW))
        da_BF = dy_BD @ w.w_out.T
        dh_BW = pull(da_BF)[0]
        if dots_M1 is not None:
            dots_B1 = row_dots(a_BF, da_BF)
            dots_B1 += 0 if w.b_out is None else row_dots(dy_BD, w.b_out[None])
            dots_M1 = block.write(dots_M1, dots_B1)
        part = Weights(_outer(block.rows(x_MD), dh_BW), _outer(a_BF, dy_BD))
        if w.b_in is not None:
            part = part._replace(b_in=_sum_rows(dh_BW), b_out=_sum_rows(dy_BD))
        dw = part if dw is None else jax.tree.map(jnp.add, dw, part)
        return (block.write(dx_MD, dh_BW @ w.w_in.T), dots_M1), dw

    def group(rows, scanned):
        w, start, end = scanned
        rows, dw = _blocks(compute, (rows, None), M, start, end, w)
        return rows, jax.tree.map(lambda g, w: g.astype(w.dtype), dw, w)

    ends_G = jnp.cumsum(sizes_G)
    scanned = (weights, ends_G - sizes_G, ends_G)
    dots_M1 = None if one_M1 is None else jnp.zeros_like(_padded(one_M1))
    rows, dweights = lax.scan(group, (jnp.zeros_like(dy_MD), dots_M1), scanned)
    return jax.tree.map(lambda x: x[:M], rows), dweights


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _padded(x_MD: jax.Array) -> jax.Array:
    """Adds rows so that the last block stays inside the buffer."""
    return jnp.pad(x_MD, ((0, _block_sizes(x_MD.shape[0])[-1]), (0, 0)))


def _block_sizes(num_rows: int) -> tuple[int, ...]:
    """Returns the block sizes to compile for a buffer of `M` rows."""
    smaller = [size for size in BLOCK_ROWS if size < num_rows]
    return BLOCK_ROWS[: len(smaller) + 1]


def _outer(x_BX: jax.Array, y_BY: jax.Array) -> jax.Array:
    """Sums the rows' outer products in float32."""
    dims = (((0,), (0,)), ((), ()))
    return lax.dot_general(x_BX, y_BY, dims, preferred_element_type=jnp.float32)


def _sum_rows(x_BN: jax.Array) -> jax.Array:
    """Sums rows in float32."""
    return jnp.sum(x_BN.astype(jnp.float32), axis=0)


def _each_block(compute: Callable, carry, num_rows: int, sizes_G, weights: Weights):
    """Folds `compute` over the blocks of all groups."""

    def group(carry, scanned):
        w, start, end = scanned
        return _blocks(compute, carry, num_rows, start, end, w), None

    ends_G = jnp.cumsum(sizes_G)
    return lax.scan(group, carry, (weights, ends_G - sizes_G, ends_G))[0]


def _blocks(compute: Callable, carry, num_rows: int, start, end, weights):
    """Folds `compute(block, carry, weights)` over one group's blocks.

    The largest size comes first, then the smallest that holds the rest.
    """
    sizes = _block_sizes(num_rows)

    def sized(size: int, start, carry):
        return compute(Block(start, start + jnp.arange(size) < end), carry, weights)

    def advance(state):
        start, carry = state
        level = jnp.sum(end - start > jnp.array(sizes[:-1]), dtype=jnp.int32)
        carry = lax.switch(level, [partial(sized, size) for size in sizes], start, carry)
        return start + sizes[-1], carry

    # Most groups are one block: it starts the sums that others add to.
    return lax.while_loop(lambda state: state[0] < end, advance, advance((start, carry)))[1]
