"""Products of rows and the matrix of their group, in bfloat16 on Hopper's matrix units.

Per device. Legend: M rows sorted by group, G groups, K summed over, N columns. A thread block works
on tile after tile of 128 x 256 results. One of its three warpgroups only copies, by TMA, as far
ahead as the ring of buffers allows, also into the next tile while this one is written; the other
two multiply, 64 rows each. Bound by compute from about 200 rows a group on.

A group's tiles start at its own first row, or up to seven before it, because copies into what the
matrix units read start at a multiple of eight. A tile's rows of other groups are multiplied and not
stored. Rows past the last group are a group of their own, which is zero. K and N are multiples of
DEPTH, the width of a swizzled tile.
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

ROWS, COLUMNS, DEPTH = 128, 256, 64  # of a tile, and what one step sums over
HALF, PIECE = COLUMNS // 2, 64  # columns of one product, and of one store
STAGES = 4  # steps that fit in shared memory
COPIES = 2  # the warpgroup that copies; 0 and 1 multiply
MULTIPROCESSORS = 132  # of H100 SXM and H200


class Schedule(NamedTuple):
    """Tiles of rows, group after group; G stands for the rows past the last group."""

    group_T: jax.Array
    first_T: jax.Array  # row, a multiple of ALIGNED
    start_T: jax.Array  # rows that count, from this one
    end_T: jax.Array  # to this one
    count_1: jax.Array  # tiles; the rest of the arrays has no meaning


def schedule_rows(sizes_G: jax.Array, num_rows: int) -> Schedule:
    """Cuts a buffer of rows, sorted by group, in tiles."""
    sizes = jnp.append(sizes_G, num_rows - jnp.sum(sizes_G)).astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    firsts = starts // ALIGNED * ALIGNED
    tiles = jnp.where(sizes > 0, -(-(ends - firsts) // ROWS), 0)
    ends_of_tiles = jnp.cumsum(tiles)
    # A group of n rows has at most (n - 1 + ALIGNED - 1) / ROWS + 1.
    most = (num_rows + sizes.shape[0] * (ALIGNED - 2)) // ROWS + sizes.shape[0]
    tile_T = jnp.arange(most, dtype=jnp.int32)
    group_T = jnp.searchsorted(ends_of_tiles, tile_T, side="right").astype(jnp.int32)
    group_T = jnp.minimum(group_T, sizes.shape[0] - 1)
    first_T = firsts[group_T] + (tile_T - (ends_of_tiles - tiles)[group_T]) * ROWS
    return Schedule(group_T, first_T, starts[group_T], ends[group_T], ends_of_tiles[-1:])


def grouped_matmul(
    x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Returns `y_MN`, each row times the matrix of its group; with `transposed`, w is [G, N, K]."""
    N = w_GKN.shape[1 if transposed else 2]

    def window(w_gmem, group, column, half, k):
        columns = pl.ds(column * COLUMNS + half * HALF, HALF)
        return w_gmem.at[(group, columns, k) if transposed else (group, k, columns)]

    def finish(parts, column, store):
        for half, part in enumerate(parts):
            store(0, part, column * COLUMNS + half * HALF)

    return _multiply(x_MK, w_GKN, sizes_G, window, finish, ((N,),), N, transposed)[0]


