"""Sequences that several devices share: the positions of each, and the keys that it sees of others.

Per device, inside shard_map. The c devices along `Layout.context` share each sequence. Its
positions lie in stripes, which are dealt back and forth: the first c stripes to devices 0 to c - 1,
the next c to devices c - 1 to 0, and so on. So each device has early and late positions, which see
few and many keys. A device's positions are in order, stripe after stripe.

Letters: those of `layout.layout`; c devices that share a sequence; S positions of it, T = S / c
those of a device, t a tensor rank's part of them; s positions of a stripe, n pairs of stripes of a
device, r keys before a stripe that its queries see.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moejax.annotations import Array, Int
from moejax.comm import wire
from moejax.layout.layout import Layout

CONTEXT = "context"  # named scope of these collectives


def own(x_BS: jax.Array, layout: Layout) -> jax.Array:
    """Cuts this device's positions out of all; nothing is sent. Further dimensions may follow."""
    c = layout.size(layout.context)
    if c == 1:
        return x_BS
    B, S, *rest = x_BS.shape
    x_Bn2cs = x_BS.reshape(B, -1, 2, c, layout.stripe, *rest)
    here = wire.index(layout.context)
    pair = [
        lax.dynamic_index_in_dim(x_Bn2cs[:, :, way], place, axis=2, keepdims=False)
        for way, place in enumerate((here, c - 1 - here))
    ]
    return jnp.stack(pair, axis=2).reshape(B, S // c, *rest)


def positions(length: int, layout: Layout) -> Int[Array, " T"]:
    """Returns this device's positions in sequences of `length`; without context all of them."""
    return own(jnp.arange(length)[None], layout)[0]


def gather(x_BT: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `own`: returns all positions, in order. Not for gradients of long sums.

    Wire: (c - 1) / c of the result's bytes.
    """
    with jax.named_scope(CONTEXT):
        return _gather(layout, False, x_BT) if layout.context else x_BT


def keys_before(position: jax.Array, device: jax.Array, layout: Layout) -> jax.Array:
    """Returns how many positions of a device are before some positions of the sequence.

    Args:
      device: its place along `Layout.context`.
    """
    c, s = layout.size(layout.context), layout.stripe
    pair, within = position // (2 * c * s), position % (2 * c * s)
    parts = [jnp.clip(within - place * s, 0, s) for place in (device, 2 * c - 1 - device)]
    return pair * 2 * s + parts[0] + parts[1]


def place_of(position: jax.Array, layout: Layout) -> jax.Array:
    """Returns where this device has some positions, among its own; elsewhere past any of them."""
    c, here = layout.size(layout.context), wire.index(layout.context)
    if c == 1:
        return position
    stripe = position // layout.stripe % (2 * c)
    owner = jnp.minimum(stripe, 2 * c - 1 - stripe)
    far = jnp.iinfo(position.dtype).max
    return jnp.where(owner == here, keys_before(position, here, layout), far)


def gather_rows(x_B: jax.Array, layout: Layout) -> jax.Array:
    """Joins the rows of the devices that share sequences. Wire: (c - 1) / c of the result."""
    with jax.named_scope(CONTEXT):
        return wire.all_gather(x_B, layout.context, dim=0, tag=None)


def own_rows(x_B: jax.Array, layout: Layout) -> jax.Array:
    """Undoes `gather_rows`; nothing is sent."""
    c = layout.size(layout.context)
    if c == 1:
        return x_B
    rows = len(x_B) // c
    return lax.dynamic_slice_in_dim(x_B, wire.index(layout.context) * rows, rows)


class Reach(NamedTuple):
    """The keys that a device's queries may see.

    Attributes:
      before: r, where each stripe has its own keys and those right before it, in one array of
        2 n (r + s) places; None: all keys of the sequence, in order.
    """

    before: int | None

    def places(
        self, first_BT: jax.Array, last_BT: jax.Array, length: int, layout: Layout
    ) -> tuple[jax.Array, jax.Array]:
        """Returns where the first and the last key of each query lie in the result of `exchange`.

        Args:
          first_BT, last_BT: their positions in the sequence.
          length: S.
        """
        if self.before is None:
            return first_BT, last_BT
        s, step = layout.stripe, self.before + layout.stripe
        position_T = positions(length, layout)
        stripe_T = jnp.arange(position_T.size) // s
        shift_T = stripe_T * step + self.before - position_T // s * s
        return first_BT + shift_T, last_BT + shift_T

    def starts(self, length: int, layout: Layout) -> tuple[int, ...]:
        """Returns the places among the keys at which a stripe of queries may start."""
        s = layout.stripe
        if self.before is None:
            return tuple(range(0, length, s))
        count = length // layout.size(layout.context) // s
        return tuple(range(self.before, count * (self.before + s), self.before + s))


def reach_of(window: int | None, layout: Layout) -> Reach:
    """Returns what queries of a layer need: of a window within a stripe, only the stripe before."""
    near = window is not None and window - 1 <= layout.stripe
    return Reach(window - 1 if near and window is not None else None)


def exchange(
    x_BT: jax.Array,
    reach: Reach,
    layout: Layout,
    gradient_dtype: DTypeLike,
    *,
    over_tensor: bool = False,
) -> jax.Array:
    """Returns the keys, or their sources, that this device's queries may see.

    Wire, all keys: those of the other devices, across nodes first and then inside, so that no node
    receives a key twice. Near keys: the last r of each stripe, to the device with the next one.
    In backward as much, in `gradient_dtype`: gradients are sums over devices.

    Args:
      x_BT: of this device's positions; further dimensions may follow.
      over_tensor: whether x holds this tensor rank's part of them, and the result is for all ranks.
    """
    move = _gather if reach.before is None else partial(_extend, reach.before)
    with jax.named_scope(CONTEXT):
        return _moved(partial(move, layout, over_tensor), jnp.dtype(gradient_dtype), x_BT)


def stripe_before(x_BP: jax.Array, layout: Layout) -> jax.Array:
    """Returns for each stripe of this device what the stripe before it has; zeros for the first.

    Wire: of two stripes of three or more devices: half of x to each neighbour.

    Args:
      x_BP: of this device's stripes in order; further dimensions may follow.
    """
    with jax.named_scope(CONTEXT):
        return _stripe_before(x_BP, layout)


def join_stripes(x_BP: jax.Array, layout: Layout) -> jax.Array:
    """Returns all stripes of a share of the rows, in order; zeros fill the rows up.

    Wire: (c - 1) / c of x. In backward as much.

    Args:
      x_BP: of this device's stripes; further dimensions may follow.
    """
    c, (B, *rest) = layout.size(layout.context), x_BP.shape
    x_BP = jnp.pad(x_BP, ((0, -B % c), *[(0, 0)] * len(rest)))
    with jax.named_scope(CONTEXT):
        x_cbP = wire.all_to_all(x_BP.reshape(c, -1, *rest), layout.context)
    return _in_order(x_cbP, 1)


def split_stripes(x_bN: jax.Array, rows: int, layout: Layout) -> jax.Array:
    """Undoes `join_stripes` of arrays with that many rows. Wire: (c - 1) / c of x."""
    c, (b, _, *rest) = layout.size(layout.context), x_bN.shape
    x_bn2c = x_bN.reshape(b, -1, 2, c, *rest)
    ways = x_bn2c[:, :, 0], jnp.flip(x_bn2c[:, :, 1], axis=2)
    x_cbP = jnp.moveaxis(jnp.stack(ways, axis=2), 3, 0).reshape(c, b, -1, *rest)
    with jax.named_scope(CONTEXT):
        x_cbP = wire.all_to_all(x_cbP, layout.context)
    return x_cbP.reshape(c * b, *x_cbP.shape[2:])[:rows]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(move: Any, dtype: Any, x_BT: jax.Array) -> jax.Array:
    return move(x_BT)


def _moved_forward(move: Any, dtype: Any, x_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return move(x_BT), jnp.zeros((0, *x_BT.shape[1:]), x_BT.dtype)


def _moved_backward(move: Any, dtype: Any, like: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    B = dy.shape[0]
    shape = jax.ShapeDtypeStruct((B, *like.shape[1:]), dtype)
    with jax.named_scope(CONTEXT):
        (dx_BT,) = jax.linear_transpose(move, shape)(dy.astype(dtype))
    return (dx_BT.astype(like.dtype),)


_moved.defvjp(_moved_forward, _moved_backward)


def _gather(layout: Layout, over_tensor: bool, x_BT: jax.Array) -> jax.Array:
    """Joins all positions in order; `wire.index` of the slow axes is the slower one."""
    slow, fast = layout.between_nodes(layout.context), layout.inside_node(layout.context)
    tensor = layout.tensor if over_tensor else ()
    x = x_BT[None, None, None]
    for dim, axes in enumerate((slow, fast, tensor)):
        x = wire.all_gather(x, axes, dim=dim, tag=None)
    # S F R B t -> c B T
    x_cBT = jnp.moveaxis(x, 2, 3)
    return _in_order(
        x_cBT.reshape(layout.size(layout.context), len(x_BT), -1, *x_BT.shape[2:]), layout.stripe
    )


def _in_order(x_cBT: jax.Array, stripe: int) -> jax.Array:
    """Joins the positions of c devices in their order."""
    c, B, _, *rest = x_cBT.shape
    x_cBn2s = x_cBT.reshape(c, B, -1, 2, stripe, *rest)
    there = jnp.moveaxis(x_cBn2s[:, :, :, 0], 0, 2)
    back = jnp.flip(jnp.moveaxis(x_cBn2s[:, :, :, 1], 0, 2), axis=2)
    return jnp.stack([there, back], axis=2).reshape(B, -1, *rest)


def _extend(before: int, layout: Layout, over_tensor: bool, x_BT: jax.Array) -> jax.Array:
    """Puts before each stripe the last keys of the stripe before it; zeros before the first."""
    x_BT = wire.all_gather(x_BT, layout.tensor if over_tensor else (), dim=1, tag=None)
    s, (B, _, *rest) = layout.stripe, x_BT.shape
    x_BPs = x_BT.reshape(B, -1, s, *rest)
    earlier = _stripe_before(x_BPs[:, :, s - before :], layout)
    return jnp.concatenate([earlier, x_BPs], axis=2).reshape(B, -1, *rest)


def _stripe_before(x_BP: jax.Array, layout: Layout) -> jax.Array:
    """Returns for each stripe of this device what the stripe before it has."""
    c, here = layout.size(layout.context), wire.index(layout.context)
    there, back = x_BP[:, ::2], x_BP[:, 1::2]
    # Two chains and not one cycle: see `comm.links`.
    up, down = [(i, i + 1) for i in range(c - 1)], [(i + 1, i) for i in range(c - 1)]
    before_there = wire.ppermute(there, layout.context, up)
    before_back = wire.ppermute(back, layout.context, down)
    # Where the deal turns, a device has two stripes side by side.
    turned = jnp.concatenate([jnp.zeros_like(back[:, :1]), back[:, :-1]], axis=1)
    before_there = jnp.where(here == 0, turned, before_there)
    before_back = jnp.where(here == c - 1, there, before_back)
    return jnp.stack([before_there, before_back], axis=2).reshape(x_BP.shape)
