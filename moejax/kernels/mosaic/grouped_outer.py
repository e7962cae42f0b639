"""Sums of rows' outer products, group by group, in bfloat16 on Hopper: gradients of weights.

Per device. Legend: M rows sorted by group, G groups, K and N the widths of both sides. A tile is
ROWS x COLUMNS of one group's result, a step DEPTH of its rows; `mosaic.tiles` says the rest. Bound
by compute where groups are large, by writes where they are small.
"""

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
    MULTIPROCESSORS,
    OWN,
    PIECE,
    ROWS,
    STAGES,
    TileSchedule,
    load_steps,
    ring_of,
    run_warpgroups,
    specialize,
    sum_steps,
    tiled,
    turns_of,
    unpacked,
)

DEPTH = 64  # rows of one step


class OuterBuffers(NamedTuple):
    """Shared memory of a thread block."""

    x: Any  # [STAGES, 2, DEPTH, OWN], a half for each warpgroup
    y: Any  # [STAGES, 2, DEPTH, HALF]
    w: Any  # [2, OWN, PIECE]
    ring: Any


class Tiling(NamedTuple):
    """Tiles of one group's result, and thread blocks that take turns at all tiles."""

    tall: int
    wide: int
    blocks: int


class GroupPosition(NamedTuple):
    """The work of a thread block in one turn."""

    group: Any
    row: Any  # the first of the result's
    column: Any
    first: Any  # the first of the group's rows, or up to seven before
    start: Any  # rows that count, from this one
    end: Any  # to this one
    steps: Any


def grouped_outer(
    x_MK: jax.Array, y_MN: jax.Array, schedule: jax.Array, groups: int, dtype: jnp.dtype
) -> jax.Array:
    """Returns `w_GKN`, the sum over each group's rows of their outer products; zero without rows.

    Rows of another group may be multiplied by zero: all rows must be finite.

    Args:
      schedule: from `grouped_matmul.schedule_products`, for this many groups.
    """
    x_MK, y_MN = pad_rows(x_MK, ALIGNED), pad_rows(y_MN, ALIGNED)
    K, N, G = x_MK.shape[1], y_MN.shape[1], groups
    tall, wide = pl.cdiv(K, ROWS), pl.cdiv(N, COLUMNS)
    count = G * tall * wide
    tiling = Tiling(tall, wide, min(MULTIPROCESSORS, count))

    def sum_outer(schedule_gmem, x_gmem, y_gmem, w_gmem, buffers):
        wg = lax.axis_index("wg")
        position_of = partial(_group_position, tiling, unpacked(schedule_gmem))
        specialize(
            wg,
            turns_of(count, tiling.blocks),
            partial(_load_tile, position_of, buffers, x_gmem, y_gmem),
            partial(_multiply_tile, wg, position_of, buffers, w_gmem),
        )

    out_type, buffers = jax.ShapeDtypeStruct((G, K, N), dtype), _buffers(x_MK.dtype, dtype)
    return run_warpgroups(sum_outer, out_type, tiling.blocks, buffers)(schedule, x_MK, y_MN)


def _buffers(dtype: Any, result_dtype: Any) -> OuterBuffers:
    width = 128 // jnp.dtype(result_dtype).itemsize
    return OuterBuffers(
        plgpu.SMEM((STAGES, 2, DEPTH, OWN), dtype, transforms=tiled(64)),
        plgpu.SMEM((STAGES, 2, DEPTH, HALF), dtype, transforms=tiled(64)),
        plgpu.SMEM((2, OWN, PIECE), result_dtype, transforms=tiled(width)),
        ring_of(copies=4),
    )


def _group_position(tiling: Tiling, schedule: TileSchedule, turn: Any) -> GroupPosition:
    index = turn * tiling.blocks + lax.axis_index("block")
    tiles = tiling.tall * tiling.wide
    group, tile = lax.div(index, tiles), lax.rem(index, tiles)
    row, column = lax.div(tile, tiling.wide) * ROWS, lax.rem(tile, tiling.wide) * COLUMNS
    start, end = schedule.group_start_G[group], schedule.group_end_G[group]
    first = pl.multiple_of(lax.div(start, ALIGNED) * ALIGNED, ALIGNED)
    steps = jnp.where(end > start, lax.div(end - first + DEPTH - 1, DEPTH), 0)
    return GroupPosition(group, row, column, first, start, end, steps)


def _load_tile(
    tile_position, buffers: OuterBuffers, x_gmem, y_gmem, turn, step: jax.Array
) -> jax.Array:
    """The copying warpgroup's part of a turn."""
    position = tile_position(turn)

    def copies(i, slot, copy):
        rows = pl.ds(position.first + i * DEPTH, DEPTH)
        for half in range(2):
            own = pl.ds(position.row + half * OWN, OWN)
            columns = pl.ds(position.column + half * HALF, HALF)
            copy(x_gmem.at[rows, own], buffers.x.at[slot, half])
            copy(y_gmem.at[rows, columns], buffers.y.at[slot, half])

    return load_steps(copies, position.steps, step, buffers.ring)


def _multiply_tile(
    wg, tile_position, buffers: OuterBuffers, w_gmem, turn, step: jax.Array
) -> jax.Array:
    """A multiplying warpgroup's part of a turn."""
    position = tile_position(turn)

    def product(i, slot, accumulators):
        _clear_other_rows(buffers.x, (slot, wg), position, position.first + i * DEPTH)
        own = buffers.x.at[slot, wg].transpose((1, 0))
        for half, accumulator in enumerate(accumulators):
            plgpu.wgmma(accumulator, own, buffers.y.at[slot, half])

    parts = sum_steps(product, position.steps, step, buffers.ring)
    for half, part in enumerate(parts):
        column = position.column + half * HALF
        _store(buffers.w, wg, part, w_gmem.at[position.group], position.row, column)
    return step + position.steps


def _clear_other_rows(
    x_smem: Any, own: tuple[Any, Any], position: GroupPosition, here: Any
) -> None:
    """Puts zeros where a step's rows, from row `here` on, belong to another group."""

    @pl.when((here < position.start) | (here + DEPTH > position.end))
    def _():
        x = plgpu.layout_cast(x_smem[own], plgpu.Layout.WGMMA)
        row = here + plgpu.layout_cast(
            lax.broadcasted_iota(jnp.int32, x.shape, 0), plgpu.Layout.WGMMA
        )
        counts = (row >= position.start) & (row < position.end)
        x_smem[own] = jnp.where(counts, x, jnp.zeros_like(x))
        plgpu.commit_smem()


def _store(w_smem: Any, wg: Any, part: jax.Array, w_gmem: Any, row: Any, column: Any) -> None:
    """Writes [OWN, HALF] of a group's result."""
    for start in range(0, HALF, PIECE):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        w_smem[wg] = part[:, start : start + PIECE].astype(w_smem.dtype)
        plgpu.commit_smem()
        rows, columns = pl.ds(row + wg * OWN, OWN), pl.ds(column + start, PIECE)
        plgpu.copy_smem_to_gmem(w_smem.at[wg], w_gmem.at[rows, columns])
