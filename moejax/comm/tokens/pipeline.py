"""Dispatch, experts, combine: in chunks, so that communication hides behind the experts.

Per device, inside shard_map. Chunk i + 1 is dispatched while the experts work on chunk i and chunk
i - 1 is combined. Backward is the same pipeline: gradients of results are dispatched, gradients of
rows are combined, with the experts' backward between them and its own number of chunks. It uses
the rows that arrived in forward and does not send them again.

A chunk goes through operations in order: the hops of dispatch, the experts, the hops of combine.
Pipeline stages, which hold layers, are in `step.pipeline`.

Letters: those of `comm.tokens`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.comm import wire
from moejax.comm.tokens.hops import Rows, combine_at_source, combine_hop, dispatch_hop, return_dots
from moejax.comm.tokens.plan import DispatchPlan
from moejax.kernels.kept import PLACES
from moejax.layout.layout import Layout
from moejax.layout.route import Route

# (number of a chunk, output of the previous operation) -> output of this operation.
Operation = Callable[[int, Any], Any]


class Experts(NamedTuple):
    """The experts' computation on a chunk's rows on one device; nothing here communicates.

    Attributes:
      order: choices [R, K] -> integers that `compute` needs. They are known before rows arrive.
      compute: (rows [R, D], weights [R, K], (integers of all chunks, number of this chunk),
        params, frozen, sums or None) -> results [R, D], and the sums. Their gradient is the
        params' gradient: see `expert_mlp_adding`. If results are weighted at the source, weights
        are ones [R, 1], which only serve for their gradient, or None.
      adds_up: whether `compute` takes sums, so that a chunk adds its gradients of the params to
        the previous chunk's. Otherwise the gradients of all chunks are added up at the end.
    """

    order: Callable[[jax.Array], Any]
    compute: Callable[..., tuple[jax.Array, Any]]
    adds_up: bool


def run_operations(
    operations: Mapping[int, Operation],
    chunks: Sequence[Any],
    *,
    barriers: bool,
    accumulated: dict[str, Any],
) -> list[Any]:
    """Takes each chunk through the operations, one operation behind the previous chunk.

    Args:
      operations: by their place, from 0, in the order in which a step runs them.
      barriers: puts an optimization barrier after each step. A compiler that orders the program
        statically then keeps the operations of a step side by side. A runtime that starts whatever
        is ready needs none.
      accumulated: values that operations collect for the caller; barriers tie them to their step.
    """
    in_flight = dict(enumerate(chunks))
    for step in range(len(chunks) + len(operations) - 1):
        moved = {}
        for index, operation in operations.items():
            number = step - index
            if 0 <= number < len(chunks):
                moved[number] = operation(number, in_flight[number])
        if barriers and len(moved) > 1:
            moved, tied = lax.optimization_barrier((moved, accumulated))
            accumulated.update(tied)
        in_flight |= moved
    return [in_flight[number] for number in range(len(chunks))]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def dispatch_compute_combine(
    route: Route,
    layout: Layout,
    experts: Experts,
    barriers: bool,
    x_ND: jax.Array,
    weight_NK: jax.Array,
    params: Any,
    frozen: Any,
    plan: DispatchPlan,
) -> jax.Array:
    """Returns `y_ND`: each token's expert outputs, summed by weight, on the token's own device.

    Args:
      experts: this device's experts, applied to the rows that arrive.
      barriers: see `run_operations`.
      params: parameters of the experts; differentiated, as are tokens and weights.
      frozen: parameters of the experts that are not differentiated.
    """
    operands = (x_ND, weight_NK, params, frozen, plan)
    return _forward(route, layout, experts, barriers, *operands, gradients=False)[0]


def _forward(
    route, layout, experts, barriers, x_ND, weight_NK, params, frozen, plan, *, gradients=True
):
    chunks = route.chunks
    orders_C = _orders(experts, plan, chunks)
    for_backward: dict[int, Any] = {}

    def expert_operation(number: int, arrived: Rows) -> Rows:
        # Tagged here, after the barrier, so that remat keeps the rows as the barrier returned them.
        arrived = _tag(arrived)
        if not gradients:
            y_RD, _ = experts.compute(*_flat(tuple(arrived)), (orders_C, number), params, frozen)
            return Rows(_unflat(y_RD, arrived.x.shape[0]), None)
        y_RD, vjp = _differentiable(experts, arrived, (orders_C, number), params, frozen)
        # With equal chunks in backward the vjp is reused; otherwise the experts are recomputed.
        for_backward[number] = vjp if chunks == route.chunks_backward else arrived
        return Rows(_unflat(y_RD, arrived.x.shape[0]), None)

    operations = _operations(route, layout, plan, expert_operation, chunks, barriers=barriers)
    start = _at_start(Rows(x_ND, weight_NK), plan)
    if not barriers:  # orders are there before rows travel, so that the experts start at once
        start, orders_C = lax.optimization_barrier((start, orders_C))
    # Tagged apart: joined they would be copied once more, only to be kept.
    results = _tag(run_operations(operations, [start] * chunks, barriers=barriers, accumulated={}))
    joined = _join(results)
    if plan.slot_maps:
        weights = None if route.merges else weight_NK
        y_ND = combine_at_source(joined, weights, plan, route, like=x_ND).x
    else:
        y_ND = joined.x[0]
    saved = [for_backward[number] for number in range(chunks)] if gradients else None
    return y_ND, (saved, params, frozen, plan, weight_NK)


def _backward(route, layout, experts, barriers, saved, gradient_ND):
    for_backward, params, frozen, plan, weight_NK = saved
    chunks = route.chunks_backward
    orders_C: Any = None
    if chunks != route.chunks:
        for_backward, orders_C = _cut(_join(for_backward), chunks), _orders(experts, plan, chunks)
    accumulated: dict[str, Any] = {"params": [_sums(params)] if experts.adds_up else []}
    dots: dict[int, jax.Array] = {}

    def expert_operation(number: int, gradient: Rows) -> Rows:
        vjp = for_backward[number]
        if chunks != route.chunks:
            order = orders_C, number
            vjp = _differentiable(experts, for_backward[number], order, params, frozen)[1]
        earlier = accumulated["params"]
        start = earlier.pop() if experts.adds_up else None
        dx_RD, dweight_RK, dparams = vjp((_flat(gradient.x), start))
        accumulated["params"] = [*earlier, dparams]
        rows = _unflat(Rows(dx_RD, dweight_RK), gradient.x.shape[0])
        if plan.slot_maps and not route.merges:  # one number a row: they travel together later
            dots[number], rows = rows.weight, rows._replace(weight=None)
        return rows

    operations = _operations(
        route, layout, plan, expert_operation, chunks, barriers=barriers, gradient=True
    )
    start = _at_start(Rows(gradient_ND, weight_NK if plan.slot_maps else None), plan)
    drows = _join(
        run_operations(operations, [start] * chunks, barriers=barriers, accumulated=accumulated)
    )
    dparams = jax.tree.map(_sum_chunks, *accumulated["params"])
    dparams = jax.tree.map(lambda g, p: g.astype(p.dtype), dparams, params)
    if plan.slot_maps:
        drows = combine_at_source(drows, None, plan, route, like=gradient_ND, gradient=True)
    else:
        drows = jax.tree.map(lambda x: x[0], drows)
    dx_ND, dweight_NK = drows
    if dots:
        all_dots = _join([dots[number] for number in range(chunks)])
        dweight_NK = _weight_gradient(all_dots, weight_NK, plan, route, layout)
    return dx_ND, dweight_NK.astype(weight_NK.dtype), dparams, None, None


dispatch_compute_combine.defvjp(_forward, _backward)


def _sum_chunks(*gradients: jax.Array) -> jax.Array:
    """Adds up chunks' weight gradients in float32, all at once: each is read one time."""
    if len(gradients) == 1:
        return gradients[0]
    return functools.reduce(jnp.add, (gradient.astype(jnp.float32) for gradient in gradients))


