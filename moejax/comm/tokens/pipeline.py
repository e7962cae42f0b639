"""Dispatch, experts, combine: in chunks, so that communication hides behind the experts.

Per device, inside shard_map. Chunk i + 1 is dispatched while the experts work on chunk i and chunk
i - 1 is combined. Backward is the same pipeline: gradients of results are dispatched, gradients of
rows are combined, with the experts' backward between them and a chunk count of its own. Nothing
that was communicated is communicated again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.comm import wire
from moejax.comm.tokens.hops import (
    Rows,
    codec_at_source,
    combine_at_source,
    combine_hop,
    dispatch_hop,
)
from moejax.comm.tokens.plan import DispatchPlan
from moejax.comm.tokens.rows import encoded_weight_gradient
from moejax.layout.layout import Layout
from moejax.layout.route import Route

# (rows [M, D], weights [M, K] or None, choices [M, K], params) -> results [M, D]; no communication.
ExpertFn = Callable[[jax.Array, jax.Array | None, jax.Array, Any], jax.Array]
# (number of a chunk, what the stage before made of it) -> what this stage makes of it.
Stage = Callable[[int, Any], Any]


def run_stages(
    stages: Sequence[Stage], chunks: Sequence[Any], *, barriers: bool, accumulated: dict[str, Any]
) -> list[Any]:
    """Takes each chunk through the stages, one stage behind the chunk before it.

    Args:
      barriers: puts an optimization barrier after each step, so that a compiler that orders the
        program statically keeps the step's stages side by side. A runtime that starts whatever is
        ready needs none.
      accumulated: what stages put aside for the caller, tied to the step that made it.
    """
    flight = dict(enumerate(chunks))
    for step in range(len(chunks) + len(stages) - 1):
        moved = {}
        for place, stage in enumerate(stages):
            number = step - place
            if 0 <= number < len(chunks):
                moved[number] = stage(number, flight[number])
        if barriers and len(moved) > 1:
            moved, tied = lax.optimization_barrier((moved, accumulated))
            accumulated.update(tied)
        flight |= moved
    return [flight[number] for number in range(len(chunks))]


def dispatch_compute_combine(
    x_ND: jax.Array,
    weight_NK: jax.Array,
    params: Any,
    plan: DispatchPlan,
    *,
    route: Route,
    layout: Layout,
    expert_fn: ExpertFn,
    barriers: bool,
) -> jax.Array:
    """Returns `y_ND`: each token's expert outputs, summed by weight, on the token's own device.

    Args:
      params: of `expert_fn`; differentiated, as are tokens and weights.
      expert_fn: what a device computes of the rows that it was sent.
      barriers: see `run_stages`.
    """
    return _dispatch_compute_combine(
        route, layout, expert_fn, barriers, x_ND, weight_NK, params, plan
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _dispatch_compute_combine(route, layout, expert_fn, barriers, x_ND, weight_NK, params, plan):
    return _forward(route, layout, expert_fn, barriers, x_ND, weight_NK, params, plan)[0]


def _forward(route, layout, expert_fn, barriers, x_ND, weight_NK, params, plan):
    k = route.chunks
    choices = _cut(plan.expert_IMK, k)
    kept: dict[int, Any] = {}

    def expert_stage(number: int, arrived: Rows) -> Rows:
        # Tagged here, after the barrier: remat then keeps what the barrier let through.
        arrived = _tag(arrived)
        y_MD, pull = _differentiable(expert_fn, arrived, choices[number], params)
        # With as many chunks in backward, what the experts saved serves; else they work again.
        kept[number] = pull if k == route.chunks_backward else arrived
        return Rows(_unflat(y_MD, arrived.x.shape[0]), None)

    stages = _stages(route, layout, plan, expert_stage, k)
    start = _at_start(Rows(x_ND, weight_NK), plan)
    results = _tag(_join(run_stages(stages, [start] * k, barriers=barriers, accumulated={})))
    y_ND = _results_at_source(results, weight_NK, plan, route, like=x_ND)
    # The gradient of weights needs results only if they were weighted at the source.
    results = results.x if plan.places and not route.merges else None
    return y_ND, ([kept[number] for number in range(k)], params, plan, weight_NK, results)


def _backward(route, layout, expert_fn, barriers, saved, gradient_ND):
    kept, params, plan, weight_NK, results = saved
    k = route.chunks_backward
    if k != route.chunks:
        kept = _cut((_join(kept), plan.expert_IMK), k)
    accumulated: dict[str, Any] = {}

    def expert_stage(number: int, gradient: Rows) -> Rows:
        pull = kept[number]
        if k != route.chunks:
            arrived, choices = pull
            pull = _differentiable(expert_fn, arrived, choices, params)[1]
        dx_MD, dweight_MK, dparams = pull(_flat(gradient.x))
        if k > 1:  # chunks' weight gradients are added up in float32
            dparams = jax.tree.map(lambda g: g.astype(jnp.float32), dparams)
        accumulated["params"] = (
            jax.tree.map(jnp.add, accumulated["params"], dparams) if accumulated else dparams
        )
        return _unflat(Rows(dx_MD, dweight_MK), gradient.x.shape[0])

    stages = _stages(route, layout, plan, expert_stage, k, gradient=True)
    start = _at_start(Rows(gradient_ND, weight_NK if plan.places else None), plan)
    drows = _join(run_stages(stages, [start] * k, barriers=barriers, accumulated=accumulated))
    dparams = jax.tree.map(lambda g, w: g.astype(w.dtype), accumulated["params"], params)
    dx_ND, dweight_NK = _gradients_at_source(drows, results, gradient_ND, plan, route)
    return dx_ND, dweight_NK.astype(weight_NK.dtype), dparams, None


_dispatch_compute_combine.defvjp(_forward, _backward)


def _at_start(tokens: Rows, plan: DispatchPlan) -> Rows:
    """What the first stage takes: all tokens, and where no exchange copies any, as one part."""
    return tokens if plan.places else jax.tree.map(lambda x: x[None], tokens)


def _results_at_source(
    results: Rows, weight_NK: jax.Array, plan: DispatchPlan, route: Route, *, like: jax.Array
) -> jax.Array:
    """[N, D]: each token's results, summed by weight unless they came so."""
    if not plan.places:
        return results.x[0]
    return combine_at_source(results, None if route.merges else weight_NK, plan, route, like=like).x


