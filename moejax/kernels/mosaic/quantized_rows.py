"""Rows moved and quantised, or dequantised, weighted and summed, in one pass over memory on Hopper.

Per device. Legend: N tokens, K results of each, M rows, B blocks of a row, C values of a block. The
kernels take 64 blocks at a time: some rows whole, or a piece of a longer one. Each row comes by a
bulk copy of its own from wherever it lies, and a number past the end copies zeros. Bound by memory:
`permute_quantize` reads 2 N C B bytes at best (rows of bfloat16 that several copy stay in cache),
`dequantize_combine` reads the quantised rows once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.formats import FORMATS, TILE
from moejax.kernels.mosaic.quantize import (
    LAYOUT,
    from_bytes,
    quantize_rows,
    stored_dtype,
    to_bytes,
    widen,
)

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


def permute_quantize(
    x_NBC: jax.Array, source_M: jax.Array, weight_M: jax.Array | None, *, name: str
) -> tuple[jax.Array, jax.Array]:
    """Returns uint8 [M, B, C * bits / 8] and scales [M, B] of the rows `x[source]`; N: of zeros.

    Args:
      weight_M: float32, factors of the rows; None: rows stay as they are.
    """
    (N, B, C), M, kind = x_NBC.shape, source_M.shape[0], FORMATS[name]
    width, rows = min(B, TILE), TILE // min(B, TILE)
    stored = stored_dtype(kind)
    source_M = jnp.pad(source_M, (0, -M % rows), constant_values=N)
    if weight_M is not None:
        weight_M = jnp.pad(weight_M, (0, -M % rows))

    def permute_quantize_tile(x_gmem, source_gmem, weight_gmem, values_gmem, scale_gmem, *scratch):
        x_smem, values_smem, scale_smem, arrived = scratch
        first, piece = _tile_origin(rows, width)
        for r in range(rows):
            row = x_gmem.at[source_gmem[first + r], piece]
            plgpu.copy_gmem_to_smem(row, x_smem.at[pl.ds(r * width, width)], arrived)
        plgpu.barrier_wait(arrived)
        x = plgpu.layout_cast(x_smem[...], LAYOUT).astype(jnp.float32)
        if weight_gmem is not None:
            weights = _of_rows([weight_gmem[first + r] for r in range(rows)], width)
            x = x * (jax.lax.broadcast_in_dim(weights, x.shape, (0,)) if rows > 1 else weights)
        y, scale = quantize_rows(x, kind)
        values_smem[...], scale_smem[...] = y.astype(stored), scale
        results = [(values_smem, values_gmem), (scale_smem, scale_gmem)]
        _store_rows(results, first, piece, rows, M)

    values, scale = plgpu.kernel(
        permute_quantize_tile,
        out_type=(
            jax.ShapeDtypeStruct((M, B, C), stored),
            jax.ShapeDtypeStruct((M, B), jnp.float32),
        ),
        grid=(pl.cdiv(M, rows), B // width),
        grid_names=("rows", "piece"),
        scratch_types=[
            plgpu.SMEM((TILE, C), x_NBC.dtype),
            plgpu.SMEM((TILE, C), stored),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.Barrier(num_arrivals=rows),
        ],
    )(x_NBC, source_M, weight_M)
    return to_bytes(values), scale


def dequantize_combine(
    values: jax.Array,
    scale_MB: jax.Array,
    weight_NK: jax.Array,
    slot_NK: jax.Array,
    *,
    name: str,
    dtype: jnp.dtype,
) -> jax.Array:
    """Returns `x_NBC`: for each token its K quantised rows, weighted and added up in float32.

    Args:
      values: uint8 [M, B, C * bits / 8].
      slot_NK: the row of each result; M for none.
    """
    values = from_bytes(values, FORMATS[name])
    (M, B, C), (N, K) = values.shape, slot_NK.shape
    width, rows = min(B, TILE), TILE // min(B, TILE)
    padding = -N % rows
    slot_NK = jnp.pad(slot_NK, ((0, padding), (0, 0)), constant_values=M)
    weight_NK = jnp.pad(weight_NK.astype(jnp.float32), ((0, padding), (0, 0)))

    def combine_tile(values_gmem, scale_gmem, weight_gmem, slot_gmem, x_gmem, *scratch):
        values_smem, scale_smem, x_smem, arrived = scratch
        first, piece = _tile_origin(rows, width)

        @pl.loop(0, K)  # all are on their way at once
        def _(k):
            for r in range(rows):
                row, into = slot_gmem[first + r, k], pl.ds(r * width, width)
                copy = partial(plgpu.copy_gmem_to_smem, barrier=arrived.at[k])
                copy(values_gmem.at[row, piece], values_smem.at[k, into])
                # A copy that fills in zeros where there is no row needs an address of a multiple of
                # 128 bytes; scales of narrow rows have 32. So none is filled in, and `add` does it.
                scale = scale_gmem.at[jnp.minimum(row, M - 1), piece]
                copy(scale, scale_smem.at[k, into], oob_mode=IN_BOUNDS)

        def add(k, total):
            plgpu.barrier_wait(arrived.at[k])
            slots = [slot_gmem[first + r, k] for r in range(rows)]
            weights = [weight_gmem[first + r, k] for r in range(rows)]
            there = jnp.broadcast_to(_of_rows(slots, width), (TILE,)) < M
            scale = jnp.where(there, scale_smem[k], 0) * _of_rows(weights, width)
            y = widen(plgpu.layout_cast(values_smem[k], LAYOUT))
            return total + y * jax.lax.broadcast_in_dim(scale, y.shape, (0,))

        total = plgpu.layout_cast(jnp.zeros((TILE, C), jnp.float32), LAYOUT)
        total = jax.lax.fori_loop(0, K, add, total)
        x_smem[...] = total.astype(dtype)
        _store_rows([(x_smem, x_gmem)], first, piece, rows, N)

    return plgpu.kernel(
        combine_tile,
        out_type=jax.ShapeDtypeStruct((N, B, C), dtype),
        grid=(pl.cdiv(N, rows), B // width),
        grid_names=("rows", "piece"),
        scratch_types=[
            plgpu.SMEM((K, TILE, C), values.dtype),
            plgpu.SMEM((K, TILE), jnp.float32),
            plgpu.SMEM((TILE, C), dtype),
            plgpu.Barrier(num_arrivals=2 * rows, num_barriers=K),
        ],
    )(values, scale_MB, weight_NK, slot_NK)


def _tile_origin(rows: int, width: int) -> tuple[jax.Array, pl.Slice]:
    """The first row of this thread block, and its piece of each row's blocks."""
    return jax.lax.axis_index("rows") * rows, pl.ds(jax.lax.axis_index("piece") * width, width)


def _store_rows(
    results: list[tuple[Any, Any]], first: jax.Array, piece: pl.Slice, rows: int, count: int
) -> None:
    """Writes the tile's rows from on-chip memory to the device's; none past the end."""
    plgpu.commit_smem()
    width = piece.size

    def store(r: int) -> None:
        for smem, gmem in results:
            row = smem.at[pl.ds(r * width, width)]
            plgpu.copy_smem_to_gmem(row, gmem.at[first + r, piece])

    for r in range(rows):
        if count % rows == 0:
            store(r)
        else:
            pl.when(first + r < count)(partial(store, r))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _of_rows(numbers: list[Any], width: int) -> Any:
    """Returns for each block of the tile the number of its row; or one number for all."""
    total = numbers[0]
    if len(numbers) == 1:
        return total
    block = jax.lax.broadcasted_iota(jnp.int32, (TILE,), 0)
    for r, number in enumerate(numbers[1:], 1):
        total = jnp.where(block >= r * width, number, total)
    return total
