"""The experts: rows, sorted by expert, each through the SwiGLU of its expert.

Per device. Legend: M rows, G groups (experts), D width, F hidden, U gate and up, H = 2 F.

`lax.ragged_dot` costs G times the FLOPs on CPU, and on CUDA where no kernel takes it over. The
blocked form computes each expert's rows and no others: sizes are known only at run time and shapes
must be static, so a group is cut into blocks and each block runs at the smallest size of a ladder
that holds it. `benchmarks/cpu/ops.py` times it beside `ragged_dot` and one batched product.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from moejax.annotations import Array, Float, Int
from moejax.kernels.costs import jitted
from moejax.kernels.grouped_matmul import grouped_matmul, swiglu, swiglu_mlp
from moejax.kernels.grouped_matmul_e4m3 import grouped_matmul_e4m3

# Each size is compiled, forward and backward, for each bucket size of the exchange.
BLOCK_ROWS = (64, 128, 256, 384, 512)

# Implementations whose products round rows and weights to e4m3 first.
IN_E4M3 = {"mosaic_e4m3": "mosaic", "reference_e4m3": "reference"}


def expert_mlp(
    x_MD: Float[Array, "M D"],
    w_in_GDUF: Float[Array, "G D 2 F"],
    w_out_GFD: Float[Array, "G F D"],
    sizes_G: Int[Array, " G"],
    *,
    implementation: str,
) -> Float[Array, "M D"]:
    """Returns `y_MD`; rows past the last group are zero.

    FLOPs: 6 * rows * D * F. With F sharded over tensor the results are partial sums.

    Args:
      x_MD: rows sorted by group; what lies past the last group is ignored.
      sizes_G: rows of each group, summing to at most M.
      implementation: "mosaic", "blocked", one of `grouped_matmul`'s, or of `IN_E4M3`, whose forward
        products round what they multiply; see `kernels.select`.
    """
    if implementation == "mosaic":
        return swiglu_mlp(x_MD, w_in_GDUF, w_out_GFD, sizes_G)
    w_in_GDH = w_in_GDUF.reshape(*w_in_GDUF.shape[:2], -1)
    if implementation == "blocked":
        return _blocked(x_MD, w_in_GDH, w_out_GFD, sizes_G)
    if implementation in IN_E4M3:
        multiply = partial(grouped_matmul_e4m3, implementation=IN_E4M3[implementation])
    else:
        multiply = partial(grouped_matmul, implementation=implementation)
    return multiply(swiglu(multiply(x_MD, w_in_GDH, sizes_G)), w_out_GFD, sizes_G)


def _named(which: str, function: Callable, x_MD: jax.Array, w_out_GFD: jax.Array) -> Callable:
    """Returns the function under a name with its sizes, for its price."""
    M, D = x_MD.shape
    G, F = w_out_GFD.shape[:2]
    return jitted(function, f"experts_{which}", M, D, F, G)


def rows_computed(rows: float, M: int) -> float:
    """Returns the rows that the blocked form computes for a group: whole blocks."""
    ladder = _ladder(M)
    whole, rest = divmod(rows, ladder[-1])
    last = next(size for size in ladder if size >= rest) if rest or not whole else 0
    return whole * ladder[-1] + last


@jax.custom_vjp
def _blocked(
    x_MD: jax.Array, w_in_GDH: jax.Array, w_out_GFD: jax.Array, sizes_G: jax.Array
) -> jax.Array:
    only = _named("forward", _only_forward, x_MD, w_out_GFD)
    return only(x_MD, w_in_GDH, w_out_GFD, sizes_G)


def _only_forward(x_MD, w_in_GDH, w_out_GFD, sizes_G):
    def block(start, rows, carry, w_in_DH, w_out_FD):
        a_BF = swiglu(rows(x_MD) @ w_in_DH)
        return _write(carry, a_BF @ w_out_FD, start)

    M, x_MD = x_MD.shape[0], _padded(x_MD)
    return _each_block(block, jnp.zeros_like(x_MD), M, sizes_G, w_in_GDH, w_out_GFD)[:M]


def _blocked_forward(x_MD, w_in_GDH, w_out_GFD, sizes_G):
    forward = _named("forward", _rows_forward, x_MD, w_out_GFD)
    y_MD, x_MD, h_MH = forward(x_MD, w_in_GDH, w_out_GFD, sizes_G)
    return y_MD, (x_MD, h_MH, w_in_GDH, w_out_GFD, sizes_G)


def _rows_forward(x_MD, w_in_GDH, w_out_GFD, sizes_G):
    """As above, and keeps the input of the experts' hidden layer."""

    def block(start, rows, carry, w_in_DH, w_out_FD):
        y_MD, h_MH = carry
        h_BH = rows(x_MD) @ w_in_DH
        return _write(y_MD, swiglu(h_BH) @ w_out_FD, start), _write(h_MH, h_BH, start)

    M, x_MD = x_MD.shape[0], _padded(x_MD)
    h_MH = jnp.zeros((x_MD.shape[0], w_in_GDH.shape[2]), x_MD.dtype)
    carry = (jnp.zeros_like(x_MD), h_MH)
    y_MD, h_MH = _each_block(block, carry, M, sizes_G, w_in_GDH, w_out_GFD)
    return y_MD[:M], x_MD, h_MH