def grouped_swiglu(
    x_MK: jax.Array, w_GKUF: jax.Array, sizes_G: jax.Array
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

    widths = (F,), (2, F)
    a_MF, h_MUF = _multiply(x_MK, w_GKUF, sizes_G, window, finish, widths, 2 * F, False)
    return a_MF, h_MUF.reshape(-1, 2 * F)


def _multiply(
    x_MK: jax.Array,
    w: jax.Array,
    sizes_G: jax.Array,
    window: Callable,
    finish: Callable,
    widths: tuple[tuple[int, ...], ...],
    all_columns: int,
    transposed: bool,
) -> list[jax.Array]:
    """The products of all tiles.

    Args:
      window: (w, group, column of tiles, half, k) -> the part of w for a half of a tile's columns.
      finish: (both halves' sums, column of tiles, store) -> stores what becomes of them.
      widths: of a row of each result.
      all_columns: of the products.
    """
    whole, G = x_MK.shape[0], w.shape[0]
    x_MK = pad_rows(x_MK, ALIGNED)
    M, K = x_MK.shape
    schedule = schedule_rows(sizes_G, M)
    columns, steps_of_k = pl.cdiv(all_columns, COLUMNS), pl.cdiv(K, DEPTH)
    blocks = min(MULTIPROCESSORS, columns * schedule.group_T.shape[0])
    w_tile = (HALF, DEPTH) if transposed else (DEPTH, HALF)

    def multiply_tiles(group_gmem, first_gmem, start_gmem, end_gmem, count_gmem, *rest):
        (x_gmem, w_gmem), rest = rest[:2], rest[2:]
        y_gmem, (x_smem, w_smem, y_smem, tail_smem, ring) = rest[: len(widths)], rest[len(widths) :]
        wg = lax.axis_index("wg")

        def place(turn):
            place = turn * blocks + lax.axis_index("block")
            tile, column = lax.div(place, columns), lax.rem(place, columns)
            group = group_gmem[tile]
            return tile, column, group, jnp.where(group < G, steps_of_k, 0)

        turns = _turns(count_gmem[0] * columns, blocks)

        def load_tile(turn, step):
            tile, column, group, steps = place(turn)
            rows = pl.ds(pl.multiple_of(first_gmem[tile], ALIGNED), ROWS)

            def load(i, step):
                k = pl.ds(i * DEPTH, DEPTH)
                slot, copy = _next_free(step, ring)
                copy(x_gmem.at[rows, k], x_smem.at[slot])
                for half in range(2):
                    copy(window(w_gmem, group, column, half, k), w_smem.at[slot, half])
                return step + 1

            return lax.fori_loop(0, steps, load, step)

        def multiply_tile(turn, step):
            tile, column, _, steps = place(turn)

            def product(slot, accumulators, i):
                for half, accumulator in enumerate(accumulators):
                    w_half = w_smem.at[slot, half]
                    w_half = w_half.transpose((1, 0)) if transposed else w_half
                    own = x_smem.at[slot, pl.ds(pl.multiple_of(wg * 64, 64), 64)]
                    plgpu.wgmma(accumulator, own, w_half)

            parts = _sum_steps(product, steps, step, ring)
            first = pl.multiple_of(first_gmem[tile], ALIGNED) + wg * 64
            rows = tuple(jnp.clip(end[tile] - first, 0, 64) for end in (start_gmem, end_gmem))
            store = partial(_store, y_gmem, y_smem, tail_smem, first, rows, wg)
            finish(parts, column, store)
            return step + steps

        _specialize(wg, turns, load_tile, multiply_tile)

    results = plgpu.kernel(
        multiply_tiles,
        out_type=[jax.ShapeDtypeStruct((M, *width), x_MK.dtype) for width in widths],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), x_MK.dtype, transforms=_tiled(64)),
            plgpu.SMEM((STAGES, 2, *w_tile), x_MK.dtype, transforms=_tiled(64)),
            plgpu.SMEM((2, 64, PIECE), x_MK.dtype, transforms=_tiled(64)),
            plgpu.SMEM((2, 64, PIECE), x_MK.dtype),
            _ring(copies=3),
        ],
    )(*schedule, x_MK, w)
    return [y[:whole] for y in results]


