"""Shared parts of grouped products on Hopper: tiles, ring of buffers, kinds of warpgroups.

Per device. A thread block works on tile after tile of ROWS x COLUMNS results. One of its three
warpgroups only copies, by TMA, as far ahead as the ring of buffers allows, also into the next tile
while this one is written; the other two multiply, 64 rows each, in two halves of the columns.

Legend: G groups, T tiles of rows, over all groups.

A group's tiles start at its own first row, or up to seven before it, because copies into the
matrix units' operands start at a multiple of eight. A tile's rows of other groups are multiplied
and not stored. Rows past the last group are a group of their own, which is zero.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.mosaic.quantize import ALIGNED

ROWS, COLUMNS = 128, 256  # of a tile
HALF, PIECE = COLUMNS // 2, 64  # columns of one product, and of one store
OWN = 64  # rows of a tile that one warpgroup multiplies
STAGES = 4  # steps that fit in shared memory
COPIES = 2  # the warpgroup that copies; 0 and 1 multiply
MULTIPROCESSORS = 132  # of H100 SXM and H200


class TileSchedule(NamedTuple):
    """Tiles of rows, group after group; G stands for the rows past the last group.

    Kernels get it as one array, `packed`, with a row for each field.
    """

    group_T: Any
    first_T: Any  # row, a multiple of ALIGNED
    start_T: Any  # rows that count, from this one
    end_T: Any  # to this one
    count_1: Any  # tiles; the rest of the arrays has no meaning
    group_start_G: Any  # the first row of each group
    group_end_G: Any


class ScheduleField(NamedTuple):
    """In a kernel: a field of a packed schedule."""

    packed: Any
    row: int

    def __getitem__(self, index: Any) -> Any:
        """One number."""
        return self.packed[self.row, index]


def packed(schedule: TileSchedule) -> jax.Array:
    """Returns the schedule as one array [fields, T]."""
    T = schedule.group_T.shape[0]
    return jnp.stack([jnp.pad(field, (0, T - field.shape[0])) for field in schedule])


def unpacked(schedule: Any) -> TileSchedule:
    """In a kernel: the fields of a packed schedule."""
    return TileSchedule(*(ScheduleField(schedule, row) for row in range(len(TileSchedule._fields))))


def schedule_rows(sizes_G: jax.Array, num_rows: int) -> TileSchedule:
    """Cuts a buffer of rows, sorted by group, in tiles."""
    sizes = jnp.append(sizes_G, num_rows - jnp.sum(sizes_G)).astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    firsts = starts // ALIGNED * ALIGNED
    tiles = jnp.where(sizes > 0, -(-(ends - firsts) // ROWS), 0)
    ends_of_tiles = jnp.cumsum(tiles)
    # A group of n rows has at most (n - 1 + ALIGNED - 1) / ROWS + 1.
    max_tiles = (num_rows + sizes.shape[0] * (ALIGNED - 2)) // ROWS + sizes.shape[0]
    tile_T = jnp.arange(max_tiles, dtype=jnp.int32)
    # A tile's group is the number of groups that end before it. `jnp.searchsorted` would be a loop.
    group_T = jnp.sum(ends_of_tiles <= tile_T[:, None], axis=1, dtype=jnp.int32)
    group_T = jnp.minimum(group_T, sizes.shape[0] - 1)
    first_T = firsts[group_T] + (tile_T - (ends_of_tiles - tiles)[group_T]) * ROWS
    return TileSchedule(
        group_T,
        first_T,
        starts[group_T],
        ends[group_T],
        ends_of_tiles[-1:],
        starts[:-1],
        ends[:-1],
    )


class Grid(NamedTuple):
    """Tiles of a product, and how many thread blocks take turns at them."""

    groups: int
    columns: int  # tiles side by side
    steps: int  # of a tile's sum
    blocks: int


class TilePosition(NamedTuple):
    """The work of a thread block in one turn."""

    tile: Any  # of rows, its number in the schedule
    column: Any  # of tiles
    group: Any
    steps: Any  # none for rows past the last group


def grid_of(schedule: jax.Array, groups: int, columns: int, steps: int) -> Grid:
    """The grid of a product with this many columns of tiles, on a packed schedule."""
    blocks = min(MULTIPROCESSORS, columns * schedule.shape[1])
    return Grid(groups, columns, steps, blocks)


def tile_position(grid: Grid, schedule: Any, turn: Any) -> TilePosition:
    """In a kernel: the tile that this thread block works on in turn `turn`."""
    index = turn * grid.blocks + lax.axis_index("block")
    tile, column = lax.div(index, grid.columns), lax.rem(index, grid.columns)
    group = schedule.group_T[tile]
    return TilePosition(tile, column, group, jnp.where(group < grid.groups, grid.steps, 0))


def turns_of(count: Any, blocks: int) -> Any:
    """In a kernel: tiles that this thread block works on, of `count`."""
    return lax.div(count - lax.axis_index("block") + blocks - 1, blocks)


def tiled(width: int) -> tuple[Any, Any]:
    """Layout of buffers that matrix units read: in tiles of eight rows of 128 bytes, swizzled."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]