def _blocked_backward(saved, dy_MD):
    x_MD, h_MH, w_in_GDH, w_out_GFD, sizes_G = saved
    backward = _named("backward", _rows_backward, dy_MD, w_out_GFD)
    return *backward(x_MD, w_in_GDH, w_out_GFD, sizes_G, h_MH, dy_MD), None


def _rows_backward(x_MD, w_in_GDH, w_out_GFD, sizes_G, h_MH, dy_MD):
    """Gradients of rows and weights, block by block; weight gradients add up in float32."""
    M, dy_MD = dy_MD.shape[0], _padded(dy_MD)

    def block(start, rows, carry, w_in_DH, w_out_FD):
        dx_MD, dw = carry
        dy_BD = rows(dy_MD)
        a_BF, pull = jax.vjp(swiglu, rows(h_MH))
        dh_BH = pull(dy_BD @ w_out_FD.T)[0]
        part = (_outer(rows(x_MD), dh_BH), _outer(a_BF, dy_BD))
        dw = part if dw is None else jax.tree.map(jnp.add, dw, part)
        return _write(dx_MD, dh_BH @ w_in_DH.T, start), dw

    def group(dx_MD, scanned):
        w_in_DH, w_out_FD, start, end = scanned
        dx_MD, dw = _blocks(block, (dx_MD, None), M, start, end, w_in_DH, w_out_FD)
        return dx_MD, [g.astype(w.dtype) for g, w in zip(dw, (w_in_DH, w_out_FD), strict=True)]

    ends_G = jnp.cumsum(sizes_G)
    scanned = (w_in_GDH, w_out_GFD, ends_G - sizes_G, ends_G)
    dx_MD, (dw_in_GDH, dw_out_GFD) = lax.scan(group, jnp.zeros_like(dy_MD), scanned)
    return dx_MD[:M], dw_in_GDH, dw_out_GFD


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _padded(x_MD: jax.Array) -> jax.Array:
    """Adds rows so that the last block stays inside the buffer."""
    return jnp.pad(x_MD, ((0, _ladder(x_MD.shape[0])[-1]), (0, 0)))


def _ladder(num_rows: int) -> tuple[int, ...]:
    """Returns the block sizes to compile for a buffer of `M` rows."""
    smaller = [size for size in BLOCK_ROWS if size < num_rows]
    return BLOCK_ROWS[: len(smaller) + 1]


def _write(y_MD: jax.Array, y_BD: jax.Array, start: jax.Array) -> jax.Array:
    """Writes a block. Its surplus rows are zero, and the next group overwrites them."""
    return lax.dynamic_update_slice_in_dim(y_MD, y_BD, start, 0)


def _outer(x_BM: jax.Array, y_BN: jax.Array) -> jax.Array:
    """Sums the rows' outer products in float32."""
    dims = (((0,), (0,)), ((), ()))
    return lax.dot_general(x_BM, y_BN, dims, preferred_element_type=jnp.float32)


def _each_block(block: Callable, carry, num_rows: int, sizes_G, w_in_GDH, w_out_GFD):
    """Folds `block` over the blocks of all groups."""

    def group(carry, scanned):
        w_in_DH, w_out_FD, start, end = scanned
        return _blocks(block, carry, num_rows, start, end, w_in_DH, w_out_FD), None

    ends_G = jnp.cumsum(sizes_G)
    return lax.scan(group, carry, (w_in_GDH, w_out_GFD, ends_G - sizes_G, ends_G))[0]


def _blocks(block: Callable, carry, num_rows: int, start, end, w_in_DH, w_out_FD):
    """Folds `block` over one group's blocks: largest size first, then the smallest for the rest.

    `block(start, rows, carry, w_in, w_out)` gets `rows(x)`, the block's rows of a padded array,
    zero where they belong to the next group.
    """
    ladder = _ladder(num_rows)

    def sized(size: int, start, carry):
        inside_B = start + jnp.arange(size) < end

        def rows(x_MD: jax.Array) -> jax.Array:
            return jnp.where(inside_B[:, None], lax.dynamic_slice_in_dim(x_MD, start, size), 0)

        return block(start, rows, carry, w_in_DH, w_out_FD)

    def advance(state):
        start, carry = state
        level = jnp.sum(end - start > jnp.array(ladder[:-1]), dtype=jnp.int32)
        carry = lax.switch(level, [partial(sized, size) for size in ladder], start, carry)
        return start + ladder[-1], carry

    # Most groups are one block: it starts the sums that others add to.
    return lax.while_loop(lambda state: state[0] < end, advance, advance((start, carry)))[1]