def _sums(params: Any) -> Any:
    """Zeros in float32, to which gradients of the params are added."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)


def _at_start(tokens: Rows, plan: DispatchPlan) -> Rows:
    """The first operation's input: all tokens; as one part [1, N, ...] if there is no exchange."""
    return tokens if plan.slot_maps else jax.tree.map(lambda x: x[None], tokens)


def _weight_gradient(
    dots_IM1: jax.Array, weight_NK: jax.Array, plan: DispatchPlan, route: Route, layout: Layout
) -> jax.Array:
    """The gradient of weights that were applied at the source, [N, K].

    Experts saw the gradients of their results times the weight, so their dot products are the
    weight's gradient times the weight. A weight of zero hides its gradient, which is given as zero:
    no router passes it on, because a weight is a score or a share of scores, with a gradient of
    zero.

    Args:
      dots_IM1: the experts' dot products of all parts.
    """
    dots_NK = return_dots(dots_IM1, plan, route, layout)
    return jnp.where(weight_NK == 0, 0, dots_NK / weight_NK)


def _operations(
    route: Route,
    layout: Layout,
    plan: DispatchPlan,
    expert_operation: Operation,
    chunks: int,
    *,
    barriers: bool,
    **flags: bool,
) -> dict[int, Operation]:
    """The hops of dispatch, the experts, the hops of combine: each may overlap the others.

    Without barriers collectives may run one after the other (`comm.cpu.gloo`). So in a step results
    go on before new rows come, unless they leave the experts by a hop between nodes: it would keep
    the link waiting for the experts.
    """
    plans = _chunk_plans(plan, chunks)

    def operation(move: Callable, hop_index: int) -> Operation:
        return lambda number, rows: move(rows, hop_index, plans[number], route, layout, **flags)

    dispatch = [operation(dispatch_hop, hop_index) for hop_index in range(len(route.hops))]
    combine = [operation(combine_hop, hop_index) for hop_index in reversed(range(len(route.hops)))]
    operations = list(enumerate([*dispatch, expert_operation, *combine]))
    if not barriers and route.hops and not layout.between_nodes(route.hops[-1].axes):
        operations.reverse()
    return dict(operations)


