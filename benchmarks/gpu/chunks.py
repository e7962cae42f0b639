"""An expert layer in 1, 2 and 4 chunks on one GPU: what chunks cost where nothing is hidden.

The device exchanges tokens with itself, which moves nothing: a barrier stands where the exchange
would be. Without it XLA takes rows of one chunk from their tokens straight to their experts, which
no exchange allows. All else is the trainer's: the plan of the parts, one schedule of tiles for all
chunks, experts chunk by chunk, weight gradients added up, and the router's weight gradients from
the hidden layer.
"""

from functools import partial
from typing import Any
from unittest import mock

import jax

from benchmarks.gpu.case import Case, Reporter
from benchmarks.gpu.layers import (
    Layer,
    build_layer,
    draw_weights,
    layer_config,
    one_device_step,
)
from benchmarks.gpu.shapes import DEEPSEEK, MIXTRAL, QWEN3, TINY, Shape
from benchmarks.gpu.timing import jax_form
from moejax.comm import wire
from moejax.layout.layout import Layout
from moejax.layout.route import Hop, Route

CHUNKS = (1, 2, 4)
BOTH_WAYS, FORWARD = "layer in chunks, forward + backward", "layer in chunks, forward"


def route_to_itself(layout: Layout, chunks: int) -> Route:
    """A route of one exchange, which a mesh of one device would do without."""
    hops = (Hop("all_to_all", layout.expert_owner_axes),)
    return Route("split", hops, chunks=chunks, chunks_backward=chunks)


def layer_in_chunks(shape: Shape, devices: Any, chunks: int, remat: str) -> Layer:
    """The layer on the first of the devices.

    Args:
      remat: as `model.remat`, of this layer alone.
    """
    train_step = one_device_step(layer_config(shape), devices)
    route = route_to_itself(train_step.spec.layout, chunks)
    return build_layer(train_step, route=route, remat=remat)


def stay_here(x_P: jax.Array, axes: Any, *, tag: str | None = None) -> jax.Array:
    """Stands in for `wire.all_to_all`: results stay where they are, but are not known before."""
    return jax.lax.optimization_barrier(x_P)


@mock.patch.object(wire, "all_to_all", stay_here)
def compare_chunks(report: Reporter, shape: Shape, tokens: int, remat: str | None) -> None:
    """Times the layer in each number of chunks, in turns.

    Args:
      remat: None times the forward pass alone.
    """
    layers = {n: layer_in_chunks(shape, jax.devices(), n, remat or "none") for n in CHUNKS}
    params, bias = draw_weights(report, layers[1])
    x, dy = (report.draw(seed, 1, tokens, shape.D) for seed in (10, 11))
    forms = {}
    for chunks, layer in layers.items():
        if remat is None:
            form = partial(jax_form, layer.forward, params, bias, x)
        else:
            form = partial(jax_form, layer.both_ways, params, bias, x, dy)
        forms["1 chunk" if chunks == 1 else f"{chunks} chunks"] = form
    passes = 1 if remat is None else 3
    flops = passes * 6.0 * tokens * shape.K * shape.D * shape.F
    report.compare(FORWARD if remat is None else BOTH_WAYS, forms, flops=flops)


def chunk_cases(*, small: bool) -> list[Case]:
    """What the target is about first: both ways as most runs recompute."""
    sizes = [(TINY, 64)] if small else [(MIXTRAL, 16384), (QWEN3, 32768), (DEEPSEEK, 16384)]
    return [
        Case(
            f"{shape.model}, {tokens} tokens" + (f", remat {remat}" if remat else ""),
            partial(compare_chunks, shape=shape, tokens=tokens, remat=remat),
        )
        for remat in ("attention", None, "experts", "none")
        for shape, tokens in sizes
    ]