def _gradients_at_source(
    drows: Rows, results: Any, gradient_ND: jax.Array, plan: DispatchPlan, route: Route
) -> tuple[jax.Array, jax.Array]:
    """The gradients of tokens [N, D] and of their weights [N, K].

    Args:
      results: that were weighted at the source, as they came; None where weights went along.
    """
    if not plan.places:
        return drows.x[0], drows.weight[0]
    dx_ND, dweight_NK = combine_at_source(drows, None, plan, route, like=gradient_ND, gradient=True)
    if results is not None:
        codec, results = codec_at_source(route), _flat(results)
        with jax.named_scope("combine_backward"):
            dweight_NK = encoded_weight_gradient(codec, results, gradient_ND, plan.source)
    return dx_ND, dweight_NK


def _stages(
    route: Route, layout: Layout, plan: DispatchPlan, expert_stage: Stage, chunks: int, **way: bool
) -> list[Stage]:
    """The hops of dispatch, the experts, the hops of combine: each can hide behind the others."""
    pieces = _pieces(plan, chunks)

    def hop(move: Callable, place: int) -> Stage:
        return lambda number, rows: move(rows, place, pieces[number], route, layout, **way)

    there = [hop(dispatch_hop, place) for place in range(len(route.hops))]
    back = [hop(combine_hop, place) for place in reversed(range(len(route.hops)))]
    return [*there, expert_stage, *back]


def _pieces(plan: DispatchPlan, chunks: int) -> list[DispatchPlan]:
    """The plan of each chunk. Slots of the first exchange stay whole: they count all parts."""
    first, later = plan.places[:1], plan.places[1:]
    pieces = []
    for items, places in _cut((tuple(one.item_of_slot for one in first), later), chunks):
        home = (one._replace(item_of_slot=item) for one, item in zip(first, items, strict=True))
        pieces.append(plan._replace(places=(*home, *places)))
    return pieces


def _tag(tree: Any) -> Any:
    return jax.tree.map(lambda x: checkpoint_name(x, wire.TOKEN_WIRE), tree)


def _differentiable(expert_fn: ExpertFn, arrived: Rows, choices_IMK: jax.Array, params: Any) -> Any:
    """The results of `expert_fn`, and the function that takes their gradient back."""
    x_MD, weight_MK, choices_MK = _flat((*arrived, choices_IMK))

    def operate(x_MD: jax.Array, weight_MK: jax.Array | None, params: Any) -> jax.Array:
        return expert_fn(x_MD, weight_MK, choices_MK, params)

    return jax.vjp(operate, x_MD, weight_MK, params)


def _flat(x_IM: Any) -> Any:
    """[I, M, ...] -> [I * M, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x_IM)


def _unflat(x_M: Any, parts: int) -> Any:
    """[I * M, ...] -> [I, M, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), x_M)


def _cut(tree: Any, chunks: int) -> list[Any]:
    """Cuts the first dimension of every array in so many equal pieces."""

    def piece(number: int, x: jax.Array) -> jax.Array:
        size = x.shape[0] // chunks
        return x[number * size : (number + 1) * size]

    return [jax.tree.map(partial(piece, number), tree) for number in range(chunks)]


def _join(chunks: Sequence[Any]) -> Any:
    """Undoes `_cut`."""
    if len(chunks) == 1:
        return chunks[0]
    return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *chunks)
