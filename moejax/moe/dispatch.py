"""Sends tokens to the devices that own their experts, and brings the results back.

Per device. `moe_ffn` finds the choices that the route's buckets hold (the rest follows in overflow
rounds), plans the dispatch, and defines what experts do with the rows that arrive;
`dispatch_compute_combine` (`comm.tokens.pipeline`) moves the rows and sums each token's results by
weight. Rows are never scattered: each rearrangement is a gather whose transpose is a gather
(`kernels.permute`).

Letters: N tokens, D width, E experts, K choices a token or row, P peers, M rows that arrive, R rows
sorted by expert, e experts on this device, U gate and up (2), F hidden width.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Bool, Float, Int
from moejax.comm import wire
from moejax.comm.tokens.buckets import RankedItems, order_items, rank_items
from moejax.comm.tokens.pipeline import Experts, dispatch_compute_combine
from moejax.comm.tokens.plan import plan_dispatch
from moejax.comm.tokens.rounds import with_rounds
from moejax.config.schema import MoEConfig
from moejax.kernels.experts.activation import SWIGLU, Gate
from moejax.kernels.experts.expert_mlp import expert_mlp, expert_mlp_adding
from moejax.kernels.experts.expert_weights import ExpertWeights
from moejax.kernels.experts.grouped_matmul import schedule_experts
from moejax.kernels.kept import PLACES
from moejax.kernels.permute import permute, take_rows, weighted_sum
from moejax.layout.layout import Layout
from moejax.layout.route import Route, plain_route
from moejax.layout.spec import StepSpec
from moejax.moe.sizes import BucketSizes, fitting, needed, usual_sizes

# Each overflow round has buckets for 1/4 of the tokens at balanced load.
ROUND_SHARE = 4


def drop_above(
    expert_NK: Int[Array, "N K"], capacity: int, *, num_experts: int
) -> Int[Array, "N K"]:
    """Keeps the first `capacity` choices of each expert; others become `num_experts`: dropped."""
    ranked = rank_items(expert_NK, peers=num_experts, merge=False)
    return jnp.where(ranked.rank_MK < capacity, expert_NK, num_experts)


class Overflow(NamedTuple):
    """Choices that no bucket held, and the number of rounds in which they went."""

    over_NK: Bool[Array, "N K"]
    rounds: Int[Array, ""]


def moe_ffn(
    x_ND: Float[Array, "N D"],
    weight_NK: Float[Array, "N K"],
    expert_NK: Int[Array, "N K"],
    weights: ExpertWeights,
    moe: MoEConfig,
    spec: StepSpec,
    *,
    gate: Gate = SWIGLU,
) -> tuple[Float[Array, "N D"], Overflow]:
    """Returns each token's expert outputs, summed by weight, and the overflow.

    No choice is lost at any skew.

    Choices that the usual buckets hold take the spec's route. The others follow in overflow rounds
    of the plain route, and are added last. A dropped choice (`moe.num_experts`) contributes zero.

    Args:
      weights: weights of the experts on this device.
      gate: the experts' activation.
    """
    layout, route, E = spec.layout, spec.route, moe.num_experts
    trained, frozen = _with_bias_once(weights, layout).split()
    operands, sizes = (x_ND, weight_NK, trained), usual_sizes(route, layout, moe, tokens=len(x_ND))
    exchanges, filled = _Exchanges(moe, spec, gate), None
    with jax.named_scope("routing"):
        if route.trim:
            filled = needed(expert_NK, route, layout, num_experts=E)
            filled = jnp.minimum(filled, jnp.array((*sizes.rows, sizes.expert_rows)[: len(filled)]))
    if sizes.certain:
        constants = Constants(expert_NK, frozen, filled=filled)
        y_ND = exchanges.on_route(route, sizes, operands, constants)
        return y_ND, Overflow(jnp.zeros(expert_NK.shape, bool), jnp.zeros((), jnp.int32))
    with jax.named_scope("routing"):
        fits = fitting(expert_NK, route, layout, sizes, num_experts=E)
        # The first contains all; a choice of the first alone is in the rest, masked by `kept_NK`.
        first_NK = jnp.where(fits.first_NK, expert_NK, E)
        # Kept for backward, which would ask other devices again for the choices that fit.
        rest_NK = checkpoint_name(jnp.where(fits.all_NK, E, expert_NK), PLACES)
        count = checkpoint_name(exchanges.count_rounds(rest_NK), PLACES)
    kept_NK = fits.all_NK if route.merges or len(route.exchanges) > 1 else None

    def run_usual(operands: Any, constants: tuple[Constants, Constants]) -> jax.Array:
        return exchanges.on_route(route, sizes, operands, constants[0])

    def run_round(r: jax.Array, operands: Any, constants: tuple[Constants, Constants]) -> jax.Array:
        return exchanges.run_round(r, operands, constants[1])

    both = Constants(first_NK, frozen, kept_NK, filled), Constants(rest_NK, frozen)
    return with_rounds(run_usual, run_round, count, operands, both), Overflow(rest_NK < E, count)


class Constants(NamedTuple):
    """Arguments of a layer's exchange that have no gradient: routing, and frozen weights."""

    expert_NK: jax.Array
    frozen: ExpertWeights
    # Masks choices that have a slot of the first exchange and go no further: see `plan_dispatch`.
    kept_NK: jax.Array | None = None
    filled: jax.Array | None = None  # see `DispatchPlan`


