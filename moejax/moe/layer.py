"""The expert layer: route, dispatch, experts, combine."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.comm import wire
from moejax.comm.reduce import enter
from moejax.comm.route import flat_route
from moejax.config import ModelConfig, MoEConfig
from moejax.dims import Layout
from moejax.kernels.expert_mlp import expert_mlp
from moejax.moe import router
from moejax.moe.dispatch import combine, dispatch, plan_send
from moejax.program import Program

# Bucket sizes of dropless mode, over the balanced size. A bucket that holds 1.25 times the balanced
# load is enough for most batches of a balanced router; a last size always holds everything.
BUCKET_LADDER = (1.25, 2.5)


class RouterBias(nnx.Variable):
    """Selection bias of loss-free balancing: state that no gradient reaches."""


class MoEStats(NamedTuple):
    """What an expert layer reports, per device."""

    loss: Float[Array, ""]  # this device's share of the weighted router losses
    balance: Float[Array, ""]  # its share of the unweighted balance loss; sums to 1 when even
    load_E: Int[Array, " E"]  # assignments this device made to each expert
    dropped: Int[Array, ""]  # assignments this device dropped


class MoE(nnx.Module):
    """Routed experts. Owns the router, the experts and the selection bias."""

    def __init__(self, cfg: ModelConfig, moe: MoEConfig, program: Program, rngs: nnx.Rngs):
        E, D, F = moe.num_experts, cfg.width, moe.expert_hidden
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.init_deviation / math.sqrt(2 * cfg.num_layers))
        self.moe, self.program = moe, program
        self.w_router = nnx.Param(normal(rngs.params(), (D, E), jnp.float32), dims="DE")
        self.w_in = nnx.Param(normal(rngs.params(), (E, D, 2, F), jnp.float32), dims="EDUF")
        self.w_out = nnx.Param(out(rngs.params(), (E, F, D), jnp.float32), dims="EFD")
        self.bias = RouterBias(jnp.zeros((E,), jnp.float32), dims="E")

    def __call__(
        self, x_BtD: Float[Array, "B t D"], noise: jax.Array | None = None
    ) -> tuple[Float[Array, "B t D"], MoEStats]:
        """Per device. `x_BtD` holds tokens that no other device holds.

        Args:
          noise: factors of the router's input (router jitter), shaped like x; None for none.
        """
        moe, layout = self.moe, self.program.layout
        B, _, D = x_BtD.shape
        x_ND = x_BtD.reshape(-1, D)
        with jax.named_scope("router"):
            seen_BtD = x_BtD if noise is None else x_BtD * noise
            w_router_DE = enter(self.w_router, self.program, "float32")
            logit_NE = jnp.dot(
                seen_BtD.reshape(-1, D).astype(jnp.float32), w_router_DE, precision="highest"
            )
            routing = router.route(logit_NE, self.bias[...], moe.router, k=moe.experts_per_token)
        y_ND, dropped = self._experts(x_ND, routing)
        balance = router.balance_loss(routing, moe.router, sequences=B, layout=layout)
        loss = moe.router.balance_loss * balance
        if moe.router.z_loss:
            loss += moe.router.z_loss * router.z_loss(logit_NE, layout=layout)
        load_E = router.count_load(routing.expert_NK, moe.num_experts)
        return y_ND.reshape(x_BtD.shape), MoEStats(loss, balance, load_E, dropped)

    def _experts(self, x_ND: jax.Array, routing: router.Routing) -> tuple[jax.Array, jax.Array]:
        """Runs the exchange at the smallest bucket size that no device of the mesh overflows.

        The usual size keeps what backward needs; larger ones, taken when routing is skewed, keep
        their inputs alone and repeat the exchange in backward, so that rare skew costs time and
        not memory in every step.
        """
        moe, layout = self.moe, self.program.layout
        w_in = enter(self.w_in, self.program)
        w_out = enter(self.w_out, self.program)
        operands = (x_ND, routing.weight_NK, routing.expert_NK, w_in, w_out)
        sizes = bucket_sizes(moe, layout, tokens=x_ND.shape[0])
        run = [self._run(size) for size in sizes]
        if len(sizes) == 1:
            return run[0](*operands)
        P = layout.size(layout.expert_owner_axes)
        load_E = router.count_load(routing.expert_NK, moe.num_experts)
        fullest = wire.all_max(jnp.max(jnp.sum(load_E.reshape(P, -1), axis=1)), layout.mesh_axes)
        level = jnp.sum(fullest > jnp.array(sizes[:-1]), dtype=jnp.int32)
        return lax.switch(level, [run[0], *map(jax.checkpoint, run[1:])], *operands)

    def _run(self, bucket_rows: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Returns dispatch, experts and combine for one bucket size."""
        moe, layout = self.moe, self.program.layout
        route = flat_route(layout)

        def run(x_ND, weight_NK, expert_NK, w_in_eDUF, w_out_eFD):
            with jax.named_scope("dispatch"):
                plan = plan_send(
                    expert_NK,
                    num_experts=moe.num_experts,
                    num_peers=layout.size(layout.expert_owner_axes),
                    bucket_rows=bucket_rows,
                    capacity=expert_capacity(moe, tokens=x_ND.shape[0]),
                )
                x_RD, sent = dispatch(x_ND, plan, route)
            with jax.named_scope("experts"):
                kernel = self.program.experts
                y_RD = expert_mlp(x_RD, w_in_eDUF, w_out_eFD, sent.sizes_e, implementation=kernel)
            with jax.named_scope("combine"):
                y_ND = combine(y_RD, weight_NK, sent, route)
            return y_ND, expert_NK.size - jnp.sum(plan.counts_Pe)

        return run


def expert_capacity(moe: MoEConfig, *, tokens: int) -> int | None:
    """Rows a device may send to one expert; None in dropless mode."""
    if moe.capacity_factor is None:
        return None
    return math.ceil(moe.capacity_factor * tokens * moe.experts_per_token / moe.num_experts)


def bucket_sizes(moe: MoEConfig, layout: Layout, *, tokens: int) -> tuple[int, ...]:
    """Rows of a bucket, smallest first; the last size cannot overflow.

    A token visits distinct experts, so it sends at most min(K, e) rows to one peer.
    """
    P = layout.size(layout.expert_owner_axes)
    experts_here = moe.num_experts // P
    worst = tokens * min(moe.experts_per_token, experts_here)
    capacity = expert_capacity(moe, tokens=tokens)
    if capacity is not None:
        return (min(worst, capacity * experts_here),)
    balanced = tokens * moe.experts_per_token / P
    sizes = [worst]
    for factor in reversed(BUCKET_LADDER):
        # Each size compiles the layer once more: one that saves less than half is not worth it.
        if math.ceil(factor * balanced) * 2 <= sizes[0]:
            sizes.insert(0, math.ceil(factor * balanced))
    return tuple(sizes)
