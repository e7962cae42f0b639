"""Linear attention by the gated delta rule, with a short convolution and an output gate.

Queries, keys and values go through a convolution and SiLU; queries and keys are made of unit
length. A head's state fades and is corrected by `kernels.delta`; what is read is normalised and
gated. Sources: Yang, Kautz, Hatamizadeh, Gated Delta Networks (2024), with more heads of values
than of keys as in Qwen3-Next; Kimi Team, Kimi Linear (2025). Letters: G key heads of C channels, H
value heads of V channels; X as in `kernels.chunks`; Z a narrow layer.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float
from moejax.comm.activations import enter_tensor, enter_tensor_together
from moejax.comm.weights.adapters import product
from moejax.comm.weights.gather import gather_float32, gather_weight, replicated_weight
from moejax.config.schema import ModelConfig
from moejax.kernels.chunks import CHUNK
from moejax.kernels.delta import delta_step, gated_delta
from moejax.layout.spec import StepSpec
from moejax.model.mixers.attention import own_heads, project_to_heads
from moejax.model.mixers.states import Past, StateMixer, convolved, first_steps

Initializer = Callable[..., jax.Array]
UNIT_EPSILON = 1e-6  # of the length of queries and keys, in all published code


class Projected(NamedTuple):
    """Projections of the tokens, in the dtype of compute."""

    q_BTGC: jax.Array
    k_BTGC: jax.Array
    v_BTHV: jax.Array
    gate_BTHV: jax.Array
    beta_BTH: jax.Array  # before its sigmoid
    fade: jax.Array  # before its softplus, [B, T, H] or [B, T, H, C]


class Small(NamedTuple):
    """Parameters that are no matrices, of this tensor rank's heads, in float32."""

    q_GCX: jax.Array  # of the convolution
    k_GCX: jax.Array
    v_HVX: jax.Array
    log_rate: jax.Array  # [H] or [H, 1]
    fade_bias: jax.Array  # [H] or [H, C]
    scale_V: jax.Array  # of the norm