def grouped_outer(
    x_MK: jax.Array, y_MN: jax.Array, sizes_G: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Returns `w_GKN`, the sum over each group's rows of their outer products; zeros of no rows.

    Rows of another group may be multiplied by zero: all rows must be finite.
    """
    x_MK, y_MN = pad_rows(x_MK, ALIGNED), pad_rows(y_MN, ALIGNED)
    K, N, G = x_MK.shape[1], y_MN.shape[1], sizes_G.shape[0]
    ends_G = jnp.cumsum(sizes_G).astype(jnp.int32)
    tall, wide = pl.cdiv(K, ROWS), pl.cdiv(N, COLUMNS)
    count = G * tall * wide
    blocks = min(MULTIPROCESSORS, count)

    def sum_outer(start_gmem, end_gmem, x_gmem, y_gmem, w_gmem, x_smem, y_smem, w_smem, ring):
        wg = lax.axis_index("wg")

        def place(turn):
            place = turn * blocks + lax.axis_index("block")
            group, tile = lax.div(place, tall * wide), lax.rem(place, tall * wide)
            row, column = lax.div(tile, wide) * ROWS, lax.rem(tile, wide) * COLUMNS
            start, end = start_gmem[group], end_gmem[group]
            first = pl.multiple_of(lax.div(start, ALIGNED) * ALIGNED, ALIGNED)
            steps = jnp.where(end > start, lax.div(end - first + DEPTH - 1, DEPTH), 0)
            return group, row, column, first, start, end, steps

        def load_tile(turn, step):
            _, row, column, first, _, _, steps = place(turn)

            def load(i, step):
                rows = pl.ds(first + i * DEPTH, DEPTH)
                slot, copy = _next_free(step, ring)
                for half in range(2):
                    copy(x_gmem.at[rows, pl.ds(row + half * 64, 64)], x_smem.at[slot, half])
                    copy(y_gmem.at[rows, pl.ds(column + half * HALF, HALF)], y_smem.at[slot, half])
                return step + 1

            return lax.fori_loop(0, steps, load, step)

        def multiply_tile(turn, step):
            group, row, column, first, start, end, steps = place(turn)

            def product(slot, accumulators, i):
                here = first + i * DEPTH

                @pl.when((here < start) | (here + DEPTH > end))
                def _():
                    x = plgpu.layout_cast(x_smem[slot, wg], plgpu.Layout.WGMMA)
                    row = here + plgpu.layout_cast(
                        lax.broadcasted_iota(jnp.int32, x.shape, 0), plgpu.Layout.WGMMA
                    )
                    counts = (row >= start) & (row < end)
                    x_smem[slot, wg] = jnp.where(counts, x, jnp.zeros_like(x))
                    plgpu.commit_smem()

                own = x_smem.at[slot, wg].transpose((1, 0))
                for half, accumulator in enumerate(accumulators):
                    plgpu.wgmma(accumulator, own, y_smem.at[slot, half])

            parts = _sum_steps(product, steps, step, ring)
            for half, part in enumerate(parts):
                for start in range(0, HALF, PIECE):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    w_smem[wg] = part[:, start : start + PIECE].astype(dtype)
                    plgpu.commit_smem()
                    rows = pl.ds(row + wg * 64, 64)
                    columns = pl.ds(column + half * HALF + start, PIECE)
                    plgpu.copy_smem_to_gmem(w_smem.at[wg], w_gmem.at[group, rows, columns])
            return step + steps

        _specialize(wg, _turns(count, blocks), load_tile, multiply_tile)

    transforms = _tiled(128 // jnp.dtype(dtype).itemsize)
    return plgpu.kernel(
        sum_outer,
        out_type=jax.ShapeDtypeStruct((G, K, N), dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((STAGES, 2, DEPTH, 64), x_MK.dtype, transforms=_tiled(64)),
            plgpu.SMEM((STAGES, 2, DEPTH, HALF), x_MK.dtype, transforms=_tiled(64)),
            plgpu.SMEM((2, 64, PIECE), dtype, transforms=transforms),
            _ring(copies=4),
        ],
    )(ends_G - sizes_G, ends_G, x_MK, y_MN)


def _tiled(width: int) -> tuple[Any, Any]:
    """How buffers lie that matrix units read: in tiles of eight rows of 128 bytes, swizzled."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]


def _ring(copies: int) -> tuple[plgpu.Barrier, plgpu.Barrier]:
    """Barriers of the buffers: this one has arrived, this one is free again."""
    return (
        plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    )


def _turns(count: Any, blocks: int) -> Any:
    """Tiles that this thread block works on."""
    return lax.div(count - lax.axis_index("block") + blocks - 1, blocks)


def _specialize(wg: jax.Array, turns: Any, load_tile: Callable, multiply_tile: Callable) -> None:
    """Each warpgroup's part, tile after tile; both count the steps that were taken."""

    @pl.when(wg == COPIES)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        lax.fori_loop(0, turns, load_tile, jnp.int32(0))

    @pl.when(wg != COPIES)
    def _():
        plgpu.set_max_registers(232, action="increase")
        lax.fori_loop(0, turns, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _next_free(step: jax.Array, ring: Any) -> tuple[jax.Array, Callable]:
    """Waits for the step's buffer, and returns its number and the copy into it."""
    arrived, free = ring
    slot = lax.rem(step, STAGES)

    @pl.when(step >= STAGES)
    def _():
        plgpu.barrier_wait(free.at[slot])

    return slot, partial(plgpu.copy_gmem_to_smem, barrier=arrived.at[slot])


def _sum_steps(product: Callable, steps: Any, step: jax.Array, ring: Any) -> list[jax.Array]:
    """The sums [64, HALF] of both halves over a tile's steps, in float32.

    Args:
      product: (slot, accumulators, i) -> starts the products of a step.
      step: of the ring, at which the tile begins.
    """
    arrived, free = ring

    def scope(*accumulators):
        def one(i, _):
            slot = lax.rem(step + i, STAGES)
            plgpu.barrier_wait(arrived.at[slot])
            product(slot, accumulators, i)
            # The products before these are done, so that their buffers are free.
            plgpu.wgmma_wait(len(accumulators))

            @pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(step + i - 1, STAGES)])

        lax.fori_loop(0, steps, one, None)
        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def _():
            plgpu.barrier_arrive(free.at[lax.rem(step + steps - 1, STAGES)])

        return [accumulator[...] for accumulator in accumulators]

    return pl.run_scoped(scope, *[plgpu.WGMMAAccumulatorRef((64, HALF), jnp.float32)] * 2)