def _chunk_plans(plan: DispatchPlan, chunks: int) -> list[DispatchPlan]:
    """The plan of each chunk. Slots of the first exchange are not cut: they count all parts."""
    first, later = plan.slot_maps[:1], plan.slot_maps[1:]
    plans = []
    for items, maps in _cut((tuple(m.item_of_slot for m in first), later), chunks):
        source = (m._replace(item_of_slot=item) for m, item in zip(first, items, strict=True))
        plans.append(plan._replace(slot_maps=(*source, *maps)))
    return plans


def _tag(tree: Any) -> Any:
    return jax.tree.map(lambda x: checkpoint_name(x, wire.TOKEN_WIRE), tree)


def _orders(experts: Experts, plan: DispatchPlan, chunks: int) -> Any:
    """Returns `experts.order` of all chunks, stacked: one call takes fewer kernels."""
    choices_IMK = plan.expert_IMK
    stacked = jax.vmap(experts.order)(choices_IMK.reshape(chunks, -1, choices_IMK.shape[-1]))
    return jax.tree.map(lambda x: checkpoint_name(x, PLACES), stacked)


def _differentiable(experts: Experts, arrived: Rows, order: Any, params: Any, frozen: Any) -> Any:
    """Returns the experts' results and their vjp: gradient of results -> of their inputs."""
    x_RD, weight_RK = _flat(tuple(arrived))
    if weight_RK is None:
        weight_RK = jnp.ones((x_RD.shape[0], 1), jnp.float32)

    def run_experts(x_RD: jax.Array, weight_RK: jax.Array, differentiated: Any) -> Any:
        if experts.adds_up:
            given = (params, frozen, differentiated)
        else:
            given = (differentiated, frozen, None)
        return experts.compute(x_RD, weight_RK, order, *given)

    differentiated = _sums(params) if experts.adds_up else params
    (y_RD, _), vjp = jax.vjp(run_experts, x_RD, weight_RK, differentiated)
    return y_RD, vjp


def _flat(x_IM: Any) -> Any:
    """[I, M, ...] -> [R, ...]: R = I * M."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x_IM)


def _unflat(x_R: Any, parts: int) -> Any:
    """[R, ...] -> [I, M, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), x_R)


def _cut(tree: Any, chunks: int) -> list[Any]:
    """Cuts the first dimension of every array in `chunks` equal pieces."""

    def piece(number: int, x: jax.Array) -> jax.Array:
        size = x.shape[0] // chunks
        return x[number * size : (number + 1) * size]

    return [jax.tree.map(partial(piece, number), tree) for number in range(chunks)]


def _join(chunks: Sequence[Any]) -> Any:
    """Undoes `_cut`."""
    if len(chunks) == 1:
        return chunks[0]
    return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *chunks)
