"""Products of rows and the matrix of their group, in bfloat16 on Hopper's matrix units.

Per device. Legend: M rows sorted by group, G groups, K summed over, N columns, U gate and up, F
hidden width, T tiles of rows. `mosaic.tiles` says how thread blocks share the work. Bound by
compute from about 200 rows a group on. K and N are multiples of DEPTH, the width of a swizzled
tile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.mosaic.quantize import ALIGNED, pad_rows
from moejax.kernels.mosaic.tiles import (
    COLUMNS,
    HALF,
    OWN,
    Buffers,
    Grid,
    TileSchedule,
    buffers_of,
    grid_of,
    load_tile,
    packed,
    rows_of,
    run_warpgroups,
    schedule_rows,
    specialize,
    store_rows,
    sum_steps,
    tile_position,
    turns_of,
    unpacked,
)

DEPTH = 64  # elements of K in one step: 128 bytes of bfloat16


@partial(jax.jit, static_argnames="num_rows", inline=True)
def schedule_products(sizes_G: jax.Array, num_rows: int) -> jax.Array:
    """Returns the packed schedule of products of `num_rows` rows; equal sizes share it.

    Jitted to be traced once; `inline` leaves no call in the program.
    """
    return packed(schedule_rows(sizes_G, -(-num_rows // ALIGNED) * ALIGNED))


def grouped_matmul(
    x_MK: jax.Array, w_GKN: jax.Array, schedule: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Returns `y_MN`, each row times the matrix of its group; with `transposed`, w is [G, N, K].

    Args:
      schedule: from `schedule_products`.
    """
    N = w_GKN.shape[1 if transposed else 2]

    def window(w_gmem, group, column, half, k):
        columns = pl.ds(column * COLUMNS + half * HALF, HALF)
        return w_gmem.at[(group, columns, k) if transposed else (group, k, columns)]

    def finish(parts, column, store):
        for half, part in enumerate(parts):
            store(0, part, column * COLUMNS + half * HALF)

    form = ProductForm(window, finish, ((N,),), N, transposed)
    return _multiply(x_MK, w_GKN, schedule, form)[0]


def grouped_swiglu(
    x_MK: jax.Array, w_GKUF: jax.Array, schedule: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns silu(gate) * up [M, F], and [M, 2 F] = gate, up, which its gradient needs.

    A tile has 128 columns of the gate and the same columns of up, so both meet in registers.
    """
    F = w_GKUF.shape[3]

    def window(w_gmem, group, column, half, k):
        return w_gmem.at[group, k, half, pl.ds(column * HALF, HALF)]

    def finish(parts, column, store):
        gate, up = parts
        store(0, gate * up / (1 + jnp.exp(-gate)), column * HALF)
        store(1, gate, column * HALF, 0)
        store(1, up, column * HALF, 1)

    form = ProductForm(window, finish, ((F,), (2, F)), 2 * F, transposed=False)
    a_MF, h_MUF = _multiply(x_MK, w_GKUF, schedule, form)
    return a_MF, h_MUF.reshape(-1, 2 * F)


class ProductForm(NamedTuple):
    """The parts in which products differ.

    Attributes:
      window: (w, group, column of tiles, half, k) -> the part of w for a half of a tile's columns.
      finish: (both halves' sums, column of tiles, store) -> stores their results.
      widths: width of a row of each result.
      columns: columns of the product.
      transposed: whether the last dimension of w is summed over.
    """

    window: Callable
    finish: Callable
    widths: tuple[tuple[int, ...], ...]
    columns: int
    transposed: bool


def _multiply(
    x_MK: jax.Array, w: jax.Array, schedule: jax.Array, form: ProductForm
) -> list[jax.Array]:
    """The products of all tiles."""
    whole, groups = x_MK.shape[0], w.shape[0]
    x_MK = pad_rows(x_MK, ALIGNED)
    M, K = x_MK.shape
    grid = grid_of(schedule, groups, pl.cdiv(form.columns, COLUMNS), pl.cdiv(K, DEPTH))

    def multiply_tiles(*refs):
        schedule_gmem, x_gmem, w_gmem, *y_gmem, buffers = refs
        schedule = unpacked(schedule_gmem)
        wg = lax.axis_index("wg")
        specialize(
            wg,
            turns_of(schedule.count_1[0] * grid.columns, grid.blocks),
            partial(load_tile, grid, schedule, buffers, form.window, x_gmem, w_gmem),
            partial(_multiply_tile, wg, form, grid, schedule, buffers, y_gmem),
        )

    out_type = [jax.ShapeDtypeStruct((M, *width), x_MK.dtype) for width in form.widths]
    w_tile = (HALF, DEPTH) if form.transposed else (DEPTH, HALF)
    buffers = buffers_of(x_MK.dtype, x_MK.dtype, DEPTH, w_tile)
    run = run_warpgroups(multiply_tiles, out_type, grid.blocks, buffers)
    return [y[:whole] for y in run(schedule, x_MK, w)]


def _multiply_tile(
    wg: jax.Array,
    form: ProductForm,
    grid: Grid,
    schedule: TileSchedule,
    buffers: Buffers,
    y_gmem: list[Any],
    turn: jax.Array,
    step: jax.Array,
) -> jax.Array:
    """A multiplying warpgroup's part of a turn."""
    tile, column, _, steps = tile_position(grid, schedule, turn)

    def product(i, slot, accumulators):
        for half, accumulator in enumerate(accumulators):
            w_half = buffers.w.at[slot, half]
            w_half = w_half.transpose((1, 0)) if form.transposed else w_half
            own = buffers.x.at[slot, pl.ds(pl.multiple_of(wg * OWN, OWN), OWN)]
            plgpu.wgmma(accumulator, own, w_half)

    parts = sum_steps(product, steps, step, buffers.ring)
    rows = rows_of(schedule, tile, wg)

    def store(number, part, column, *between):
        store_rows(buffers.stores, rows, part, y_gmem[number], between, column)

    form.finish(parts, column, store)
    return step + steps
