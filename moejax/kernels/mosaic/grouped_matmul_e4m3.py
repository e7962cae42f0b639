"""Products of quantised rows and the quantised matrix of their group, in e4m3 on Hopper.

Per device. Legend: M rows sorted by group, G groups, K summed over, N columns, B blocks of K, J
blocks of N, T tiles of rows; a block is DEPTH = HALF = 128 wide. `mosaic.tiles` says how thread
blocks share the work. Bound by compute from about 200 rows a group on, as in bfloat16: the matrix
units take e4m3 twice as fast, and it has half the bytes.

Hopper adds up products of e4m3 with fewer bits than float32 has, so a sum of the matrix units has
one block, and is scaled and added in float32 by the warpgroup that started it, while the products
of the other one run. Both operands lie K last, the only way that the units read bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

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
    ROWS,
    STAGES,
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
    tile_position,
    turns_of,
)

DEPTH = 128  # elements of K in one step: bytes of a swizzled tile's row, and a block
E4M3 = jnp.float8_e4m3fn
LAYOUT = plgpu.Layout.WGMMA
REGISTERS = 208  # of more or fewer, ptxas of CUDA 13.0 spills (docs/log.md)


def grouped_matmul(
    values_MK: jax.Array,
    scale_MB: jax.Array,
    values_GNK: jax.Array,
    scale_GJB: jax.Array,
    sizes_G: jax.Array,
) -> jax.Array:
    """Returns `y_MN` in bfloat16, each row times the matrix of its group.

    Args:
      values_MK, values_GNK: numbers in e4m3; K a multiple of 128, N of 64.
      scale_MB, scale_GJB: scales of each row's blocks, and of blocks of 128 x 128 weights.
    """
    whole, (G, N, K) = values_MK.shape[0], values_GNK.shape
    values_MK = pad_rows(values_MK, ALIGNED)
    scale_GJB = pad_rows(scale_GJB, COLUMNS // HALF, dim=1)  # a tile may be wider than what is left
    M = values_MK.shape[0]
    # A step's scales lie side by side, and the last tile's may end behind the last row's.
    scale_BM = jnp.pad(scale_MB, ((0, M - whole + ROWS), (0, 0))).T
    # Five arrays: one of all, as in the other kernels, would spill registers here.
    schedule = schedule_rows(sizes_G, M)
    grid = grid_of(packed(schedule), G, pl.cdiv(N, COLUMNS), K // DEPTH)

    def window(w_gmem, group, column, half, k):
        return w_gmem.at[group, pl.ds(column * COLUMNS + half * HALF, HALF), k]

    def multiply_e4m3_tiles(*refs):
        group, first, start, end, count = refs[:5]
        schedule = TileSchedule(group, first, start, end, count, None, None)
        x_gmem, w_gmem, *scales, y_gmem, buffers = refs[5:]
        wg = lax.axis_index("wg")
        specialize(
            wg,
            turns_of(schedule.count_1[0] * grid.columns, grid.blocks),
            partial(load_tile, grid, schedule, buffers, window, x_gmem, w_gmem),
            partial(_multiply_tile, wg, grid, schedule, buffers, scales, y_gmem),
            registers=REGISTERS,
        )

    out_type = jax.ShapeDtypeStruct((M, N), jnp.bfloat16)
    buffers = buffers_of(E4M3, jnp.bfloat16, DEPTH, (HALF, DEPTH))
    run = run_warpgroups(multiply_e4m3_tiles, out_type, grid.blocks, buffers)
    return run(*schedule[:5], values_MK, values_GNK, scale_BM, scale_GJB)[:whole]


def _multiply_tile(
    wg: jax.Array,
    grid: Grid,
    schedule: TileSchedule,
    buffers: Buffers,
    scales: list[Any],
    y_gmem: Any,
    turn: Any,
    step: jax.Array,
) -> jax.Array:
    """A multiplying warpgroup's part of a turn."""
    position = tile_position(grid, schedule, turn)
    own = pl.ds(schedule.first_T[position.tile] + wg * OWN, OWN)

    def scale(i, half):
        x_scale_gmem, w_scale_gmem = scales
        x_scale = plgpu.load(x_scale_gmem.at[i, own], layout=LAYOUT.reduce(1), optimized=False)
        return x_scale * w_scale_gmem[position.group, position.column * 2 + half, i]

    parts = _sum_scaled(buffers, scale, position.steps, wg, step)
    rows = rows_of(schedule, position.tile, wg)
    for half, part in enumerate(parts):
        column = position.column * COLUMNS + half * HALF
        store_rows(buffers.stores, rows, part, y_gmem, (), column)
    return step + position.steps


def _sum_scaled(
    buffers: Buffers, scale_of: Callable, steps: Any, wg: jax.Array, step: jax.Array
) -> tuple[jax.Array, ...]:
    """The sums [OWN, HALF] of both halves over a tile's steps, each scaled before it is added.

    Args:
      scale_of: (i, half) -> scales [OWN] of the rows in that step and half.
    """
    arrived, free = buffers.ring
    own = pl.ds(pl.multiple_of(wg * OWN, OWN), OWN)

    def sum_step(i, totals):
        slot = lax.rem(step + i, STAGES)
        scales = [scale_of(i, half) for half in range(2)]  # on their way while buffers arrive
        plgpu.barrier_wait(arrived.at[slot])
        added = []
        for half, (total, scale) in enumerate(zip(totals, scales, strict=True)):
            part = _product(buffers.x.at[slot, own], buffers.w.at[slot, half])
            added.append(total + part * lax.broadcast_in_dim(scale, part.shape, (0,)))
        plgpu.barrier_arrive(free.at[slot])
        return tuple(added)

    zeros = plgpu.layout_cast(jnp.zeros((OWN, HALF), jnp.float32), LAYOUT)
    return lax.fori_loop(0, steps, sum_step, (zeros, zeros))


def _product(x_smem: Any, w_smem: Any) -> jax.Array:
    """One block's product, when it is done."""

    def scope(accumulator):
        plgpu.wgmma(accumulator, x_smem, w_smem.transpose((1, 0)))
        return accumulator[...]

    return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((OWN, HALF), jnp.float32))