def ring_of(copies: int) -> tuple[plgpu.Barrier, plgpu.Barrier]:
    """Two barriers for each buffer: filled, and free again."""
    return (
        plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    )


def specialize(
    wg: jax.Array, turns: Any, load_tile: Callable, multiply_tile: Callable, registers: int = 232
) -> None:
    """Runs each warpgroup's function (turn, step) -> step over all tiles; steps are the ring's.

    Args:
      registers: registers of a thread that multiplies.
    """

    @pl.when(wg == COPIES)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        lax.fori_loop(0, turns, load_tile, jnp.int32(0))

    @pl.when(wg != COPIES)
    def _():
        plgpu.set_max_registers(registers, action="increase")
        lax.fori_loop(0, turns, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def load_steps(copies: Callable, steps: Any, step: jax.Array, ring: Any) -> jax.Array:
    """Fills the buffers of a tile's steps, each when it is free. Returns the ring's next step.

    Args:
      copies: (i, slot, copy) -> copies the operands of step i into the buffers of slot.
      step: of the ring, at which the tile begins.
    """
    arrived, free = ring

    def load(i, step):
        slot = lax.rem(step, STAGES)

        @pl.when(step >= STAGES)
        def _():
            plgpu.barrier_wait(free.at[slot])

        copies(i, slot, partial(plgpu.copy_gmem_to_smem, barrier=arrived.at[slot]))
        return step + 1

    return lax.fori_loop(0, steps, load, step)


def sum_steps(product: Callable, steps: Any, step: jax.Array, ring: Any) -> list[jax.Array]:
    """The sums [OWN, HALF] of both halves over a tile's steps, in float32.

    Args:
      product: (i, slot, accumulators) -> starts the products of a step.
      step: of the ring, at which the tile begins.
    """
    arrived, free = ring

    def scope(*accumulators):
        def sum_step(i, _):
            slot = lax.rem(step + i, STAGES)
            plgpu.barrier_wait(arrived.at[slot])
            product(i, slot, accumulators)
            # The products before these are done, so that their buffers are free.
            plgpu.wgmma_wait(len(accumulators))

            @pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(step + i - 1, STAGES)])

        lax.fori_loop(0, steps, sum_step, None)
        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def _():
            plgpu.barrier_arrive(free.at[lax.rem(step + steps - 1, STAGES)])

        return [accumulator[...] for accumulator in accumulators]

    return pl.run_scoped(scope, *[plgpu.WGMMAAccumulatorRef((OWN, HALF), jnp.float32)] * 2)


class Buffers(NamedTuple):
    """Shared memory of a thread block that multiplies rows by matrices; D is a step's depth."""

    x: Any  # [STAGES, ROWS, D]
    w: Any  # [STAGES, 2, D, HALF], or [..., HALF, D]
    stores: Any
    ring: Any


def buffers_of(dtype: Any, result_dtype: Any, depth: int, w_tile: tuple[int, int]) -> Buffers:
    """The scratch of a product, by the dtypes of its operands and of its result."""
    return Buffers(
        plgpu.SMEM((STAGES, ROWS, depth), dtype, transforms=tiled(depth)),
        plgpu.SMEM((STAGES, 2, *w_tile), dtype, transforms=tiled(depth)),
        stores_of(result_dtype),
        ring_of(copies=3),
    )


