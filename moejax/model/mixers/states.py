"""What mixers share whose heads keep a state in place of keys and values.

Queries, keys and values go through a short convolution. Letters: G key heads of C channels, H value
heads of V channels; X and Y as in `kernels.chunks`; N slots of a cache.

Where devices share sequences, each stripe runs as a sequence of its own. It gets the last positions
of the stripe before it, for the convolution, and the state that all before it leave. To find these
states, stripes say what they do to a state (`kernels.chunks.Effect`), and each device chains the
effects of all stripes for its share of the heads. Letters: s positions of a stripe, P stripes of a
device, N of all; M heads of all sequences, m those of a device's share.
"""

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Bool, Float, Int
from moejax.comm import context, wire
from moejax.config.schema import ModelConfig
from moejax.kernels.chunks import Before, Effect, convolve, next_tail
from moejax.kernels.kept import ATTENDED, INVERSES
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec
from moejax.model.context import Rows
from moejax.model.mixers.attention import project_from_heads
from moejax.model.mixers.interface import CacheArray, CacheSize
from moejax.model.rope import Angles

STEPS = 1e-3, 0.1  # least and largest softplus of the bias of fading, at first


class Past(NamedTuple):
    """What a text's later positions need of earlier ones.

    Attributes:
      tails: projections of the last Y positions: queries, keys [B, Y, G, C], values [B, Y, H, V].
    """

    state_BHCV: Before
    tails: tuple[jax.Array, ...]


