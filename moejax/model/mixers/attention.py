"""Grouped-query attention: causal, inside each document, heads sharded over tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.activations import enter_tensor, leave_tensor
from moejax.comm.weights.adapters import product, shape_of
from moejax.comm.weights.gather import gather_float32, gather_weight, replicated_weight
from moejax.config.schema import ModelConfig
from moejax.kernels.costs import causal_pairs
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec
from moejax.model import context
from moejax.model.layers import model_norm, normalised, scaled
from moejax.model.mixers.interface import CacheArray, CacheSize
from moejax.model.rope import Angles, rotate, scale_of_scores


class Attention(nnx.Module):
    """Attention with rotary positions and optional biases, sinks, QK-norm and output gate.

    Takes settings as its block has them (`config.pattern.settings_of`).

    Attributes:
      window: positions that a query sees back, itself included; None: all.
    """

    def __init__(self, cfg: ModelConfig, window: int | None, spec: StepSpec, rngs: nnx.Rngs):
        D, H, G = cfg.width, cfg.num_heads, cfg.num_kv_heads
        C, V = cfg.head_width, cfg.value_channels
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.out_deviation)
        self.cfg, self.window, self.spec = cfg, window, spec
        self.w_q = nnx.Param(normal(rngs.params(), (D, H, C)), dims="DHC")
        self.w_k = nnx.Param(normal(rngs.params(), (D, G, C)), dims="DGC")
        self.has_values = not cfg.full_attention.keys_are_values
        if self.has_values:
            self.w_v = nnx.Param(normal(rngs.params(), (D, G, V)), dims="DGC")
        self.w_o = nnx.Param(out(rngs.params(), (H, V, D)), dims="HCD")
        if cfg.attention_gate:
            self.w_gate = nnx.Param(normal(rngs.params(), (D, H, V)), dims="DHC")
        if cfg.attention_bias:
            self.b_q = nnx.Param(jnp.zeros((H, C)), dims="HC")
            self.b_k = nnx.Param(jnp.zeros((G, C)), dims="GC")
            if self.has_values:
                self.b_v = nnx.Param(jnp.zeros((G, V)), dims="GC")
        if cfg.attention_output_bias:
            self.b_o = nnx.Param(jnp.zeros((D,)), dims="D")
        if cfg.attention_sinks:
            self.sinks = nnx.Param(normal(rngs.params(), (H,)), dims="H")
        if cfg.qk_norm in ("head", "rotated"):
            self.q_norm, self.k_norm = (model_norm(cfg, C, dims="C") for _ in range(2))
        elif cfg.qk_norm == "full":
            self.q_norm = FullNorm((H, C), cfg.norm_epsilon, "HC", spec)
            self.k_norm = FullNorm((G, C), cfg.norm_epsilon, "GC", spec)

    @staticmethod
    def cache(cfg: ModelConfig, size: CacheSize, layout: Layout) -> tuple[CacheArray, ...]:
        """Returns what a cache holds of a block: keys [N, G, S, C] and values [N, G, S, V]."""
        shape = size.slots, cfg.num_kv_heads, size.positions
        axes = layout.row_axes, layout.tensor, layout.context
        widths = cfg.head_width, cfg.value_channels
        return tuple(CacheArray((*shape, width), cfg.dtype, axes) for width in widths)

    @staticmethod
    def flops(cfg: ModelConfig, length: int, window: int | None) -> int:
        """Returns the FLOPs of scores and means of a sequence, forward."""
        channels = cfg.num_heads * (cfg.head_width + cfg.value_channels)
        return 2 * channels * causal_pairs(length, window)

    @staticmethod
    def channels(cfg: ModelConfig) -> int:
        """Returns the channels of queries, keys, values and results."""
        return 2 * cfg.num_heads * (cfg.head_width + cfg.value_channels)

    def __call__(
        self, x_BtD: Float[Array, "B t D"], segment_BS: Int[Array, "B S"], angles: Angles
    ) -> Float[Array, "B t D"]:
        """Takes and returns activations in the layout between blocks."""
        attend = partial(context.attend, segment=segment_BS, spec=self.spec)
        return self._attend(x_BtD, angles, attend)[0]

    def keys(self, x_BtD: Float[Array, "B t D"], angles: Angles) -> tuple[jax.Array, ...]:
        """Returns the keys [B, T, G, C] and values [B, T, G, V] of these positions."""
        return self._project(x_BtD, angles)[1:3]

    def in_slice(
        self, x_BtD: Float[Array, "B t D"], angles: Angles, attend: Callable[..., jax.Array]
    ) -> tuple[Float[Array, "B t D"], tuple[jax.Array, ...]]:
        """As `__call__`, for a part of the positions of the sequences.

        Args:
          angles: angles of these positions.
          attend: attention of queries, keys and values, with cached ones bound.
        Returns:
          The result of `__call__`, and the keys and values of these positions.
        """
        attend = partial(attend, implementation=self.spec.sliced_attention)
        return self._attend(x_BtD, angles, attend)

    def _attend(self, x_BtD: jax.Array, angles: Angles, attend: Callable[..., jax.Array]) -> Any:
        q_BTHC, k_BSGC, v_BSGC, gate_BTHC = self._project(x_BtD, angles)
        y_BTHC = attend(q_BTHC, k_BSGC, v_BSGC, **self._form())
        return self._leave(y_BTHC, gate_BTHC), (k_BSGC, v_BSGC)

    def extend(
        self,
        x_1tD: Float[Array, "1 t D"],
        cache: tuple[jax.Array, ...],
        rows: context.Rows,
        angles: Angles,
    ) -> tuple[Float[Array, "1 t D"], tuple[jax.Array, ...]]:
        """Attends from the new tokens of rows, which stand in x one row after the other.

        Args:
          cache: keys [N, G, S, C] and values [N, G, S, V].
          angles: angles of the tokens' positions.
        Returns:
          The result of `__call__`, and the cache with the tokens' own keys and values.
        """
        T, layout = rows.length, self.spec.layout
        *projected, gate_1MHC = self._project(x_1tD, angles)
        q_RTHC, k_RTGC, v_RTGC = (x[0].reshape(-1, T, *x.shape[2:]) for x in projected)
        k_NGSC, v_NGSC = context.put_own(cache, (k_RTGC, v_RTGC), rows, layout)
        y_RTHC = context.attend_cached(q_RTHC, k_NGSC, v_NGSC, rows, layout, **self._form())
        y_1MHC = y_RTHC.reshape(1, -1, *y_RTHC.shape[2:])
        return self._leave(y_1MHC, gate_1MHC), (k_NGSC, v_NGSC)

    def _project(
        self, x_BtD: jax.Array, angles: Angles
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Queries, keys, values and gates of this rank's heads at all positions, rotated."""
        x_BTD = enter_tensor(x_BtD, self.spec.layout)
        q_BTHC = project_to_heads(x_BTD, self.w_q, self.spec)
        k_BSGC = project_to_heads(x_BTD, self.w_k, self.spec)
        if self.cfg.attention_bias:
            q_BTHC = self._biased(q_BTHC, self.b_q)
            k_BSGC = self._biased(k_BSGC, self.b_k)
        v_BSGC = self._values(x_BTD) if self.has_values else k_BSGC
        if self.cfg.value_norm:
            v_BSGC = normalised(v_BSGC, self.cfg.norm_epsilon)
        v_BSGC = scaled(v_BSGC, self.cfg.value_scale)
        if self.cfg.qk_norm in ("head", "full"):
            q_BTHC, k_BSGC = self.q_norm(q_BTHC), self.k_norm(k_BSGC)
        turns = angles.of(self.window)
        q_BTHC, k_BSGC = rotate(q_BTHC, turns), rotate(k_BSGC, turns)
        if self.cfg.qk_norm == "rotated":
            q_BTHC, k_BSGC = self.q_norm(q_BTHC), self.k_norm(k_BSGC)
        q_BTHC = angles.grown(q_BTHC)
        gated = self.cfg.attention_gate
        gate_BTHC = project_to_heads(x_BTD, self.w_gate, self.spec) if gated else None
        return q_BTHC, k_BSGC, v_BSGC, gate_BTHC

    def _values(self, x_BTD: jax.Array) -> jax.Array:
        v_BSGC = project_to_heads(x_BTD, self.w_v, self.spec)
        return self._biased(v_BSGC, self.b_v) if self.cfg.attention_bias else v_BSGC

    def _form(self) -> dict[str, Any]:
        """Returns the arguments of attention besides queries, keys and values."""
        has_sinks = self.cfg.attention_sinks
        return {
            "window": self.window,
            "scale": scale_of_scores(self.cfg),
            "sinks_H": own_heads(self.sinks, self.spec.layout) if has_sinks else None,
        }

    def _leave(self, y_BTHC: jax.Array, gate_BTHC: jax.Array | None) -> jax.Array:
        """Projects the heads to the width, in the layout between blocks; gates them before."""
        if gate_BTHC is not None:
            open_BTHC = jax.nn.sigmoid(gate_BTHC.astype(jnp.float32))
            y_BTHC = (y_BTHC * open_BTHC).astype(y_BTHC.dtype)
        y_BtD = project_from_heads(y_BTHC, self.w_o, self.spec)
        if not self.cfg.attention_output_bias:
            return y_BtD
        # In float32, as other biases; once, to the sum over tensor.
        return (y_BtD + replicated_weight(self.b_o)).astype(y_BtD.dtype)

    def _biased(self, x_BTHC: jax.Array, b: nnx.Param) -> jax.Array:
        """Adds a bias in float32, so that its gradient is a sum over tokens in float32 too.

        Biases are not gathered, so float32 costs nothing on the wire.
        """
        return (x_BTHC + gather_float32(b, self.spec)).astype(x_BTHC.dtype)


