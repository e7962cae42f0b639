"""Sends tokens to the devices that own their experts, and brings the results back.

Per device. `moe_ffn` checks that the route's buckets hold this step's routing (else it runs
overflow rounds), plans the dispatch, and defines what experts do with the rows that arrive;
`dispatch_compute_combine` (`comm.tokens.pipeline`) moves the rows and sums each token's results by
weight. Rows are never scattered: each rearrangement is a gather whose transpose is a gather
(`kernels.permute`).

Letters: N tokens, D width, E experts, K choices a token or row, P peers, M rows that arrive, R rows
sorted by expert, e experts on this device, U gate and up (2), F hidden width.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.comm import wire
from moejax.comm.tokens.buckets import order_items, rank_items
from moejax.comm.tokens.pipeline import Experts, dispatch_compute_combine
from moejax.comm.tokens.plan import plan_dispatch
from moejax.comm.tokens.rounds import in_rounds
from moejax.config.schema import MoEConfig
from moejax.kernels.expert_mlp import expert_mlp, expert_mlp_adding
from moejax.kernels.expert_weights import Weights
from moejax.kernels.grouped_matmul import schedule_experts
from moejax.kernels.kept import PLACES
from moejax.kernels.permute import permute, take_rows, weighted_sum
from moejax.layout.layout import Layout
from moejax.layout.route import Route, plain_route
from moejax.layout.spec import StepSpec
from moejax.moe.sizes import Sizes, needed, usual_sizes

# Each overflow round has buckets for 1/4 of the tokens at balanced load.
ROUND_SHARE = 4


def drop_above(
    expert_NK: Int[Array, "N K"], capacity: int, *, num_experts: int
) -> Int[Array, "N K"]:
    """Keeps the first `capacity` choices of each expert; others become `num_experts`: dropped."""
    ranked = rank_items(expert_NK, peers=num_experts, merge=False)
    return jnp.where(ranked.rank_MK < capacity, expert_NK, num_experts)


def moe_ffn(
    x_ND: Float[Array, "N D"],
    weight_NK: Float[Array, "N K"],
    expert_NK: Int[Array, "N K"],
    weights: Weights,
    moe: MoEConfig,
    spec: StepSpec,
    *,
    limit: float | None = None,
) -> Float[Array, "N D"]:
    """Returns each token's expert outputs, summed by weight. No choice is lost at any skew.

    Runs the spec's route if the usual buckets hold every choice of every device; otherwise overflow
    rounds of the plain route. A dropped choice (`moe.num_experts`) contributes zero.

    Args:
      weights: of the experts on this device.
      limit: of the experts' clamped SwiGLU; None for SwiGLU.
    """
    layout, route = spec.layout, spec.route
    run = partial(_on_route, moe=moe, spec=spec, limit=limit)
    trained, frozen = _with_bias_once(weights, layout).split()
    operands, others = (x_ND, weight_NK, trained), (expert_NK, frozen)
    sizes = usual_sizes(route, layout, moe, tokens=x_ND.shape[0])
    if sizes.certain and not route.trim:
        return run(route, sizes, operands, others)
    with jax.named_scope("routing"):
        need = needed(expert_NK, route, layout, num_experts=moe.num_experts)
    run_usual = partial(run, route, sizes, filled=need if route.trim else None)
    if sizes.certain:
        return run_usual(operands, others)
    run_rounds = partial(_in_rounds, moe=moe, spec=spec, limit=limit)
    overflows = jnp.any(need > jnp.array((*sizes.rows, sizes.expert_rows)[: need.shape[0]]))
    return lax.cond(overflows, run_rounds, run_usual, operands, others)


# These have no gradient: choices [N, K], and frozen weights.
Others = tuple[jax.Array, Weights]


def _with_bias_once(weights: Weights, layout: Layout) -> Weights:
    """Keeps the second product's bias on one tensor rank, where ranks' results are partial sums."""
    alone = not layout.hidden_over_tensor or layout.size(layout.tensor) == 1
    if weights.b_out is None or alone:
        return weights
    return weights._replace(b_out=jnp.where(wire.index(layout.tensor) == 0, weights.b_out, 0))


def _in_rounds(
    operands: tuple[jax.Array, jax.Array, Weights],
    others: Others,
    *,
    moe: MoEConfig,
    spec: StepSpec,
    limit: float | None,
) -> jax.Array:
    """Dispatch, experts and combine in overflow rounds: as many as the fullest bucket needs."""
    layout, expert_NK = spec.layout, others[0]
    plain = plain_route(spec.route, layout)
    # `lax.cond` reserves memory for both branches in backward, so rounds use small buckets.
    sizes = usual_sizes(plain, layout, moe, tokens=-(-expert_NK.shape[0] // ROUND_SHARE))
    (rows,) = sizes.rows
    peers = plain.exchanges[0].peers(layout)
    here = moe.num_experts // peers

    def run_round(r: jax.Array, operands: Any, others: Others) -> jax.Array:
        if not spec.rounds:
            return _reading_all(operands, others)
        expert_NK, frozen = others
        # In each round anew: kept for backward, the ranks would be kept of usual steps too.
        ranked = rank_items(expert_NK // here, peers=peers, merge=False)
        now_NK = jnp.where(ranked.rank_MK // rows == r, expert_NK, moe.num_experts)
        now = now_NK, frozen
        return _on_route(plain, sizes, operands, now, moe=moe, spec=spec, limit=limit)

    with jax.named_scope("routing"):
        ranked = rank_items(expert_NK // here, peers=peers, merge=False)
        fullest = wire.all_max(jnp.max(ranked.counts_P), layout.mesh_axes)
        count = checkpoint_name(-(-fullest // rows), PLACES)
    return in_rounds(run_round, count, operands, others)


def _reading_all(operands: tuple[jax.Array, jax.Array, Weights], others: Others) -> jax.Array:
    """Stands for a round that is not traced: backward needs all that a round's backward needs."""
    x_ND, *read = operands
    leaves = jax.tree.leaves((read, others))
    return x_ND * sum(map(jnp.sum, leaves), jnp.zeros(())).astype(x_ND.dtype)


