"""The expert layer: route, dispatch, experts, combine."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.activations import (
    enter_tensor,
    join_positions,
    leave_replicated,
    own_positions,
    split_positions,
)
from moejax.comm.weights.gather import gather_weight
from moejax.config.schema import ModelConfig, MoEConfig
from moejax.layout.spec import StepSpec
from moejax.moe import router
from moejax.moe.dispatch import drop_above, moe_ffn
from moejax.moe.sizes import expert_capacity


class RouterBias(nnx.Variable):
    """Selection bias of loss-free balancing: state that no gradient reaches."""


class MoEStats(NamedTuple):
    """What an expert layer reports, per device, of tokens that no other device reports."""

    load_E: Int[Array, " E"]  # assignments to each expert
    counted_SE: Int[Array, "S E"]  # what the balance loss counts, by span (`router.balance_terms`)
    score_SE: Float[Array, "S E"]  # its scores, added up
    z: Float[Array, ""]  # this device's share of the z-loss; 0 where it has no weight
    dropped: Int[Array, ""]  # assignments dropped


class MoEWeights(NamedTuple):
    """Gathered over fsdp, in the dtype they are used in; e: experts that this device holds."""

    router_DE: Float[Array, "D E"]
    in_eDUF: Float[Array, "e D 2 F"]
    out_eFD: Float[Array, "e F D"]


class MoE(nnx.Module):
    """Routed experts. Owns the router, the experts and the selection bias."""

    def __init__(self, cfg: ModelConfig, moe: MoEConfig, spec: StepSpec, rngs: nnx.Rngs):
        E, D, F = moe.num_experts, cfg.width, moe.expert_hidden
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.init_deviation / math.sqrt(2 * cfg.num_layers))
        self.moe, self.spec = moe, spec
        self.w_router = nnx.Param(normal(rngs.params(), (D, E), jnp.float32), dims="DE")
        self.w_in = nnx.Param(normal(rngs.params(), (E, D, 2, F), jnp.float32), dims="EDUF")
        self.w_out = nnx.Param(out(rngs.params(), (E, F, D), jnp.float32), dims="EFD")
        self.bias = RouterBias(jnp.zeros((E,), jnp.float32), dims="E")

    def weights(self) -> MoEWeights:
        """The weights as this device computes with them."""
        router_DE = gather_weight(self.w_router, self.spec, "float32")
        return MoEWeights(
            router_DE, gather_weight(self.w_in, self.spec), gather_weight(self.w_out, self.spec)
        )

    def __call__(
        self,
        h_BtD: Float[Array, "B t D"],
        weights: MoEWeights,
        noise: router.Noise | None = None,
    ) -> tuple[Float[Array, "B t D"], MoEStats]:
        """Per device. Takes and returns activations as blocks exchange them (`comm.activations`).

        Args:
          weights: `self.weights()`, entered earlier, so that they arrive in time.
          noise: of the router's jitter; None for none.
        """
        moe, layout = self.moe, self.spec.layout
        replicated = self.spec.route.replicated
        x_BtD = (enter_tensor if replicated else split_positions)(h_BtD, layout)
        B, t, D = x_BtD.shape
        x_ND = x_BtD.reshape(-1, D)
        with jax.named_scope("router"):
            seen_BtD = x_BtD
            if noise is not None:
                first = 0 if replicated else wire.index(layout.tensor) * t
                seen_BtD *= router.jitter_noise(
                    x_BtD.shape, moe.router.jitter, noise, first_position=first
                )
            logit_NE = jnp.dot(
                seen_BtD.reshape(-1, D).astype(jnp.float32), weights.router_DE, precision="highest"
            )
            routing = router.route(logit_NE, self.bias[...], moe.router, k=moe.experts_per_token)
        expert_NK = routing.expert_NK
        capacity = expert_capacity(moe, tokens=x_ND.shape[0])
        if capacity is not None:
            expert_NK = drop_above(expert_NK, capacity, num_experts=moe.num_experts)
        experts = (weights.in_eDUF, weights.out_eFD)
        y_ND = moe_ffn(x_ND, routing.weight_NK, expert_NK, experts, moe, self.spec)
        y_BtD = y_ND.reshape(x_BtD.shape)
        if not replicated:
            return join_positions(y_BtD, layout), self._stats(routing, logit_NE, expert_NK, B)

        def own(x_N: jax.Array) -> jax.Array:
            own_Bt = own_positions(x_N.reshape(B, t, -1), layout)
            return own_Bt.reshape(-1, x_N.shape[1])

        stats = self._stats(jax.tree.map(own, routing), own(logit_NE), own(expert_NK), B)
        return leave_replicated(y_BtD, layout), stats

    def _stats(
        self, routing: router.Routing, logit_NE: jax.Array, kept_NK: jax.Array, sequences: int
    ) -> MoEStats:
        """What the layer reports; nothing of it is summed over devices here."""
        cfg = self.moe.router
        counted_SE, score_SE = router.balance_terms(routing, cfg, sequences=sequences)
        load_E = counted_SE[0]
        if cfg.balance_over == "sequence":
            load_E = router.count_load(routing.expert_NK, self.moe.num_experts)
        z = jnp.zeros(())
        if cfg.z_loss:
            z = router.z_loss(logit_NE, layout=self.spec.layout)
        dropped = jnp.sum(kept_NK == self.moe.num_experts, dtype=jnp.int32)
        return MoEStats(load_E, counted_SE, score_SE, z, dropped)
