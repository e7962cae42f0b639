"""Rows to the experts, the experts' work, results home: in chunks, so that one hides another.

Per device, inside shard_map. Chunk i + 1 travels outward while the experts work on chunk i and
chunk i - 1 travels home. Backward is the same pipeline: gradients of results travel outward,
gradients of rows homeward, with the experts' backward between them and a chunk count of its own.
Nothing that was communicated is communicated again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm.exchange import Journey, homeward, outward
from moejax.route import Route
from moejax.dims import Layout

# (rows [M, D], weights [M, K] or None, choices [M, K], params) -> results [M, D]; no communication.
Work = Callable[[jax.Array, jax.Array | None, jax.Array, Any], jax.Array]
# (number of a chunk, what the stage before made of it) -> what this stage makes of it.
Stage = Callable[[int, Any], Any]


def run_stages(stages: Sequence[Stage], chunks: Sequence[Any], *, pin: bool) -> list[Any]:
    """Takes each chunk through the stages, one stage behind the chunk before it.

    Args:
      pin: holds each step's stages together (an optimization barrier), so that a compiler that
        orders the program statically puts them side by side. A runtime that starts whatever is
        ready needs none.
    """
    flight = dict(enumerate(chunks))
    for step in range(len(chunks) + len(stages) - 1):
        moved = {}
        for place, stage in enumerate(stages):
            number = step - place
            if 0 <= number < len(chunks):
                moved[number] = stage(number, flight[number])
        if pin and len(moved) > 1:
            moved = lax.optimization_barrier(moved)
        flight |= moved
    return [flight[number] for number in range(len(chunks))]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def carry(
    route: Route, layout: Layout, work: Work, pin: bool, rows: Any, params: Any, journey: Journey
) -> jax.Array:
    """Returns what the experts made of each bucket row: [I, P * J, D], at home again.

    Args:
      work: what a device does with the rows that reached it.
      rows: (x [I, P * J, D], weights [I, P * J, K] or None where they stay at home), in the first
        exchange's buckets.
      params: of `work`; differentiated.
    """
    return _forward(route, layout, work, pin, rows, params, journey)[0]


def _forward(route, layout, work, pin, rows, params, journey):
    k = route.chunks
    later = _cut(journey.places[1:], k)
    choices = _cut(journey.expert_IMK, k)
    kept: dict[int, Any] = {}

    def labour(number: int, arrived: Any) -> jax.Array:
        y_MD, pull = _differentiable(work, arrived, choices[number], params)
        # With as many chunks in backward, what the experts saved serves; else they work again.
        kept[number] = pull if k == route.chunks_backward else arrived
        return _unflat(y_MD, arrived[0].shape[0])

    stages = (
        lambda number, chunk: outward(chunk, later[number], route, layout),
        labour,
        lambda number, chunk: homeward(chunk, later[number], route, layout),
    )
    results = _join(run_stages(stages, _cut(rows, k), pin=pin))
    return results, ([kept[number] for number in range(k)], params, journey)


def _backward(route, layout, work, pin, saved, gradient):
    kept, params, journey = saved
    k = route.chunks_backward
    later = _cut(journey.places[1:], k)
    totals: list[Any] = []
    if k != route.chunks:
        kept = _cut((_join(kept), journey.expert_IMK), k)

    def labour(number: int, gradient: jax.Array) -> Any:
        pull = kept[number]
        if k != route.chunks:
            arrived, choices = pull
            pull = _differentiable(work, arrived, choices, params)[1]
        dx_MD, dweight_MK, dparams = pull(_flat(gradient))
        totals.append(dparams)
        return _unflat((dx_MD, dweight_MK), gradient.shape[0])

    stages = (
        lambda number, chunk: outward(chunk, later[number], route, layout, gradient=True),
        labour,
        lambda number, chunk: homeward(chunk, later[number], route, layout, gradient=True),
    )
    drows = _join(run_stages(stages, _cut(gradient, k), pin=pin))
    return drows, jax.tree.map(_total, *totals), None


carry.defvjp(_forward, _backward)


def _differentiable(work: Work, arrived: Any, choices_IMK: jax.Array, params: Any) -> Any:
    """The results of `work`, and the function that takes their gradient back."""
    x_MD, weight_MK, choices_MK = _flat((*arrived, choices_IMK))
    return jax.vjp(lambda x, weight, params: work(x, weight, choices_MK, params), x_MD, weight_MK, params)


def _total(*parts: jax.Array) -> jax.Array:
    """The sum of the chunks' weight gradients, added up in float32."""
    if len(parts) == 1:
        return parts[0]
    return sum(part.astype(jnp.float32) for part in parts).astype(parts[0].dtype)


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