def load_tile(
    grid: Grid,
    schedule: TileSchedule,
    buffers: Buffers,
    window: Callable,
    x_gmem: Any,
    w_gmem: Any,
    turn: Any,
    step: jax.Array,
) -> jax.Array:
    """The copying warpgroup's part of a turn of a product.

    Args:
      window: (w, group, column of tiles, half, k) -> the part of w for a half of a tile's columns.
    """
    tile, column, group, steps = tile_position(grid, schedule, turn)
    rows, depth = pl.ds(pl.multiple_of(schedule.first_T[tile], ALIGNED), ROWS), buffers.x.shape[-1]

    def copies(i, slot, copy):
        k = pl.ds(i * depth, depth)
        copy(x_gmem.at[rows, k], buffers.x.at[slot])
        for half in range(2):
            copy(window(w_gmem, group, column, half, k), buffers.w.at[slot, half])

    return load_steps(copies, steps, step, buffers.ring)


def run_warpgroups(kernel: Callable, out_type: Any, blocks: int, buffers: Any) -> Callable:
    """Returns a function of arrays that runs a kernel on thread blocks of three warpgroups."""
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[buffers],
    )


class Stores(NamedTuple):
    """Shared memory for results, [2, OWN, PIECE]: one part for each multiplying warpgroup."""

    whole: Any
    tail: Any


def stores_of(dtype: Any) -> Stores:
    """The scratch of `store_rows`; rows that are stored one by one must not be tiled."""
    shape = (2, OWN, PIECE)
    tail = plgpu.SMEM(shape, dtype)
    return Stores(plgpu.SMEM(shape, dtype, transforms=tiled(PIECE)), tail)


class StoredRows(NamedTuple):
    """In a kernel: a warpgroup's rows of a tile; some of them belong to the tile's group."""

    wg: jax.Array
    first: Any
    above: Any  # before those that count, of OWN
    below: Any  # past them


def rows_of(schedule: Any, tile: Any, wg: jax.Array) -> StoredRows:
    """In a kernel: this warpgroup's rows of a tile."""
    first = pl.multiple_of(schedule.first_T[tile], ALIGNED) + wg * OWN
    inside = (jnp.clip(end[tile] - first, 0, OWN) for end in (schedule.start_T, schedule.end_T))
    return StoredRows(wg, first, *inside)


def store_rows(
    stores: Stores, rows: StoredRows, part: jax.Array, y_gmem: Any, between, column
) -> None:
    """Writes the rows that count of [OWN, HALF] to columns of a result.

    If all OWN rows count, one copy a piece. Otherwise one copy per binary digit of their number.

    Args:
      between: index of the result's dimensions between rows and columns.
      column: the first column.
    """
    for start in range(0, HALF, PIECE):
        piece = part[:, start : start + PIECE].astype(stores.whole.dtype)
        columns = (*between, pl.ds(column + start, PIECE))
        store = partial(_store_piece, stores, rows, piece, y_gmem, columns)
        if y_gmem.shape[-1] % COLUMNS:
            # Single rows are copied as plain bytes: past the last column lies the next row.
            pl.when(column + start < y_gmem.shape[-1])(store)
        else:
            store()


def _store_piece(
    stores: Stores, rows: StoredRows, piece: jax.Array, y_gmem: Any, columns: Any
) -> None:
    wg, first, above, below = rows
    count = below - above
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(count == OWN)
    def _():
        stores.whole[wg] = piece
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stores.whole.at[wg], y_gmem.at[pl.ds(first, OWN), *columns])

    @pl.when(count < OWN)
    def _():
        stores.tail[wg] = piece
        plgpu.commit_smem()
        for digit in (32, 16, 8, 4, 2, 1):
            done = above + (count & ~(2 * digit - 1))

            @pl.when(count & digit != 0)
            def _(digit=digit, done=done):
                taken = stores.tail.at[wg, pl.ds(done, digit)]
                where = y_gmem.at[pl.ds(first + done, digit), *columns]
                plgpu.copy_smem_to_gmem(taken, where)
