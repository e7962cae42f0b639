"""RMSNorm, the dense MLP, and the token embedding with its output projection."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.activations import enter_tensor, leave_tensor
from moejax.comm.weights.adapters import AdaptedWeight, Weight, product, shape_of, transposed
from moejax.comm.weights.gather import gather_weight, replicated_weight
from moejax.config.schema import ModelConfig
from moejax.kernels.experts.activation import SWIGLU, Gate, activate
from moejax.kernels.kept import GATE_AND_UP
from moejax.layout.spec import StepSpec

MLPWeights = tuple[Weight, Weight]  # [D, U, F] and [F, D]


class RMSNorm(nnx.Module):
    """Scales to unit root mean square, in float32, then by a learned factor.

    Attributes:
      offset: what the factor is more than the stored scale, which begins at the rest of one.
      divisor: divides the result, before it is rounded.
    """

    def __init__(
        self, width: int, epsilon: float, dims: str = "D", offset: float = 0.0, divisor: float = 1.0
    ):
        self.epsilon, self.offset, self.divisor = epsilon, offset, divisor
        self.scale = nnx.Param(jnp.full((width,), 1 - offset, jnp.float32), dims=dims)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last dimension."""
        scale = replicated_weight(self.scale)
        y32 = normalised(x.astype(jnp.float32), self.epsilon)
        y32 = y32 * (self.offset + scale if self.offset else scale)
        return (y32 if self.divisor == 1 else y32 / self.divisor).astype(x.dtype)


def normalised(x: jax.Array, epsilon: float) -> jax.Array:
    """Returns x at unit root mean square of its last dimension; computed in float32."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (x32 * inverse).astype(x.dtype)


def model_norm(
    cfg: ModelConfig, width: int | None = None, dims: str = "D", divisor: float = 1.0
) -> RMSNorm:
    """Returns a norm of the model's form, of its width or another."""
    offset = 1.0 if cfg.zero_centered_norms else 0.0
    return RMSNorm(width or cfg.width, cfg.norm_epsilon, dims, offset, divisor)


class MLP(nnx.Module):
    """Dense MLP, with a gate or without, hidden width sharded over tensor."""

    def __init__(self, cfg: ModelConfig, hidden: int, spec: StepSpec, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.out_deviation)
        self.spec, self.gate = spec, Gate(cfg.activation, cfg.clamp)
        shape = (cfg.width, cfg.hidden_inputs, hidden)
        self.w_in = nnx.Param(normal(rngs.params(), shape, jnp.float32), dims="DUF")
        self.w_out = nnx.Param(out(rngs.params(), (hidden, cfg.width), jnp.float32), dims="FD")

    def weights(self) -> MLPWeights:
        """The weights as this device computes with them."""
        return gather_weight(self.w_in, self.spec), gather_weight(self.w_out, self.spec)

    def __call__(self, x_BtD: Float[Array, "B t D"], weights: MLPWeights) -> Float[Array, "B t D"]:
        """Takes and returns activations in the layout between blocks. Weights: `self.weights()`."""
        x_BTD = enter_tensor(x_BtD, self.spec.layout)
        w_in_DUF, w_out_FD = weights
        h_BTW = checkpoint_name(product(x_BTD, w_in_DUF), GATE_AND_UP)
        if self.gate == SWIGLU:
            F = h_BTW.shape[-1] // 2
            a_BTF = jax.nn.silu(h_BTW[..., :F]) * h_BTW[..., F:]
        else:
            a_BTF = activate(h_BTW, self.gate)
        return leave_tensor(product(a_BTF, w_out_FD), self.spec.layout)


class Embedding(nnx.Module):
    """Token embedding and output projection, vocabulary sharded over tensor."""

    def __init__(self, cfg: ModelConfig, spec: StepSpec, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        self.spec, self.scale = spec, cfg.embedding_scale
        self.table = nnx.Param(normal(rngs.params(), (cfg.vocab_size, cfg.width)), dims="VD")
        if not cfg.tie_embeddings:
            self.project = nnx.Param(normal(rngs.params(), (cfg.width, cfg.vocab_size)), dims="DV")
        self.tied = cfg.tie_embeddings

    def weights(self) -> tuple[Weight, Weight]:
        """This tensor rank's rows of the table [v, D], and its slice [D, v] of the projection.

        A tied table is gathered once, so that its gradient is reduced once.
        """
        table_vD = gather_weight(self.table, self.spec)
        if self.tied:
            return table_vD, transposed(table_vD)
        return table_vD, gather_weight(self.project, self.spec)

    def embed(self, token_BT: Int[Array, "B T"], table_vD: Weight) -> Float[Array, "B t D"]:
        """Looks tokens up: each tensor rank finds the rows it holds, and their sum has all rows."""
        layout, v = self.spec.layout, shape_of(table_vD)[0]
        if layout.size(layout.tensor) == 1:
            return scaled(rows_of(table_vD, token_BT), self.scale)
        local_BT = token_BT - wire.index(layout.tensor) * v
        here_BT = (local_BT >= 0) & (local_BT < v)
        x_BTD = scaled(rows_of(table_vD, jnp.where(here_BT, local_BT, 0)), self.scale)
        return leave_tensor(jnp.where(here_BT[..., None], x_BTD, 0), layout)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Returns x times a setting; x itself for a factor of one."""
    return x if factor == 1 else x * factor


def logits(
    x_ND: Float[Array, "N D"], w_Dv: Weight, cap: float | None = None
) -> Float[Array, "N v"]:
    """Returns logits by this tensor rank's slice of the projection, summed in float32.

    Args:
      cap: `model.logit_cap`.
    """
    if not isinstance(w_Dv, AdaptedWeight):
        return capped(jnp.dot(x_ND, w_Dv, preferred_element_type=jnp.float32), cap)
    a_DA, b_Av = w_Dv.adapter
    return capped(logits(x_ND, w_Dv.weight) + logits(x_ND @ a_DA, b_Av), cap)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns cap * tanh(x / cap); x itself for None. Source: Gemma 2 (2024)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rows_of(table_vD: Weight, token_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the rows of tokens; of an adapter, its rows times its other factor, added."""
    if not isinstance(table_vD, AdaptedWeight):
        return look_up(table_vD, token_BT)
    a_vA, b_AD = table_vD.adapter
    return look_up(table_vD.weight, token_BT) + look_up(a_vA, token_BT) @ b_AD


@jax.custom_vjp
def look_up(table_vD: Float[Array, "v D"], token_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns `x_BTD` with `x[b, t] = table[token[b, t]]`.

    A row's gradient is a sum over all positions that looked it up, many thousands for a frequent
    token: it is added up in float32 and rounded once. In bfloat16 a sum stops growing after some
    256 equal terms.
    """
    return jnp.take(table_vD, token_BT, axis=0)


def _look_up_forward(table_vD, token_BT):
    return look_up(table_vD, token_BT), (
        token_BT,
        jnp.zeros((table_vD.shape[0], 0), table_vD.dtype),
    )


def _look_up_backward(saved, gradient_BTD):
    token_BT, like_v0 = saved
    sum_vD = jnp.zeros((like_v0.shape[0], gradient_BTD.shape[-1]), jnp.float32)
    sum_vD = sum_vD.at[token_BT].add(gradient_BTD.astype(jnp.float32))
    return sum_vD.astype(like_v0.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)
