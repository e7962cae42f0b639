"""Mamba-2: states that fade by a time step of each position, behind a short convolution.

Queries, keys and values (C, B and x in the paper) go through a convolution and SiLU. A value is
written times the position's time step, by which the head's state fades too (`kernels.state_space`);
what is read, and a share of the value itself, is gated and then normalised over a group: the heads
that have a key head in common. Source: Dao, Gu, Transformers are SSMs (2024); NVIDIA, Nemotron-H
(2025). Letters: G groups (key heads) of C channels, H heads of V channels; X as in
`kernels.chunks`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float
from moejax.comm.activations import enter_tensor
from moejax.comm.weights.adapters import product
from moejax.comm.weights.gather import gather_float32, gather_weight
from moejax.config.schema import ModelConfig
from moejax.kernels.state_space import state_space, state_space_step
from moejax.layout.spec import StepSpec
from moejax.model.layers import normalised
from moejax.model.mixers.attention import own_heads, project_to_heads
from moejax.model.mixers.states import Past, StateMixer, convolved, first_steps

RATES = 1.0, 16.0  # least and largest rate of fading, at first


class Projected(NamedTuple):
    """Projections of the tokens, in the dtype of compute."""

    q_BTGC: jax.Array
    k_BTGC: jax.Array
    v_BTHV: jax.Array
    gate_BTHV: jax.Array
    step_BTH: jax.Array  # before its softplus


class Small(NamedTuple):
    """Parameters that are no matrices, of this tensor rank's heads, in float32."""

    weights: tuple[jax.Array, ...]  # of the convolution: [G, C, X] twice, [H, V, X]
    biases: tuple[jax.Array, ...] | None  # [G, C] twice, [H, V]
    log_rate_H: jax.Array
    step_bias_H: jax.Array
    skip_H: jax.Array
    scale_HV: jax.Array  # of the norm


class Mamba2(StateMixer):
    """Mamba-2 with any number of groups, which are sharded over tensor."""

    state_products = 2  # a state is read once and written once

    def __init__(self, cfg: ModelConfig, window: int | None, spec: StepSpec, rngs: nnx.Rngs):
        D, G, H = cfg.width, cfg.linear.key_heads, cfg.linear.value_heads
        C, V, X = cfg.linear.key_width, cfg.linear.value_width, cfg.linear.convolution
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.out_deviation)
        near = partial(jax.random.uniform, minval=-(X**-0.5), maxval=X**-0.5)
        self.cfg, self.spec = cfg, spec
        self.w_q = nnx.Param(normal(rngs.params(), (D, G, C)), dims="DGC")
        self.w_k = nnx.Param(normal(rngs.params(), (D, G, C)), dims="DGC")
        self.w_v = nnx.Param(normal(rngs.params(), (D, H, V)), dims="DHC")
        self.w_gate = nnx.Param(normal(rngs.params(), (D, H, V)), dims="DHC")
        self.w_step = nnx.Param(normal(rngs.params(), (D, H)), dims="DH")
        self.w_o = nnx.Param(out(rngs.params(), (H, V, D)), dims="HCD")
        self.convolve_q = nnx.Param(near(rngs.params(), (G, C, X)), dims="GCX")
        self.convolve_k = nnx.Param(near(rngs.params(), (G, C, X)), dims="GCX")
        self.convolve_v = nnx.Param(near(rngs.params(), (H, V, X)), dims="HCX")
        if cfg.linear.convolution_bias:
            self.bias_q = nnx.Param(near(rngs.params(), (G, C)), dims="GC")
            self.bias_k = nnx.Param(near(rngs.params(), (G, C)), dims="GC")
            self.bias_v = nnx.Param(near(rngs.params(), (H, V)), dims="HC")
        low, high = RATES
        drawn_H = jax.random.uniform(rngs.params(), (H,), minval=low, maxval=high)
        self.log_rate = nnx.Param(jnp.log(drawn_H), dims="H")
        self.step_bias = nnx.Param(first_steps(rngs, (H,)), dims="H")
        self.skip = nnx.Param(jnp.ones((H,), jnp.float32), dims="H")
        self.scale = nnx.Param(jnp.ones((H, V), jnp.float32), dims="HC")

    @staticmethod
    def channels(cfg: ModelConfig) -> int:
        """Returns the channels of projections, twice those of the convolution, and of results."""
        G, H = cfg.linear.key_heads, cfg.linear.value_heads
        C, V = cfg.linear.key_width, cfg.linear.value_width
        return 2 * (2 * G * C + H * V) + 2 * H * V

    def _project(self, x_BtD: jax.Array) -> Projected:
        x_BTD = enter_tensor(x_BtD, self.spec.layout)
        of_channels = (self.w_q, self.w_k, self.w_v, self.w_gate)
        projected = [project_to_heads(x_BTD, w, self.spec) for w in of_channels]
        projected.append(product(x_BTD, gather_weight(self.w_step, self.spec)))
        return Projected._make(projected)

    def _small(self) -> Small:
        spec, biases = self.spec, None
        taps = (self.convolve_q, self.convolve_k, self.convolve_v)
        if self.cfg.linear.convolution_bias:
            own = (self.bias_q, self.bias_k, self.bias_v)
            biases = tuple(gather_float32(b, spec) for b in own)
        return Small(
            tuple(gather_float32(w, spec) for w in taps),
            biases,
            log_rate_H=own_heads(self.log_rate, spec.layout),
            step_bias_H=own_heads(self.step_bias, spec.layout),
            skip_H=own_heads(self.skip, spec.layout),
            scale_HV=gather_float32(self.scale, spec),
        )

    def _mix(
        self,
        projected: Projected,
        small: Small,
        segment_BT: jax.Array | None,
        past: Past | None = None,
        is_token_BT: jax.Array | None = None,
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H C V"]]:
        dtype = projected.v_BTHV.dtype
        taken = projected[:3], small.weights, small.biases
        q_BTGC, k_BTGC, v_BTHV = convolved(*taken, segment_BT, past)
        step_BTH = jax.nn.softplus(projected.step_BTH.astype(jnp.float32) + small.step_bias_H)
        step_BTH = jnp.maximum(step_BTH, self.cfg.linear.least_step)
        if is_token_BT is not None:
            step_BTH = jnp.where(is_token_BT[..., None], step_BTH, 0)
        written_BTHV = (v_BTHV * step_BTH[..., None]).astype(dtype)
        g_BTH = -jnp.exp(small.log_rate_H) * step_BTH
        operands = (q_BTGC.astype(dtype), k_BTGC.astype(dtype), written_BTHV, g_BTH)
        state = None if past is None else past.state_BHCV
        if isinstance(state, jax.Array) and q_BTGC.shape[1] == 1:
            now = (x[:, 0] for x in operands)
            y_BHV, state_BHCV = state_space_step(*now, state_BHCV=state)
            y_BTHV = y_BHV[:, None]
        else:
            y_BTHV, state_BHCV = state_space(*operands, segment_BT, state)
        y_BTHV += small.skip_H[:, None] * v_BTHV
        y_BTHV *= jax.nn.silu(projected.gate_BTHV.astype(jnp.float32))
        by_group = (*y_BTHV.shape[:2], q_BTGC.shape[2], -1)
        normed = normalised(y_BTHV.reshape(by_group), self.cfg.norm_epsilon)
        return (normed.reshape(y_BTHV.shape) * small.scale_HV).astype(dtype), state_BHCV
