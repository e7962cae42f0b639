"""The collectives: the calls of `jax.lax` communication that a step is written with.

Per device, inside the one `jax.shard_map` of the train step, which runs with `check_vma=False`.
There the program on all devices is one function whose loss is the SUM of the devices' losses, and
the transpose of each collective is its true transpose: all-gather and reduce-scatter are each
other's, all-to-all is its own inverse, all-reduce is its own. See docs/decisions/0001.

Each call names its axes; an axis of one device costs nothing. Results that carry tokens are tagged
TOKEN_WIRE and gathered weights WEIGHT_WIRE, so that remat policies can keep what was communicated;
tag=None leaves that to the caller.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.layout.layout import Axes

TOKEN_WIRE = "token_wire"
WEIGHT_WIRE = "weight_wire"


def size(axes: Axes) -> int:
    """Devices along `axes`; static."""
    return lax.axis_size(axes) if axes else 1


def index(axes: Axes) -> jax.Array:
    """This device's position along `axes`, first axis slowest."""
    return lax.axis_index(axes)


def all_gather(x: jax.Array, axes: Axes, *, dim: int, tag: str | None = TOKEN_WIRE) -> jax.Array:
    """Joins the devices' `x` along `dim`. Wire: (n - 1) / n of the result's bytes per device."""
    if size(axes) == 1:
        return x
    return _tagged(lax.all_gather(x, axes, axis=dim, tiled=True), tag)


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
    """The largest of the devices' `x`; not differentiable."""
    if size(axes) == 1:
        return x
    return _tagged(lax.pmax(lax.stop_gradient(x), axes), TOKEN_WIRE)


def all_to_all(x_P: jax.Array, axes: Axes, *, tag: str | None = TOKEN_WIRE) -> jax.Array:
    """Sends `x_P[p]` to device p along `axes`, receives into the same place.

    Its own inverse and its own transpose. Wire: (n - 1) / n of x's bytes per device.
    """
    if size(axes) == 1:
        return x_P
    return _tagged(lax.all_to_all(x_P, axes, 0, 0, tiled=True), tag)


def permute(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends x along `axes` from the first to the second of each pair; zeros where none arrives.

    For measuring links: no route needs it. Wire: x's bytes per sending device.
    """
    return lax.ppermute(x, axes, list(pairs))


def _tagged(x: jax.Array, tag: str | None) -> jax.Array:
    return x if tag is None else checkpoint_name(x, tag)