def _with_bias_once(weights: ExpertWeights, layout: Layout) -> ExpertWeights:
    """Keeps the second product's bias on one tensor rank, where ranks' results are partial sums."""
    alone = not layout.hidden_over_tensor or layout.size(layout.tensor) == 1
    if weights.b_out is None or alone:
        return weights
    return weights._replace(b_out=jnp.where(wire.index(layout.tensor) == 0, weights.b_out, 0))


class _Exchanges(NamedTuple):
    """A layer's exchanges: on its route, and in overflow rounds on the plain form of its route."""

    moe: MoEConfig
    spec: StepSpec
    gate: Gate

    def on_route(
        self,
        route: Route,
        sizes: BucketSizes,
        operands: tuple[jax.Array, jax.Array, ExpertWeights],
        constants: Constants,
    ) -> jax.Array:
        """Dispatch, experts and combine along one route whose buckets hold all choices."""
        (x_ND, weight_NK, trained), frozen, spec = operands, constants.frozen, self.spec
        here = trained.joined(frozen).w_in.shape[0]
        experts = _experts(route, sizes, experts_here=here, kernel=spec.experts, gate=self.gate)
        with jax.named_scope("dispatch"):
            plan = plan_dispatch(
                constants.expert_NK,
                route,
                spec.layout,
                num_experts=self.moe.num_experts,
                rows=sizes.rows,
                kept_NK=constants.kept_NK,
                filled=constants.filled,
            )
        settings = route, spec.layout, experts, spec.barriers
        return dispatch_compute_combine(*settings, x_ND, weight_NK, trained, frozen, plan)

    def _rounds(self, rest_NK: jax.Array) -> tuple[Route, BucketSizes, RankedItems]:
        """The route of rounds, with small buckets: `lax.cond` reserves their memory in backward."""
        route, layout = plain_route(self.spec.route, self.spec.layout), self.spec.layout
        peers, tokens = route.exchanges[0].peers(layout), -(-len(rest_NK) // ROUND_SHARE)
        ranked = rank_items(rest_NK // (self.moe.num_experts // peers), peers=peers, merge=False)
        return route, usual_sizes(route, layout, self.moe, tokens=tokens), ranked

    def count_rounds(self, rest_NK: jax.Array) -> jax.Array:
        """The number of rounds that these choices need, the same on every device."""
        _, sizes, ranked = self._rounds(rest_NK)
        fullest = wire.all_max(jnp.max(ranked.counts_P), self.spec.layout.mesh_axes)
        return -(-fullest // sizes.rows[0])

    def run_round(self, r: jax.Array, operands: Any, constants: Constants) -> jax.Array:
        """Dispatch, experts and combine of round r."""
        if not self.spec.rounds:
            return _reading_all(operands, constants)
        # In each round anew: kept for backward, the ranks would be kept of usual steps too.
        route, sizes, ranked = self._rounds(constants.expert_NK)
        mine_NK = ranked.rank_MK // sizes.rows[0] == r
        now_NK = jnp.where(mine_NK, constants.expert_NK, self.moe.num_experts)
        return self.on_route(route, sizes, operands, constants._replace(expert_NK=now_NK))


def _reading_all(
    operands: tuple[jax.Array, jax.Array, ExpertWeights], constants: Constants
) -> jax.Array:
    """Replaces a round that is not traced: its backward reads the arrays of a round's backward."""
    x_ND, *read = operands
    leaves = jax.tree.leaves((read, constants))
    return x_ND * sum(map(jnp.sum, leaves), jnp.zeros(())).astype(x_ND.dtype)


def _experts(
    route: Route, sizes: BucketSizes, *, experts_here: int, kernel: str, gate: Gate
) -> Experts:
    """Returns the computation of this device's experts on arrived rows.

    Results are weighted here where rows merge or do not travel. Elsewhere each row has one choice,
    and its weight is one, for its gradient alone.
    """
    weighted_here = route.merges or not route.exchanges

    def order(choice_MK):
        with jax.named_scope("experts"):
            R = choice_MK.shape[0] // sizes.arriving * sizes.expert_rows
            (slot_MK, item_R), sizes_e = order_items(choice_MK, groups=experts_here, rows=R)
            schedule = schedule_experts(sizes_e, R) if kernel == "mosaic" else None
            return slot_MK if weighted_here else slot_MK[:, 0], item_R, sizes_e, schedule

    def compute(x_MD, weight_MK, ordered, trained, frozen, sums=None):
        weights = trained.joined(frozen)
        (slot_CM, item_CR, sizes_Ce, schedule_C), chunk = ordered
        slot_MK, item_R, one_R1 = slot_CM[chunk], item_CR[chunk], None
        with jax.named_scope("experts"):
            if weighted_here:
                x_RD = permute(x_MD, item_R // slot_MK.shape[1], slot_MK)
            else:
                x_RD = take_rows(x_MD, item_CR, slot_CM, chunk)
                x_RD = checkpoint_name(x_RD, wire.TOKEN_WIRE)
                if weight_MK is not None:
                    one_R1 = take_rows(weight_MK, item_CR, slot_CM, chunk)
            options = {"gate": gate, "one_M1": one_R1}
            if sums is not None:
                options["met"] = _experts_met(x_RD.shape[0], route, sizes, experts_here)
                y_RD, sums = expert_mlp_adding(x_RD, weights, sums, sizes_Ce[chunk], **options)
            else:
                y_RD = expert_mlp(
                    x_RD,
                    weights.w_in,
                    weights.w_out,
                    sizes_Ce[chunk],
                    implementation=kernel,
                    biases=weights.biases,
                    adapters=weights.adapters,
                    schedule=None if schedule_C is None else (schedule_C, chunk),
                    **options,
                )
            if not weighted_here:
                return take_rows(y_RD, slot_CM, item_CR, chunk), sums
            return weighted_sum(y_RD, weight_MK, slot_MK, item_R), sums

    return Experts(order, compute, adds_up=kernel == "blocked")


def _experts_met(rows: int, route: Route, sizes: BucketSizes, experts_here: int) -> int:
    """Returns about how many experts a chunk of `rows` rows meets."""
    if not route.parts_by_expert or rows >= sizes.expert_rows * route.parts:
        return experts_here
    share = rows / (sizes.expert_rows * route.parts)
    return min(experts_here, math.ceil(share * experts_here) + 1)