def _store(
    y_gmem,
    y_smem,
    tail_smem,
    first: Any,
    rows: Any,
    wg: jax.Array,
    number: int,
    part: jax.Array,
    column: Any,
    *between: int,
) -> None:
    """Writes rows of [64, HALF], the first of which is row `first`, to columns of result `number`.

    All 64 in one copy a piece; fewer by the binary digits of their number.

    Args:
      rows: (start, end) of those that count.
      between: where in the result's dimensions that stand between rows and columns.
    """
    above, below = rows
    count = below - above
    for start in range(0, HALF, PIECE):
        piece = part[:, start : start + PIECE].astype(y_smem.dtype)
        columns = (*between, pl.ds(column + start, PIECE))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(count == 64)
        def _(piece=piece, columns=columns):
            y_smem[wg] = piece
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(y_smem.at[wg], y_gmem[number].at[pl.ds(first, 64), *columns])

        @pl.when(count < 64)
        def _(piece=piece, columns=columns):
            tail_smem[wg] = piece
            plgpu.commit_smem()
            for digit in (32, 16, 8, 4, 2, 1):
                done = above + (count & ~(2 * digit - 1))

                @pl.when(count & digit != 0)
                def _(digit=digit, done=done):
                    taken = tail_smem.at[wg, pl.ds(done, digit)]
                    where = y_gmem[number].at[pl.ds(first + done, digit), *columns]
                    plgpu.copy_smem_to_gmem(taken, where)
