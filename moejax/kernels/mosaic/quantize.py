"""Block quantisation on Hopper: one pass over memory each way, and over all peers in one.

Per device. Legend: R blocks of B values each, P peers. A thread block takes a tile of blocks: one
bulk copy in, arithmetic in registers, one bulk copy out. Tiles are small, so that several of them
share a multiprocessor and one's copies hide behind another's arithmetic. Bound by memory: each
array is moved once.

The layout gives a thread four neighbours, so that bytes move in words, and a block four threads,
so that its maximum needs two shuffles. Four-bit values are stored as JAX's int4, which XLA packs
two to a byte at no cost.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.formats import FORMATS, TINY, Format

BLOCKS = (32, 64, 128, 256)  # sizes of a block that tiles are made of
LAYOUT = plgpu.Layout.WGMMA_8BIT  # 64 rows, of each 16 values a turn
ALIGNED = 8  # blocks: those of a swizzled tile, which bulk copies take whole
TILE = 8192  # values, 64 for each thread of a warpgroup
STAGES = 4  # peers whose tiles are on their way at a time


def tile_rows(block: int) -> int:
    """Blocks in a tile; the layout needs a multiple of 64."""
    return max(64, TILE // block)


def quantize(x_RB: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Returns `values_RB`, uint8 [R, B * bits / 8], and `scale_R`; see `kernels.experts.quantize`.

    Args:
      x_RB: float32 or bfloat16, R of at least one.
    """
    whole, kind = x_RB.shape[0], FORMATS[name]
    x_RB = pad_rows(x_RB, ALIGNED)
    R, B = x_RB.shape
    rows, stored = tile_rows(B), stored_dtype(kind)

    def quantize_tile(x_gmem, values_gmem, scale_gmem, x_smem, values_smem, scale_smem, arrived):
        here = pl.ds(jax.lax.axis_index("tile") * rows, rows)
        plgpu.copy_gmem_to_smem(x_gmem.at[here], x_smem, arrived)
        plgpu.barrier_wait(arrived)
        x = plgpu.layout_cast(x_smem[...], LAYOUT).astype(jnp.float32)
        y, scale = quantize_rows(x, kind)
        values_smem[...], scale_smem[...] = y.astype(stored), scale
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(values_smem, values_gmem.at[here])
        plgpu.copy_smem_to_gmem(scale_smem, scale_gmem.at[here])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tiles = pl.cdiv(R, rows)
    values_RB, scale_R = plgpu.kernel(
        quantize_tile,
        # Scales are padded to whole tiles: bulk copies of untiled arrays need multiples of 16
        # bytes.
        out_type=(
            jax.ShapeDtypeStruct((R, B), stored),
            jax.ShapeDtypeStruct((tiles * rows,), jnp.float32),
        ),
        grid=(tiles,),
        grid_names=("tile",),
        scratch_types=[
            plgpu.SMEM((rows, B), x_RB.dtype),
            plgpu.SMEM((rows, B), stored),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.Barrier(),
        ],
    )(x_RB)
    return to_bytes(values_RB[:whole]), scale_R[:whole]


def dequantize_sum(
    values_PRB: jax.Array, scale_PR: jax.Array, name: str, dtype: jnp.dtype
) -> jax.Array:
    """Returns `x_RB`: each peer's blocks scaled back and added up in float32, in peers' order.

    Args:
      values_PRB: uint8 [P, R, B * bits / 8] as `quantize` makes them, P and R of at least one.
    """
    kind = FORMATS[name]
    whole = values_PRB.shape[1]
    values_PRB = from_bytes(pad_rows(values_PRB, ALIGNED, dim=1), kind)
    P, R, B = values_PRB.shape
    rows = tile_rows(B)
    tiles = pl.cdiv(R, rows)
    scale_PR = pad_rows(scale_PR, rows, dim=1)

    def sum_tile(values_gmem, scale_gmem, x_gmem, x_smem):
        tile = jax.lax.axis_index("tile")

        def add(_, values_smem, scale_smem, total):
            y = widen(plgpu.layout_cast(values_smem[...], LAYOUT))
            total += y * jax.lax.broadcast_in_dim(scale_smem[...], y.shape, (0,))
            plgpu.commit_smem()  # the next peer's tile may come where this one was
            return total

        total = plgpu.emit_pipeline(
            add,
            grid=(P,),
            in_specs=[
                plgpu.BlockSpec((None, rows, B), lambda p: (p, tile, 0)),
                plgpu.BlockSpec((None, rows), lambda p: (p, tile)),
            ],
            max_concurrent_steps=min(P, STAGES),
            init_carry=plgpu.layout_cast(jnp.zeros((rows, B), jnp.float32), LAYOUT),
        )(values_gmem, scale_gmem)
        x_smem[...] = total.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem, x_gmem.at[pl.ds(tile * rows, rows)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    x_RB = plgpu.kernel(
        sum_tile,
        out_type=jax.ShapeDtypeStruct((R, B), dtype),
        grid=(tiles,),
        grid_names=("tile",),
        scratch_types=[plgpu.SMEM((rows, B), dtype)],
    )(values_PRB, scale_PR)
    return x_RB[:whole]


def pad_rows(x: jax.Array, multiple: int, *, dim: int = 0) -> jax.Array:
    """Adds zeros to a dimension up to a multiple; nothing is copied where it is one."""
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, -x.shape[dim] % multiple)
    return jnp.pad(x, padding)


def quantize_rows(x: jax.Array, kind: Format) -> tuple[jax.Array, jax.Array]:
    """In a kernel: numbers of the format, exact or still to be rounded, and each row's scale."""
    # Magnitudes are ordered as their bits are, and NaN stands above infinity: no NaN is lost.
    bits = jnp.max(jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF, axis=1)
    top = jax.lax.bitcast_convert_type(bits, jnp.float32)
    scale = jnp.where(top < jnp.inf, top * (1 / kind.largest), jnp.nan)
    inverse = jnp.where(scale >= TINY, 1 / scale, 0)
    # A block that is not finite has such a scale, so its numbers do not matter.
    y = x * jax.lax.broadcast_in_dim(inverse, x.shape, (0,))
    y = jnp.clip(y if kind.relative else jnp.round(y), -kind.largest, kind.largest)
    return (y.astype(jnp.int8) if kind.bits == 4 else y), scale


def widen(y: jax.Array) -> jax.Array:
    """In a kernel: float32 of stored numbers."""
    return (y.astype(jnp.int8) if y.dtype == jnp.int4 else y).astype(jnp.float32)


def stored_dtype(kind: Format) -> jnp.dtype:
    """The dtype in which kernels store the format's numbers."""
    return jnp.dtype(jnp.int4 if kind.bits == 4 else kind.dtype)


def to_bytes(values: jax.Array) -> jax.Array:
    """The same memory, as uint8."""
    if values.dtype == jnp.int4:
        values = values.reshape(*values.shape[:-1], -1, 2)
    return jax.lax.bitcast_convert_type(values, jnp.uint8)


def from_bytes(values: jax.Array, kind: Format) -> jax.Array:
    """Undoes `to_bytes`."""
    stored = jax.lax.bitcast_convert_type(values, stored_dtype(kind))
    return stored.reshape(*values.shape[:-1], -1) if kind.bits == 4 else stored