def _on_route(
    route: Route,
    sizes: Sizes,
    operands: tuple[jax.Array, jax.Array, Weights],
    others: Others,
    *,
    moe: MoEConfig,
    spec: StepSpec,
    limit: float | None,
    filled: jax.Array | None = None,
) -> jax.Array:
    """Dispatch, experts and combine along one route whose buckets hold all choices."""
    (x_ND, weight_NK, trained), (expert_NK, frozen) = operands, others
    here = trained.joined(frozen).w_in.shape[0]
    experts = _experts(route, sizes, experts_here=here, kernel=spec.experts, limit=limit)
    with jax.named_scope("dispatch"):
        plan = plan_dispatch(
            expert_NK,
            route,
            spec.layout,
            num_experts=moe.num_experts,
            rows=sizes.rows,
            filled=filled,
        )
    return dispatch_compute_combine(
        x_ND,
        weight_NK,
        trained,
        frozen,
        plan,
        route=route,
        layout=spec.layout,
        experts=experts,
        barriers=spec.barriers,
    )


def _experts(
    route: Route, sizes: Sizes, *, experts_here: int, kernel: str, limit: float | None
) -> Experts:
    """Returns what takes arrived rows through the experts of this device.

    Results are weighted here where rows merge or do not travel. Elsewhere each row has one choice,
    and its weight is one, for its gradient alone.
    """
    weighs = route.merges or not route.exchanges

    def order(choice_MK):
        with jax.named_scope("experts"):
            R = choice_MK.shape[0] // sizes.arriving * sizes.expert_rows
            (slot_MK, item_R), sizes_e = order_items(choice_MK, groups=experts_here, rows=R)
            schedule = schedule_experts(sizes_e, R) if kernel == "mosaic" else None
            return slot_MK if weighs else slot_MK[:, 0], item_R, sizes_e, schedule

    def compute(x_MD, weight_MK, ordered, trained, frozen, sums=None):
        weights = trained.joined(frozen)
        (slot_CM, item_CR, sizes_Ce, schedule_C), chunk = ordered
        slot_MK, item_R, one_R1 = slot_CM[chunk], item_CR[chunk], None
        with jax.named_scope("experts"):
            if weighs:
                x_RD = permute(x_MD, item_R // slot_MK.shape[1], slot_MK)
            else:
                x_RD = take_rows(x_MD, item_CR, slot_CM, chunk)
                x_RD = checkpoint_name(x_RD, wire.TOKEN_WIRE)
                if weight_MK is not None:
                    one_R1 = take_rows(weight_MK, item_CR, slot_CM, chunk)
            options = {"limit": limit, "one_M1": one_R1}
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
            if not weighs:
                return take_rows(y_RD, slot_CM, item_CR, chunk), sums
            return weighted_sum(y_RD, weight_MK, slot_MK, item_R), sums

    return Experts(order, compute, adds_up=kernel == "blocked")


def _experts_met(rows: int, route: Route, sizes: Sizes, experts_here: int) -> int:
    """The experts that a chunk of so many rows meets, more or less."""
    if not route.parts_by_expert or rows >= sizes.expert_rows * route.parts:
        return experts_here
    share = rows / (sizes.expert_rows * route.parts)
    return min(experts_here, math.ceil(share * experts_here) + 1)