class StateMixer(nnx.Module):
    """A mixer with states, heads sharded over tensor; it has no window.

    Subclasses have settings `cfg`, a `spec`, a matrix `w_o` [H, V, D], and the methods that raise
    here.

    Attributes:
      state_products: products of a head's state and a vector at each position.
    """

    state_products: int
    cfg: ModelConfig
    spec: StepSpec
    w_o: nnx.Param

    @staticmethod
    def cache(cfg: ModelConfig, size: CacheSize, layout: Layout) -> tuple[CacheArray, ...]:
        """Returns what a cache holds of a block: states [N, H, C, V], and the tails of `Past`."""
        G, H = cfg.linear.key_heads, cfg.linear.value_heads
        C, V, Y = cfg.linear.key_width, cfg.linear.value_width, cfg.linear.convolution - 1
        # Of devices that share sequences each keeps the states of its own rows.
        rows, tensor = layout.token_axes, layout.tensor
        state = CacheArray((size.slots, H, C, V), "float32", (rows, tensor))
        shapes = [(size.slots, Y, *own) for own in ((G, C), (G, C), (H, V))]
        return state, *(CacheArray(shape, cfg.dtype, (rows, (), tensor)) for shape in shapes)

    @classmethod
    def flops(cls, cfg: ModelConfig, length: int, window: int | None) -> int:
        """Returns the FLOPs of a sequence forward, position by position; chunks take more."""
        G, H = cfg.linear.key_heads, cfg.linear.value_heads
        C, V, X = cfg.linear.key_width, cfg.linear.value_width, cfg.linear.convolution
        states = 2 * cls.state_products * H * C * V
        return length * (states + 2 * X * (2 * G * C + H * V))

    def __call__(
        self, x_BtD: Float[Array, "B t D"], segment_BS: Int[Array, "B S"], angles: Angles
    ) -> Float[Array, "B t D"]:
        """Takes and returns activations in the layout between blocks; positions do not rotate.

        Wire, over context: the last Y queries, keys and values of each stripe; and in float32 each
        stripe's effect on this rank's heads, and the states before it.
        """
        shared = self.spec.layout.context
        mix = jax.checkpoint(
            partial(self._mix_stripes if shared else self._mix_whole, segment_BS),
            policy=jax.checkpoint_policies.save_only_these_names(INVERSES, wire.TOKEN_WIRE),
        )
        y_BTHV = checkpoint_name(mix(self._project(x_BtD), self._small()), ATTENDED)
        return project_from_heads(y_BTHV, self.w_o, self.spec)

    def extend(
        self,
        x_1tD: Float[Array, "1 t D"],
        cache: tuple[jax.Array, ...],
        rows: Rows,
        angles: Angles,
    ) -> tuple[Float[Array, "1 t D"], tuple[jax.Array, ...]]:
        """Runs the new tokens of rows, which stand in x one row after the other.

        Args:
          cache: the arrays of `cache`.
        Returns:
          The result of `__call__`, and the cache with the states behind the tokens.
        """
        R, T = rows.count_R.shape[0], rows.length
        parts = self._project(x_1tD)
        projected = type(parts)(*(x[0].reshape(R, T, *x.shape[2:]) for x in parts))
        # A text that begins finds another's state in its slot.
        state_RHCV, q_RYGC, k_RYGC, v_RYHV = (
            jnp.where(rows.start_R.reshape(-1, 1, 1, 1) > 0, x if rows.every else x[rows.slot_R], 0)
            for x in cache
        )
        past = Past(state_RHCV, (q_RYGC, k_RYGC, v_RYHV))
        y_RTHV, state_RHCV = self._mix(projected, self._small(), None, past, rows.is_token_RT)
        pairs = zip(projected[:3], past.tails, strict=True)
        ends = (state_RHCV, *(next_tail(x, tail, rows.count_R) for x, tail in pairs))
        # Rows without a token leave their slots as they are.
        slot_R = jnp.arange(R) if rows.every else rows.slot_R
        place_R = jnp.where(rows.count_R > 0, slot_R, cache[0].shape[0])
        cache = tuple(x.at[place_R].set(y, mode="drop") for x, y in zip(cache, ends, strict=True))
        y_1MHV = y_RTHV.reshape(1, R * T, *y_RTHV.shape[2:])
        return project_from_heads(y_1MHV, self.w_o, self.spec), cache

    def _mix_whole(self, segment_BT: jax.Array, projected: Any, small: Any) -> jax.Array:
        return self._mix(projected, small, segment_BT)[0]

    def _mix_stripes(self, segment_BS: jax.Array, projected: Any, small: Any) -> jax.Array:
        """As `_mix_whole`, at this device's positions of sequences that devices share."""
        layout, (B, T) = self.spec.layout, projected[0].shape[:2]
        s, Y = layout.stripe, self.cfg.linear.convolution - 1

        def cut(x_BT: jax.Array) -> jax.Array:
            return x_BT.reshape(B * T // s, s, *x_BT.shape[2:])

        parts = type(projected)(*map(cut, projected))
        goes_on = _goes_on(segment_BS, max(Y, 1), layout)
        tails = _tails_before(parts[:3], goes_on[..., goes_on.shape[-1] - Y :], layout)
        before = partial(_states_before, goes_on_BP=goes_on[..., -1], layout=layout)
        y_RsHV, _ = self._mix(
            parts, small, cut(context.own(segment_BS, layout)), Past(before, tails)
        )
        return y_RsHV.reshape(B, T, *y_RsHV.shape[2:])

    def _project(self, x_BtD: jax.Array) -> Any:
        """Projects all positions to this rank's heads: a named tuple, queries, keys, values first.

        In the dtype of compute.
        """
        raise NotImplementedError

    def _small(self) -> Any:
        """Returns the parameters that are no matrices, of this rank's heads, in float32."""
        raise NotImplementedError

    def _mix(
        self,
        projected: Any,
        small: Any,
        segment_BT: jax.Array | None,
        past: Past | None = None,
        is_token_BT: jax.Array | None = None,
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H C V"]]:
        """Returns the gated results of this rank's heads, and the states behind them."""
        raise NotImplementedError


def convolved(
    projected: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...] | None,
    segment_BT: jax.Array | None,
    past: Past | None,
) -> list[jax.Array]:
    """Returns queries, keys and values behind their convolution and SiLU, in float32."""
    tails = (None,) * 3 if past is None else past.tails
    parts = zip(projected, weights, tails, strict=True)
    sums = [convolve(x, w, segment_BT, tail) for x, w, tail in parts]
    added = sums if biases is None else [x + b for x, b in zip(sums, biases, strict=True)]
    return [jax.nn.silu(x) for x in added]


def first_steps(rngs: nnx.Rngs, shape: tuple[int, ...]) -> jax.Array:
    """Returns biases whose softplus is uniform in its logarithm, between `STEPS`."""
    low, high = map(math.log, STEPS)
    first = jnp.exp(jax.random.uniform(rngs.params(), shape, minval=low, maxval=high))
    return jnp.log(jnp.expm1(first))


def _goes_on(
    segment_BS: Int[Array, "B S"], count: int, layout: Layout
) -> Bool[Array, "B P {count}"]:
    """Returns whether the last positions before each stripe are of its first one's document."""
    first_P = context.positions(segment_BS.shape[1], layout)[:: layout.stripe]
    place_PY = first_P[:, None] + jnp.arange(-count, 0)
    same_BPY = segment_BS[:, jnp.maximum(place_PY, 0)] == segment_BS[:, first_P, None]
    return same_BPY & (place_PY >= 0)


def _tails_before(
    parts: tuple[jax.Array, ...], goes_on_BPY: Bool[Array, "B P Y"], layout: Layout
) -> tuple[jax.Array, ...]:
    """Returns the Y positions before each stripe, [B P, Y, ...] as of `Past`.

    Wire: as many of each stripe; all arrays together.

    Args:
      parts: arrays [B P, s, ...] of stripes.
    """
    B, P, Y = goes_on_BPY.shape
    ends = [x[:, x.shape[1] - Y :] for x in parts]
    joined_BPYX = jnp.concatenate([x.reshape(B, P, Y, -1) for x in ends], axis=-1)
    joined_BPYX = context.stripe_before(joined_BPYX, layout)
    joined_BPYX = checkpoint_name(joined_BPYX, wire.TOKEN_WIRE)
    joined_BPYX = jnp.where(goes_on_BPY[..., None], joined_BPYX, 0)
    cuts = list(itertools.accumulate(math.prod(x.shape[2:]) for x in ends[:-1]))
    pairs = zip(jnp.split(joined_BPYX, cuts, axis=-1), ends, strict=True)
    return tuple(x.reshape(end.shape) for x, end in pairs)


def _states_before(
    effect: Effect, goes_on_BP: Bool[Array, "B P"], layout: Layout
) -> Float[Array, "R H C V"]:
    """Returns the states before each stripe of the R = B P on this device.

    Wire: the effects, and states back; (c - 1) / c of each. In backward as much.

    Args:
      effect: of each stripe, [B P, H, ...].
      goes_on_BP: whether its first document began before it.
    """
    (B, P), (_, H, C, V) = goes_on_BP.shape, effect.addend_CV.shape
    goes_on = goes_on_BP.reshape(-1, 1, 1, 1)
    effect = effect._replace(factor_CC=jnp.where(goes_on, effect.factor_CC, 0))
    by_head = [x.reshape(B, P, H, -1).swapaxes(1, 2).reshape(B * H, P, -1) for x in effect]
    joined_mNX = context.join_stripes(jnp.concatenate(by_head, axis=-1), layout)
    parts = jnp.split(joined_mNX, [by_head[0].shape[-1]], axis=-1)
    m, N, _ = joined_mNX.shape
    each = Effect(*(x.reshape(m, N, *y.shape[2:]) for x, y in zip(parts, effect, strict=True)))
    after_mNCV = lax.associative_scan(Effect.then, each, axis=1).addend_CV
    before_mNCV = jnp.pad(after_mNCV[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    own_MPX = context.split_stripes(before_mNCV.reshape(m, N, -1), B * H, layout)
    state_BPHX = own_MPX.reshape(B, H, P, -1).swapaxes(1, 2)
    return jnp.where(goes_on, state_BPHX.reshape(B * P, H, C, V), 0)
