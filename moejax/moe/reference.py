"""The reference expert layer: dense, on one device, with no sort and no communication.

Every mesh, route, chunk count and kernel must agree with it within a derived tolerance.

Letters: N tokens, D width, E experts, U gate and up (2), F hidden width, X values of a row.
"""

import jax
import jax.numpy as jnp

from moejax.annotations import Array, Float
from moejax.config.schema import RouterConfig


def moe_reference(
    x_ND: Float[Array, "N D"],
    w_router_DE: Float[Array, "D E"],
    bias_E: Float[Array, " E"],
    w_in_EDUF: Float[Array, "E D 2 F"],
    w_out_EFD: Float[Array, "E F D"],
    cfg: RouterConfig,
    *,
    k: int,
    biases: tuple[jax.Array, jax.Array] | None = None,
    router_bias_E: Float[Array, " E"] | None = None,
    limit: float | None = None,
    router_x_ND: Float[Array, "N D"] | None = None,
) -> tuple[Float[Array, "N D"], Float[Array, "N E"]]:
    """Returns the layer's output and the dense routing weights (zero where not chosen).

    Args:
      bias_E: selection bias, which moves the choice alone.
      biases: b_in_EUF and b_out_ED of the experts' products.
      router_bias_E: added to the logits.
      limit: limit of clamped SwiGLU; None for SwiGLU.
      router_x_ND: the router's input, where it has jitter; None for `x_ND`.
    """
    logit_NE = (x_ND if router_x_ND is None else router_x_ND).astype(jnp.float32) @ w_router_DE
    if router_bias_E is not None:
        logit_NE = logit_NE + router_bias_E
    if cfg.score == "softmax":
        score_NE = jnp.exp(logit_NE) / jnp.sum(jnp.exp(logit_NE), axis=-1, keepdims=True)
    else:
        score_NE = 1 / (1 + jnp.exp(-logit_NE))
    chosen_NE = _chosen(jax.lax.stop_gradient(score_NE + bias_E), cfg, k)
    weight_NE = jnp.where(chosen_NE, score_NE, 0.0)
    if cfg.renormalize:
        weight_NE = weight_NE / jnp.sum(weight_NE, axis=-1, keepdims=True)
    weight_NE = weight_NE * cfg.weight_scale
    h_NEUF = jnp.einsum("ND,EDUF->NEUF", x_ND, w_in_EDUF)
    if biases is not None:
        h_NEUF = h_NEUF + biases[0]
    y_NED = jnp.einsum("NEF,EFD->NED", gated(h_NEUF[:, :, 0], h_NEUF[:, :, 1], limit), w_out_EFD)
    if biases is not None:
        y_NED = y_NED + biases[1]
    return jnp.einsum("NE,NED->ND", weight_NE, y_NED), weight_NE


def gated(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    """SwiGLU of gate and up, or clamped SwiGLU, in another form than in `kernels.experts`."""
    if limit is None:
        return gate * jax.nn.sigmoid(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))


def _chosen(election_NE: jax.Array, cfg: RouterConfig, k: int) -> jax.Array:
    """Marks the k best experts of each token, by counting the experts that beat each one."""
    if cfg.num_groups > 1:
        N, E = election_NE.shape
        by_group = jnp.sort(election_NE.reshape(N, cfg.num_groups, -1), axis=-1)
        best = 2 if cfg.score == "sigmoid" else 1
        in_group = mark_best(jnp.sum(by_group[:, :, -best:], axis=-1), cfg.groups_per_token)
        in_group = jnp.repeat(in_group, E // cfg.num_groups, axis=1)
        election_NE = jnp.where(in_group, election_NE, -jnp.inf)
    return mark_best(election_NE, k)


def mark_best(value_NX: jax.Array, k: int) -> jax.Array:
    """Marks the k largest of each row; of equal values the first wins, as in `lax.top_k`."""
    index_X = jnp.arange(value_NX.shape[1])
    larger = value_NX[:, None, :] > value_NX[:, :, None]
    equal_before = (value_NX[:, None, :] == value_NX[:, :, None]) & (
        index_X[None, None, :] < index_X[None, :, None]
    )
    return jnp.sum(larger | equal_before, axis=-1) < k