def own_heads(param: nnx.Param, layout: Layout) -> Float[Array, " H"]:
    """Returns the numbers of this tensor rank's heads. Every device holds all, as of a norm."""
    all_H = replicated_weight(param)
    heads = all_H.shape[0] // layout.size(layout.tensor)
    if heads == all_H.shape[0]:
        return all_H
    return jax.lax.dynamic_slice_in_dim(all_H, wire.index(layout.tensor) * heads, heads)


def project_to_heads(
    x_BTD: Float[Array, "B T D"], w: nnx.Param, spec: StepSpec
) -> Float[Array, "B T H C"]:
    """Projects to this tensor rank's heads, of queries, or of keys or values (G for H)."""
    w_DHC = gather_weight(w, spec)
    return product(x_BTD, w_DHC).reshape(*x_BTD.shape[:2], *shape_of(w_DHC)[1:])


def project_from_heads(
    y_BTHC: Float[Array, "B T H C"], w: nnx.Param, spec: StepSpec
) -> Float[Array, "B t D"]:
    """Projects the heads to the width, sums over tensor, and returns the layout between blocks."""
    B, T, H, C = y_BTHC.shape
    y_BTD = product(y_BTHC.reshape(B, T, H * C), gather_weight(w, spec))
    return leave_tensor(y_BTD, spec.layout)


class FullNorm(nnx.Module):
    """RMSNorm over all heads together (OLMoE), heads sharded over tensor."""

    def __init__(self, shape: tuple[int, int], epsilon: float, dims: str, spec: StepSpec):
        self.epsilon, self.spec, self.width = epsilon, spec, shape[0] * shape[1]
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32), dims=dims)

    def __call__(self, x_BTHC: Float[Array, "B T H C"]) -> Float[Array, "B T H C"]:
        """Wire: one float32 per position, summed over tensor."""
        x32 = x_BTHC.astype(jnp.float32)
        squares_BT11 = jnp.sum(x32 * x32, axis=(-2, -1), keepdims=True)
        squares_BT11 = wire.all_reduce(squares_BT11, self.spec.layout.tensor)
        inverse_BT11 = jax.lax.rsqrt(squares_BT11 / self.width + self.epsilon)
        scale_HC = gather_float32(self.scale, self.spec)
        return (x32 * inverse_BT11 * scale_HC).astype(x_BTHC.dtype)
