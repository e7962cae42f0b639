"""The expert layer: route, dispatch, experts, combine.

`MoE.__call__` runs per device, inside shard_map. It takes a block's activations as rows x_ND: each
tensor rank takes its own positions, or all positions if the route is `replicated`
(`comm.activations`). The steps of a token:

1. Router scores: `_logits` multiplies x_ND by the router's weight in float32, with jitter
   (`moe.router.jitter_noise`) and a bias if the config asks for them. With `moe.own_norms` x_ND is
   the residual stream, of which the block makes the inputs of both.
2. Choice: `moe.router.route` chooses K experts for each token and their weights. Where experts were
   recorded (`MoE.recorded`), it takes those. With a capacity, `moe.dispatch.drop_above` drops the
   choices above it. With slots, `moe.copies` sends some choices of hot experts to copies of them.
3. Bucket sizes: `moe.dispatch.moe_ffn` takes static sizes from `moe.sizes.usual_sizes`. If routing
   could overflow them, `moe.sizes.fitting` finds the choices that fit. For the others steps 4 to 7
   run again, in rounds of small buckets (`comm.tokens.rounds.with_rounds`).
4. Plan: `comm.tokens.plan.plan_dispatch` gives each choice a slot in the bucket of the device that
   owns its expert (`comm.tokens.buckets`), hop after hop. It sends the expert numbers ahead.
5. Dispatch: `comm.tokens.hops.dispatch_hop` copies tokens into buckets and sends them over one hop
   (`comm.tokens.swap`), hop after hop, until they reach their experts.
6. Experts: `moe.dispatch._experts` sorts the rows by expert and runs
   `kernels.experts.expert_mlp.expert_mlp` on them.
7. Combine: `comm.tokens.hops.combine_hop` sends the results back, hop after hop.
   `comm.tokens.hops.combine_at_source` sums the results of each token by weight: y_ND. On routes
   that merge, weights travel with the rows and step 6 multiplies by them (also without exchange).

`comm.tokens.pipeline.dispatch_compute_combine` runs steps 5 to 7, in chunks that overlap. y_ND then
returns to the layout between blocks, and the layer reports its load (`MoEStats`).

With `moe.latent` all tokens are projected to its width before step 3, and from it after step 7.

Letters: B sequences, t positions on this device, N = B * t tokens, D width, Z width of a latent, E
experts (e on this device), K choices a token, U gate and up (2), F hidden width, S spans of the
balance loss, Q bins of quantile balancing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Bool, Float, Int
from moejax.comm import wire
from moejax.comm.activations import (
    enter_tensor,
    join_positions,
    leave_replicated,
    own_positions,
    split_positions,
)
from moejax.comm.host import is_on_host, to_device
from moejax.comm.weights.adapters import AdaptedWeight, Weight, product
from moejax.comm.weights.gather import gather_float32, gather_weight, replicated_weight
from moejax.comm.weights.shard import as_shard
from moejax.config.schema import ModelConfig, MoEConfig
from moejax.kernels.experts.activation import Gate
from moejax.kernels.experts.expert_weights import ExpertWeights, Factors
from moejax.kernels.kept import ATTENDED
from moejax.layout.spec import StepSpec
from moejax.moe import router
from moejax.moe.copies import (
    Copies,
    by_table,
    copy_hot,
    load_of,
    num_places,
    shared_anew,
    spread,
)
from moejax.moe.dispatch import Overflow, drop_above, moe_ffn
from moejax.moe.quantile import count_needed
from moejax.moe.sizes import expert_capacity


class RouterBias(nnx.Variable):
    """Selection bias of loss-free balancing: state that no gradient reaches."""


class Table(RouterBias):
    """A `moe.copies.Placement` [2, E, C]: places of each expert, on at most C devices.

    Without gradient too. It is there where `StepSpec.tables` says so.
    """


class KnownLoad(nnx.Variable):
    """The load of an earlier step, assignments to each expert [E]."""


class RecordedExperts(nnx.Variable):
    """Experts that were recorded for a step's tokens, of all tensor ranks' positions [B, T, K]."""


class MoEStats(NamedTuple):
    """Statistics of an expert layer, per device; each token is reported by one device."""

    load_E: Int[Array, " E"]  # assignments to each expert
    counted_SE: Int[Array, "S E"]  # counts for the balance loss, by span (`router.balance_terms`)
    score_SE: Float[Array, "S E"]  # sums of scores, by span
    z: Float[Array, ""]  # this device's share of the z-loss; 0 if its weight is 0
    dropped: Int[Array, ""]  # number of dropped assignments
    overflowed: Int[Array, ""]  # number of assignments that went in overflow rounds
    rounds: Int[Array, ""]  # number of these rounds, the same on every device
    entropy: Float[Array, ""]  # this device's share of the scores' entropy (`router.entropy`)
    expert_NK: Int[Array, "N K"] | None = None  # choices, where `is_token_BT` is given
    needed_EQ: Int[Array, "E Q"] | None = None  # `quantile.count_needed`, with quantile balancing
    replayed_2: Int[Array, " 2"] | None = None  # `router.count_replayed`, with recorded experts


class MoEWeights(NamedTuple):
    """Weights gathered over fsdp, in the dtype of their product; router and biases in float32."""

    router_DE: Float[Array, "D E"]
    experts: ExpertWeights
    copies: Copies | None = None  # those that `experts` has, if they were chosen before
    latent: tuple[Weight, Weight] | None = None  # projections [D, Z] and [Z, D]


def _parts(w: Weight) -> tuple[jax.Array, Factors | None]:
    """Returns a gathered weight and the factors of its adapter, or None, apart."""
    return (w.weight, Factors(*w.adapter)) if isinstance(w, AdaptedWeight) else (w, None)


class MoE(nnx.Module):
    """Routed experts. Owns the router, the experts and the selection bias.

    Attributes:
      recorded: the experts to which tokens go, as `router.route` takes them; None: tokens choose.
        `Transformer.use_recorded` sets it for one step.
      known_load: the load by which experts are chosen that have copies; None: that of this call's
        choices. `Transformer.use_load` sets it for one step.
    """

    def __init__(self, cfg: ModelConfig, moe: MoEConfig, spec: StepSpec, rngs: nnx.Rngs):
        E, D, F, U = moe.num_experts, cfg.width, moe.expert_hidden, cfg.hidden_inputs
        Z = moe.latent or D
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        out = jax.nn.initializers.normal(cfg.out_deviation)
        self.moe, self.spec, self.gate = moe, spec, Gate(cfg.activation, cfg.clamp)
        self.recorded: RecordedExperts | None = nnx.data(None)
        self.known_load: KnownLoad | None = nnx.data(None)
        self.w_router = nnx.Param(normal(rngs.params(), (D, E), jnp.float32), dims="DE")
        M = num_places(moe, spec.layout) if spec.tables else E
        self.w_in = nnx.Param(normal(rngs.params(), (M, Z, U, F), jnp.float32), dims="EDUF")
        self.w_out = nnx.Param(out(rngs.params(), (M, F, Z), jnp.float32), dims="EFD")
        if moe.latent is not None:
            self.w_down = nnx.Param(normal(rngs.params(), (D, Z), jnp.float32), dims="DZ")
            self.w_up = nnx.Param(out(rngs.params(), (Z, D), jnp.float32), dims="ZD")
        self.bias = RouterBias(jnp.zeros((E,), jnp.float32), dims="E")
        if spec.tables:
            C = spec.layout.size(spec.layout.expert_owner_axes)
            self.table = Table(jnp.zeros((2, E, C), jnp.int32), dims="WEC")
        if moe.expert_scale:
            self.expert_scale = nnx.Param(jnp.ones((E,), jnp.float32), dims="E")
        if moe.router_bias:
            self.b_router = nnx.Param(jnp.zeros((E,), jnp.float32), dims="E")
        if moe.expert_bias:
            self.b_in = nnx.Param(jnp.zeros((M, U, F), jnp.float32), dims="EUF")
            self.b_out = nnx.Param(jnp.zeros((M, Z), jnp.float32), dims="ED")

    def fetch(self) -> list[jax.Array]:
        """Starts to fetch the experts' weights, if they are on the host; returns their shards."""
        found = [as_shard(w.get_value()).weight for w in (self.w_in, self.w_out)]
        return [to_device(w) for w in found if w is not None and is_on_host(w)]

    def weights(self, fetched: list[jax.Array] | None = None) -> MoEWeights:
        """The weights as this device computes with them.

        Args:
          fetched: from `fetch`, if it returned shards.
        """
        if fetched:
            for param, own in zip((self.w_in, self.w_out), fetched, strict=True):
                shard: Any = replace(as_shard(param.get_value()), weight=own)
                param.set_value(shard)
        router_DE, b_in, b_out = gather_float32(self.w_router, self.spec), None, None
        (w_in, in_adapter), (w_out, out_adapter) = (
            _parts(gather_weight(w, self.spec)) for w in (self.w_in, self.w_out)
        )
        if self.moe.expert_bias:
            b_in, b_out = (gather_float32(b, self.spec) for b in (self.b_in, self.b_out))
        experts, latent = ExpertWeights(w_in, w_out, b_in, b_out, in_adapter, out_adapter), None
        if self.moe.latent is not None:
            latent = gather_weight(self.w_down, self.spec), gather_weight(self.w_up, self.spec)
        if self.known_load is None:
            return MoEWeights(router_DE, experts, latent=latent)
        copies, held = copy_hot(self.known_load[...], experts, self.moe, self.spec.layout)
        return MoEWeights(router_DE, held, copies, latent)

    def __call__(
        self,
        h_BtD: Float[Array, "B t D"],
        weights: MoEWeights,
        noise: router.Noise | None = None,
        is_token_BT: Bool[Array, "B T"] | None = None,
        inputs: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None = None,
    ) -> tuple[Float[Array, "B t D"], MoEStats]:
        """Takes and returns activations in the layout between blocks (`comm.activations`).

        Args:
          weights: `self.weights()`, called earlier so that they arrive in time.
          noise: for the router's jitter; None for no jitter.
          is_token_BT: whether there is a token at each position; others reach no expert. None: at
            all.
          inputs: makes the inputs of experts and router of h at each position; None: both see h.
        """
        moe, layout = self.moe, self.spec.layout
        replicated = self.spec.route.replicated
        x_BtD = (enter_tensor if replicated else split_positions)(h_BtD, layout)
        B, t, D = x_BtD.shape
        x_BtD, seen_BtD = (x_BtD, x_BtD) if inputs is None else inputs(x_BtD)
        x_ND = x_BtD.reshape(-1, D)
        with jax.named_scope("router"):
            logit_NE = self._logits(seen_BtD, weights.router_DE, noise)
            routing = self._route(logit_NE)
        expert_NK = routing.expert_NK
        if is_token_BT is not None:
            own_Bt = is_token_BT if replicated else own_positions(is_token_BT, layout)
            expert_NK = jnp.where(own_Bt.reshape(-1, 1), expert_NK, moe.num_experts)
        capacity = expert_capacity(moe, tokens=x_ND.shape[0])
        if capacity is not None:
            expert_NK = drop_above(expert_NK, capacity, num_experts=moe.num_experts)
        y_ND, overflow = self._run_experts(x_ND, routing.weight_NK, expert_NK, weights)
        y_BtD = y_ND.reshape(x_BtD.shape)

        def own_rows(x_N: jax.Array) -> jax.Array:
            own_Bt = own_positions(x_N.reshape(B, t, -1), layout)
            return own_Bt.reshape(-1, x_N.shape[1])

        if replicated:
            own = jax.tree.map(own_rows, (routing, logit_NE, expert_NK, overflow.over_NK))
            routing, logit_NE, expert_NK, over_NK = own
            overflow = overflow._replace(over_NK=over_NK)
        stats = self._stats(routing, logit_NE, expert_NK, overflow, B)
        if is_token_BT is not None:
            stats = stats._replace(expert_NK=routing.expert_NK)
        return (leave_replicated if replicated else join_positions)(y_BtD, layout), stats

    def _given(self, N: int) -> Int[Array, "N K"] | None:
        """Experts that were recorded, or that `moe.router.forced` chooses; None without."""
        layout, replicated = self.spec.layout, self.spec.route.replicated
        if self.recorded is not None:
            expert_BTK = self.recorded[...]
            expert_BTK = expert_BTK if replicated else own_positions(expert_BTK, layout)
            return expert_BTK.reshape(N, -1)
        if self.moe.router.forced != "balanced":
            return None
        ranks = () if replicated else layout.tensor
        first = wire.index(layout.token_axes + ranks) * N
        form = {"k": self.moe.experts_per_token}
        return router.choose_in_turn(first, N, self.moe.num_experts, self.moe.router, **form)

    def _route(self, logit_NE: jax.Array) -> router.Routing:
        form = {"k": self.moe.experts_per_token, "given_NK": self._given(len(logit_NE))}
        routing = router.route(logit_NE, self.bias[...], self.moe.router, **form)
        if not self.moe.expert_scale:
            return routing
        factor_NK = replicated_weight(self.expert_scale)[routing.expert_NK]
        return routing._replace(weight_NK=routing.weight_NK * factor_NK)

    def _run_experts(
        self, x_ND: jax.Array, weight_NK: jax.Array, expert_NK: jax.Array, weights: MoEWeights
    ) -> tuple[jax.Array, Overflow]:
        """The exchange and the experts, at their width: by experts, or with slots by places."""
        moe, spec, experts, copies = self.moe, self.spec, weights.experts, weights.copies
        if weights.latent is not None:
            x_ND = product(x_ND, weights.latent[0])
        if spec.tables:
            expert_NK, moe = by_table(expert_NK, self.table[...], moe, spec.layout)
        elif moe.slots:
            load_E = load_of(expert_NK, moe.num_experts, spec.layout)
            if copies is None:
                copies, experts = copy_hot(load_E, experts, moe, spec.layout)
            else:
                copies = shared_anew(copies, load_E, moe, spec.layout)
            expert_NK, moe = spread(expert_NK, copies, moe, spec.layout)
        y_ND, overflow = moe_ffn(x_ND, weight_NK, expert_NK, experts, moe, spec, gate=self.gate)
        return y_ND if weights.latent is None else product(y_ND, weights.latent[1]), overflow

    def _logits(
        self, x_BtD: jax.Array, router_DE: jax.Array, noise: router.Noise | None
    ) -> Float[Array, "N E"]:
        t = x_BtD.shape[1]
        if noise is not None:
            replicated = self.spec.route.replicated
            first = 0 if replicated else wire.index(self.spec.layout.tensor) * t
            position_t = first + jnp.arange(t)
            if noise.position_T is not None:
                position_t = noise.position_T[position_t]
            x_BtD *= router.jitter_noise(
                x_BtD.shape, self.moe.router.jitter, noise, position_t=position_t
            )
        x_ND = x_BtD.reshape(-1, x_BtD.shape[2])
        logit_NE = jnp.dot(x_ND.astype(jnp.float32), router_DE, precision="highest")
        logit_NE = checkpoint_name(logit_NE, ATTENDED)
        return logit_NE + replicated_weight(self.b_router) if self.moe.router_bias else logit_NE

    def _stats(
        self,
        routing: router.Routing,
        logit_NE: jax.Array,
        kept_NK: jax.Array,
        overflow: Overflow,
        sequences: int,
    ) -> MoEStats:
        """The layer's statistics; nothing is summed over devices here."""
        cfg = self.moe.router
        counted_SE, score_SE = router.balance_terms(routing, cfg, sequences=sequences)
        load_E = counted_SE[0]
        if self.spec.tables:  # without padding
            load_E = router.count_load(kept_NK, self.moe.num_experts)
        elif cfg.balance_over == "sequence":
            load_E = router.count_load(routing.expert_NK, self.moe.num_experts)
        z = router.z_loss(logit_NE, layout=self.spec.layout) if cfg.z_loss else jnp.zeros(())
        dropped = jnp.sum(kept_NK == self.moe.num_experts, dtype=jnp.int32)
        entropy = router.entropy(routing.score_NE, layout=self.spec.layout)
        overflowed = jnp.sum(overflow.over_NK, dtype=jnp.int32)
        counts = dropped, overflowed, overflow.rounds
        stats = MoEStats(load_E, counted_SE, score_SE, z, *counts, entropy)
        if self.recorded is not None and routing.own_NK is not None:
            given_BtK = own_positions(self.recorded[...], self.spec.layout)
            given_NK = given_BtK.reshape(routing.own_NK.shape)
            stats = stats._replace(replayed_2=router.count_replayed(routing.own_NK, given_NK))
        if cfg.quantile_bins is None or routing.cut_N1 is None:
            return stats
        needed = routing.score_NE, routing.cut_N1, self.bias[...], cfg.quantile_bins
        return stats._replace(needed_EQ=count_needed(*needed))
