"""The collectives of a train step: thin wrappers of `jax.lax`.

Per device, inside the one `jax.shard_map` of the train step, which runs with `check_vma=False`.
There the program on all devices is one function whose loss is the SUM of the devices' losses, and
the gradient of each collective is its true transpose: all-gather and reduce-scatter are each
other's transpose, all-to-all and all-reduce are their own. See docs/decisions/0001.

Each call names its mesh axes; an axis of one device costs nothing. Results are tagged TOKEN_WIRE
(tokens), WEIGHT_WIRE (gathered weights) or NODE_WIRE (weights gathered across nodes alone), so that
remat policies can keep communicated values; tag=None leaves the tag to the caller. In "Wire" lines
n is the number of devices along the axes.
The first dimension of `x_P` counts P peers; any others may follow.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.layout.layout import Axes

TOKEN_WIRE = "token_wire"
WEIGHT_WIRE = "weight_wire"
NODE_WIRE = "node_wire"


def size(axes: Axes) -> int:
    """Number of devices along `axes`; static."""
    return lax.axis_size(axes) if axes else 1


def index(axes: Axes) -> jax.Array:
    """This device's position along `axes`, first axis slowest."""
    return lax.axis_index(axes)


def all_gather(x: jax.Array, axes: Axes, *, dim: int, tag: str | None = TOKEN_WIRE) -> jax.Array:
    """Joins the devices' `x` along `dim`. Wire: (n - 1) / n of the result's bytes per device."""
    if size(axes) == 1:
        return x
    return _tagged(lax.all_gather(x, axes, axis=dim, tiled=True), tag)


def gather_beside(x: jax.Array, axes: Axes) -> jax.Array:
    """Stacks the devices' `x`: [n, *x.shape]. The program goes on until it uses the result.

    On several CPU processes only a gather that makes a dimension is not waited for at once
    (`comm.cpu.gloo`); elsewhere it is an all-gather like others. Wire: (n - 1) x per device.
    """
    if size(axes) == 1:
        return x[None]
    return lax.all_gather(x, axes, axis=0, tiled=False)


def reduce_scatter(
    x: jax.Array, axes: Axes, *, dim: int, tag: str | None = TOKEN_WIRE
) -> jax.Array:
    """Sums the devices' `x`; each keeps its slice of `dim`. Wire: (n - 1) / n of x's bytes."""
    if size(axes) == 1:
        return x
    return _tagged(lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True), tag)


def all_reduce(x: jax.Array, axes: Axes, *, tag: str | None = TOKEN_WIRE) -> jax.Array:
    """Sums the devices' `x`. Wire: 2 (n - 1) / n of x's bytes per device."""
    if size(axes) == 1:
        return x
    return _tagged(lax.psum(x, axes), tag)


def all_max(x: jax.Array, axes: Axes) -> jax.Array:
    """The elementwise maximum of the devices' `x`; not differentiable."""
    if size(axes) == 1:
        return x
    return _tagged(lax.pmax(lax.stop_gradient(x), axes), TOKEN_WIRE)


def all_to_all(x_P: jax.Array, axes: Axes, *, tag: str | None = TOKEN_WIRE) -> jax.Array:
    """Sends `x_P[p]` to device p along `axes`; row p of the result came from device p.

    Its own inverse and its own transpose. Wire: (n - 1) / n of x's bytes per device.
    """
    if size(axes) == 1:
        return x_P
    return _tagged(lax.all_to_all(x_P, axes, 0, 0, tiled=True), tag)


def ppermute(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends x from the first to the second device of each pair; zeros where nothing arrives.

    Pipeline stages pass on by it (`comm.links`), and keys of shared sequences (`comm.context`);
    links are measured by it. No route needs it.
    Wire: x's bytes per sending device.
    """
    return lax.ppermute(x, axes, list(pairs))


def _tagged(x: jax.Array, tag: str | None) -> jax.Array:
    return x if tag is None else checkpoint_name(x, tag)
