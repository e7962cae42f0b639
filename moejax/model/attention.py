"""Grouped-query attention: causal, inside each document, heads sharded over tensor."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.activations import enter_tensor, leave_tensor
from moejax.comm.weights.gather import gather_weight
from moejax.config.schema import ModelConfig
from moejax.kernels.attention import attention
from moejax.layout.spec import StepSpec
from moejax.model.layers import RMSNorm
from moejax.model.rope import rotate

Angles = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Attention with rotary positions and optional biases and QK-norm."""

    def __init__(self, cfg: ModelConfig, spec: StepSpec, rngs: nnx.Rngs):
        D, H, G, C = cfg.width, cfg.num_heads, cfg.num_kv_heads, cfg.head_width
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.init_deviation / math.sqrt(2 * cfg.num_layers))
        self.cfg, self.spec = cfg, spec
        self.w_q = nnx.Param(normal(rngs.params(), (D, H, C)), dims="DHC")
        self.w_k = nnx.Param(normal(rngs.params(), (D, G, C)), dims="DGC")
        self.w_v = nnx.Param(normal(rngs.params(), (D, G, C)), dims="DGC")
        self.w_o = nnx.Param(out(rngs.params(), (H, C, D)), dims="HCD")
        if cfg.attention_bias:
            self.b_q = nnx.Param(jnp.zeros((H, C)), dims="HC")
            self.b_k = nnx.Param(jnp.zeros((G, C)), dims="GC")
            self.b_v = nnx.Param(jnp.zeros((G, C)), dims="GC")
        if cfg.qk_norm == "head":
            self.q_norm = RMSNorm(C, cfg.norm_epsilon, dims="C")
            self.k_norm = RMSNorm(C, cfg.norm_epsilon, dims="C")
        elif cfg.qk_norm == "full":
            self.q_norm = FullNorm((H, C), cfg.norm_epsilon, "HC", spec)
            self.k_norm = FullNorm((G, C), cfg.norm_epsilon, "GC", spec)

    def __call__(
        self, x_BtD: Float[Array, "B t D"], segment_BT: Int[Array, "B T"], angles: Angles
    ) -> Float[Array, "B t D"]:
        """Takes and returns activations in the layout between blocks."""
        x_BTD = enter_tensor(x_BtD, self.spec.layout)
        q_BTHC = self._project(x_BTD, self.w_q)
        k_BSGC = self._project(x_BTD, self.w_k)
        v_BSGC = self._project(x_BTD, self.w_v)
        if self.cfg.attention_bias:
            q_BTHC = self._biased(q_BTHC, self.b_q)
            k_BSGC = self._biased(k_BSGC, self.b_k)
            v_BSGC = self._biased(v_BSGC, self.b_v)
        if self.cfg.qk_norm != "none":
            q_BTHC, k_BSGC = self.q_norm(q_BTHC), self.k_norm(k_BSGC)
        q_BTHC, k_BSGC = rotate(q_BTHC, angles), rotate(k_BSGC, angles)
        y_BTHC = attention(
            q_BTHC,
            k_BSGC,
            v_BSGC,
            segment_BT,
            window=self.cfg.sliding_window,
            implementation=self.spec.attention,
        )
        w_o_HCD = gather_weight(self.w_o, self.spec)
        B, T, H, C = y_BTHC.shape
        y_BTD = y_BTHC.reshape(B, T, H * C) @ w_o_HCD.reshape(H * C, -1)
        return leave_tensor(y_BTD, self.spec.layout)

    def _project(self, x_BTD: jax.Array, w: nnx.Param) -> jax.Array:
        """Projects to query heads, or to key or value heads (G for H)."""
        w_DHC = gather_weight(w, self.spec)
        D, H, C = w_DHC.shape
        return (x_BTD @ w_DHC.reshape(D, H * C)).reshape(*x_BTD.shape[:2], H, C)

    def _biased(self, x_BTHC: jax.Array, b: nnx.Param) -> jax.Array:
        """Adds a bias in float32, so that its gradient is a sum over tokens in float32 too.

        Biases are not gathered, so float32 costs nothing on the wire.
        """
        return (x_BTHC + gather_weight(b, self.spec, "float32")).astype(x_BTHC.dtype)


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
        scale_HC = gather_weight(self.scale, self.spec, "float32")
        return (x32 * inverse_BT11 * scale_HC).astype(x_BTHC.dtype)