class GatedDeltaNet(StateMixer):
    """Linear attention by the gated delta rule, heads sharded over tensor; it has no window.

    Attributes:
      least_rate: least rate of fading, at first.
      opens: function of the output gate.
    """

    state_products = 3  # a state is read twice and written once
    least_rate = 0.01
    opens = staticmethod(jax.nn.silu)

    def __init__(self, cfg: ModelConfig, window: int | None, spec: StepSpec, rngs: nnx.Rngs):
        D, G, H = cfg.width, cfg.linear.key_heads, cfg.linear.value_heads
        C, V, X = cfg.linear.key_width, cfg.linear.value_width, cfg.linear.convolution
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.out_deviation)
        self.cfg, self.spec = cfg, spec
        self.w_q = nnx.Param(normal(rngs.params(), (D, G, C)), dims="DGC")
        self.w_k = nnx.Param(normal(rngs.params(), (D, G, C)), dims="DGC")
        self.w_v = nnx.Param(normal(rngs.params(), (D, H, V)), dims="DHC")
        self._add_gates(normal, rngs)
        self.w_o = nnx.Param(out(rngs.params(), (H, V, D)), dims="HCD")
        near = partial(jax.random.uniform, minval=-(X**-0.5), maxval=X**-0.5)
        self.convolve_q = nnx.Param(near(rngs.params(), (G, C, X)), dims="GCX")
        self.convolve_k = nnx.Param(near(rngs.params(), (G, C, X)), dims="GCX")
        self.convolve_v = nnx.Param(near(rngs.params(), (H, V, X)), dims="HCX")
        # A position fades by rate * softplus(bias), at first between 1e-3 and 0.1 times the rate;
        # both as in the authors' code, and in Mamba-2 (Dao, Gu 2024).
        drawn_H = jax.random.uniform(rngs.params(), (H,), minval=self.least_rate, maxval=16.0)
        self.log_rate = nnx.Param(jnp.log(drawn_H), dims="H")
        shape, dims = self._of_fading()
        self.fade_bias = nnx.Param(first_steps(rngs, shape), dims=dims)
        self.scale = nnx.Param(jnp.ones((V,), jnp.float32), dims="C")

    def _add_gates(self, normal: Initializer, rngs: nnx.Rngs) -> None:
        """Adds the weights of the output gate, of beta and of fading."""
        D, H, V = self.cfg.width, self.cfg.linear.value_heads, self.cfg.linear.value_width
        self.w_gate = nnx.Param(normal(rngs.params(), (D, H, V)), dims="DHC")
        self.w_beta = nnx.Param(normal(rngs.params(), (D, H)), dims="DH")
        self.w_fade = nnx.Param(normal(rngs.params(), (D, H)), dims="DH")

    def _of_fading(self) -> tuple[tuple[int, ...], str]:
        """Returns the shape and the letters of a position's fading."""
        return (self.cfg.linear.value_heads,), "H"

    @staticmethod
    def channels(cfg: ModelConfig) -> int:
        """Returns the channels of projections, twice those of the convolution, and of inverses."""
        G, H = cfg.linear.key_heads, cfg.linear.value_heads
        C, V = cfg.linear.key_width, cfg.linear.value_width
        return 2 * (2 * G * C + H * V) + 2 * H * V + H * CHUNK

    def _project(self, x_BtD: jax.Array) -> Projected:
        """Projects all positions to this rank's heads."""
        x_BTD = enter_tensor(x_BtD, self.spec.layout)
        of_channels = (self.w_q, self.w_k, self.w_v, self.w_gate)
        of_heads = (self.w_beta, self.w_fade)
        projected = [project_to_heads(x_BTD, w, self.spec) for w in of_channels]
        projected += [product(x_BTD, gather_weight(w, self.spec)) for w in of_heads]
        return Projected._make(projected)

    def _small(self) -> Small:
        q_GCX, k_GCX, v_HVX = (
            gather_float32(w, self.spec)
            for w in (self.convolve_q, self.convolve_k, self.convolve_v)
        )
        return Small(q_GCX, k_GCX, v_HVX, *self._rates(), replicated_weight(self.scale))

    def _rates(self) -> tuple[jax.Array, jax.Array]:
        """Returns `Small.log_rate` and `Small.fade_bias`."""
        layout = self.spec.layout
        return own_heads(self.log_rate, layout), own_heads(self.fade_bias, layout)

    def _mix(
        self,
        projected: Projected,
        small: Small,
        segment_BT: jax.Array | None,
        past: Past | None = None,
        is_token_BT: jax.Array | None = None,
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H C V"]]:
        """Returns the gated results of this rank's heads, and the states behind them."""
        dtype = projected.q_BTGC.dtype
        taken = projected[:3], small[:3], None
        q_BTGC, k_BTGC, v_BTHV = convolved(*taken, segment_BT, past)
        q_BTGC = _unit(q_BTGC) / math.sqrt(self.cfg.linear.key_width)
        q_BTGC, k_BTGC, v_BTHV = (x.astype(dtype) for x in (q_BTGC, _unit(k_BTGC), v_BTHV))
        beta_BTH = jax.nn.sigmoid(projected.beta_BTH.astype(jnp.float32))
        speed = jax.nn.softplus(projected.fade.astype(jnp.float32) + small.fade_bias)
        g = -jnp.exp(small.log_rate) * speed
        if is_token_BT is not None:
            is_token_BT1 = is_token_BT[..., None]
            beta_BTH = jnp.where(is_token_BT1, beta_BTH, 0)
            g = jnp.where(is_token_BT1 if g.ndim == 3 else is_token_BT1[..., None], g, 0)
        operands = (q_BTGC, k_BTGC, v_BTHV, g, beta_BTH)
        state = None if past is None else past.state_BHCV
        if isinstance(state, jax.Array) and q_BTGC.shape[1] == 1:
            y_BHV, state_BHCV = delta_step(*(x[:, 0] for x in operands), state_BHCV=state)
            y_BTHV = y_BHV[:, None]
        else:
            y_BTHV, state_BHCV = gated_delta(*operands, segment_BT, state)
        mean_BTH1 = jnp.mean(y_BTHV * y_BTHV, axis=-1, keepdims=True)
        y_BTHV *= jax.lax.rsqrt(mean_BTH1 + self.cfg.norm_epsilon) * small.scale_V
        y_BTHV *= self.opens(projected.gate_BTHV.astype(jnp.float32))
        return y_BTHV.astype(dtype), state_BHCV


class KimiDelta(GatedDeltaNet):
    """Linear attention whose channels of keys fade apart, with as many heads of keys as of values.

    Fading and the output gate come from narrow layers, of a value head's channels.
    """

    least_rate = 1.0
    opens = staticmethod(jax.nn.sigmoid)

    def _add_gates(self, normal: Initializer, rngs: nnx.Rngs) -> None:
        D, H, Z = self.cfg.width, self.cfg.linear.value_heads, self.cfg.linear.value_width
        self.w_beta = nnx.Param(normal(rngs.params(), (D, H)), dims="DH")
        self.w_fade_down = nnx.Param(normal(rngs.params(), (D, Z)), dims="DZ")
        self.w_fade_up = nnx.Param(
            normal(rngs.params(), (Z, H, self.cfg.linear.key_width)), dims="ZHC"
        )
        self.w_gate_down = nnx.Param(normal(rngs.params(), (D, Z)), dims="DZ")
        self.w_gate_up = nnx.Param(normal(rngs.params(), (Z, H, Z)), dims="ZHC")

    def _of_fading(self) -> tuple[tuple[int, ...], str]:
        return (self.cfg.linear.key_heads, self.cfg.linear.key_width), "HC"

    @staticmethod
    def channels(cfg: ModelConfig) -> int:
        """As of `GatedDeltaNet`, with logarithms of fading and their sums."""
        return GatedDeltaNet.channels(cfg) + 3 * cfg.linear.key_heads * cfg.linear.key_width

    def _project(self, x_BtD: jax.Array) -> Projected:
        spec = self.spec
        narrow = (
            product(x_BtD, gather_weight(w, spec)) for w in (self.w_fade_down, self.w_gate_down)
        )
        parts = enter_tensor_together((x_BtD, *narrow), spec.layout)
        x_BTD, fade_BTZ, gate_BTZ = parts
        qkv = (project_to_heads(x_BTD, w, spec) for w in (self.w_q, self.w_k, self.w_v))
        return Projected(
            *qkv,
            gate_BTHV=project_to_heads(gate_BTZ, self.w_gate_up, spec),
            beta_BTH=product(x_BTD, gather_weight(self.w_beta, spec)),
            fade=project_to_heads(fade_BTZ, self.w_fade_up, spec),
        )

    def _rates(self) -> tuple[jax.Array, jax.Array]:
        log_rate_H = own_heads(self.log_rate, self.spec.layout)
        return log_rate_H[:, None], gather_float32(self.fade_bias, self.spec)


def _unit(x_BTGC: jax.Array) -> jax.Array:
    squares_BTG1 = jnp.sum(x_BTGC * x_BTGC, axis=-1, keepdims=True)
    return x_BTGC * jax.lax.rsqrt(squares_BTG1 + UNIT_EPSILON)
