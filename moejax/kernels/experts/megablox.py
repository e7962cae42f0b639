"""Products of groups on TPUs, by megablox, which JAX ships, with tiles that fit the shapes.

Per device. Legend as in `grouped_matmul`. A tile of rows is multiplied once for each group that
it has rows of, so small tiles waste least where groups end. Rows past the last group are neither
multiplied nor written, so they are set to zero here.

XLA's own kernel for `lax.ragged_dot` chooses tiles that do not divide N, and multiplies whole ones:
640 columns for 1024 on v5p, 1792 for 2048 on v6e (libtpu 0.0.50.1). It can be told others, but
not for the product with transposed matrices.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Float, Int
from moejax.kernels.costs import jitted

LANES = 128  # widths, and tiles, are multiples of this
TILE_ROWS = (128, 256, 512)
TILE_BYTES = 12 * 2**20  # of the 16 MiB that a kernel may take on v5p; 32 on v6e
# FLOPs in the time of one byte: near the ratio of v6e, the larger of both.
INTENSITY = 560

Tiles = tuple[int, int, int]  # of M, K and N


def grouped_matmul(
    x_MK: Float[Array, "M K"],
    w_GKN: Float[Array, "G K N"],
    sizes_G: Int[Array, " G"],
    *,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """Computes `grouped_matmul.grouped_matmul`, for bfloat16 and widths of whole lanes.

    Args:
      interpret: run the kernel in JAX's interpreter, as tests on a CPU do.
    """
    M = x_MK.shape[0]
    missing = -M % LANES
    x_MK = jnp.pad(x_MK, ((0, missing), (0, 0))) if missing else x_MK
    return _product(interpret, x_MK, w_GKN, sizes_G.astype(jnp.int32))[:M]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(interpret: bool, x_MK: jax.Array, w_GKN: jax.Array, sizes_G: jax.Array):
    run = jitted(_multiply, "products", *x_MK.shape, w_GKN.shape[2], interpret=interpret)
    return inside(run(x_MK, w_GKN, sizes_G), sizes_G)


def _forward(interpret, x_MK, w_GKN, sizes_G):
    return _product(interpret, x_MK, w_GKN, sizes_G), (x_MK, w_GKN, sizes_G)


def _backward(interpret, saved, dy_MN):
    x_MK, w_GKN, sizes_G = saved
    options = {"interpret": interpret}
    run = jitted(_transposed, "products", *dy_MN.shape, x_MK.shape[1], **options)
    dx_MK = inside(run(dy_MN, w_GKN, sizes_G), sizes_G)
    run = jitted(_outer, "products", *x_MK.shape, dy_MN.shape[1], **options)
    return dx_MK, run(x_MK, dy_MN, sizes_G, jnp.zeros(0, w_GKN.dtype)), None


_product.defvjp(_forward, _backward)


def inside(y_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Returns rows, those past the last group set to zero."""
    inside_M = jnp.arange(y_MN.shape[0]) < jnp.sum(sizes_G)
    return jnp.where(inside_M[:, None], y_MN, 0)


def _multiply(x_MK, w_GKN, sizes_G, *, interpret: bool):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiles = product_tiles(x_MK.shape[0], *w_GKN.shape)
    return gmm(x_MK, w_GKN, sizes_G, x_MK.dtype, tiles, interpret=interpret)


def _transposed(dy_MN, w_GKN, sizes_G, *, interpret: bool):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    G, K, N = w_GKN.shape
    tiles = product_tiles(dy_MN.shape[0], G, N, K)
    return gmm(dy_MN, w_GKN, sizes_G, dy_MN.dtype, tiles, transpose_rhs=True, interpret=interpret)


def _outer(x_MK, dy_MN, sizes_G, like, *, interpret: bool):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    (M, K), N = x_MK.shape, dy_MN.shape[1]
    tiles = outer_tiles(M, K, N, sizes_G.shape[0])
    return tgmm(x_MK.T, dy_MN, sizes_G, like.dtype, tiles, interpret=interpret)


def product_tiles(M: int, G: int, K: int, N: int) -> Tiles:
    """Returns the tiles of a product that take least time by the model below.

    Matrices are read again for each tile of rows, unless a tile holds all of K.
    """

    def fits(m: int, k: int, n: int) -> bool:
        # Operands and results in two buffers each, sums in float32, and the stored tile.
        return 4 * (m * k + k * n + m * n) + 12 * m * n <= TILE_BYTES

    def read(m: int, k: int, n: int) -> int:
        return M * K * (N // n) + K * N * (G if k == K else M // m + G - 1)

    return _fastest(M, G, K, N, fits, read)


def outer_tiles(M: int, K: int, N: int, G: int) -> Tiles:
    """Returns the tiles of a sum of outer products."""

    def fits(m: int, k: int, n: int) -> bool:
        # Besides, rows are kept in float32 while rows of other groups are set to zero.
        return 4 * (m * k + m * n + k * n) + 8 * m * (k + n) + 4 * k * n <= TILE_BYTES

    def read(m: int, k: int, n: int) -> int:
        return M * K * (N // n) + M * N * (K // k)

    return _fastest(M, G, K, N, fits, read)


def _fastest(
    M: int, G: int, K: int, N: int, fits: Callable[..., bool], read: Callable[..., int]
) -> Tiles:
    """Returns the tiles that fit and take least time; among equals the fewest.

    A kernel takes the longer of its products and its copies. Each group costs up to one more tile
    of rows.

    Args:
      fits: whether tiles fit into fast memory.
      read: elements that are read.
    """

    def time(tiles: Tiles) -> tuple[float, int, int]:
        products = 2 * (M + (G - 1) * tiles[0]) * K * N / INTENSITY
        copied = 2 * read(*tiles)
        return max(products, copied), copied, -math.prod(tiles)

    rows = [m for m in TILE_ROWS if M % m == 0]
    every = itertools.product(rows, _parts(K), _parts(N))
    return min((tiles for tiles in every if fits(*tiles)), key=time)


def _parts(size: int) -> list[int]:
    """The multiples of `LANES` that divide a size."""
    return [part for part in range(LANES, size + 1, LANES) if size % part == 0]
