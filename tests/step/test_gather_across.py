"""Weights that cross nodes first are those of one gather, and cross as often as is said."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.config.fields import change
from moejax.plan.trace.reader import collectives
from moejax.step.train_step import build_step
from tests.cases import CERTAIN, place, random_batch, small_config, step_for

LATER = pytest.mark.exhaustive
MODEL = {"num_layers": 3, "first_dense_layers": 1, "tie_embeddings": False}
ACROSS = ("flat", "use", "passes", "step")


def case(across, mesh=(1, 8, 1, 1), *, nodes=2, **changes):
    cfg = small_config(mesh, model=MODEL, moe=CERTAIN, train={"batch_sequences": 16})
    cfg = change(cfg, {"model.remat": "full"} | changes)
    mesh = dataclasses.replace(cfg.mesh, nodes=nodes, gather_across=across)
    return dataclasses.replace(cfg, mesh=mesh)


def stepped(cfg):
    """Loss and gradients."""
    step = step_for(cfg)
    found, parts = step.gradients(step.init(), place(step, random_batch(cfg)))[:2]
    return jax.tree.map(np.asarray, (found, parts))


def assert_same_sums(found, wanted):
    """Sums in another order, or of products that a compiler orders otherwise."""

    def check(have, want):
        bound = 128 * np.finfo(np.float32).eps * max(np.abs(want).max(), 1e-6)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)

    jax.tree.map(check, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("across", "mesh", "nodes", "changes"),
    [
        ("use", (1, 4, 2, 1), 4, {"model.scan_layers": False}),
        ("passes", (1, 8, 1, 1), 2, {"model.remat": "token_collectives"}),
        ("step", (1, 2, 2, 2), 2, {"train.micro_batches": 2}),
        pytest.param("step", (2, 4, 1, 1), 4, {"train.micro_batches": 2}, marks=LATER),
        pytest.param("use", (1, 4, 2, 1), 2, {"train.reduction_bytes": 2000}, marks=LATER),
        pytest.param("step", (1, 4, 2, 1), 2, {"mesh.gather_dense": "step"}, marks=LATER),
        pytest.param("passes", (1, 4, 1, 2), 2, {"mesh.activations": "replicated"}, marks=LATER),
        pytest.param("step", (1, 8, 1, 1), 4, {"lora.rank": 4}, marks=LATER),
        pytest.param("passes", (1, 4, 2, 1), 2, {"lora.rank": 4}, marks=LATER),
        pytest.param(
            "use", (1, 4, 1, 1), 4, {"mesh.stage": 2, "train.micro_batches": 2}, marks=LATER
        ),
    ],
)
def test_gradients_are_those_of_one_gather(across, mesh, nodes, changes):
    found = stepped(case(across, mesh, nodes=nodes, **changes))
    assert_same_sums(found, stepped(case("flat", mesh, nodes=nodes, **changes)))


def calls(cfg):
    """The collectives of a step, and the step."""
    plain = step_for(cfg)
    step = build_step(cfg, plain.mesh.abstract_mesh, "cpu")
    traced = step.step.trace(step.abstract, step.abstract_batch())
    return collectives(traced.jaxpr.jaxpr), step


def gathers_across(cfg):
    """Bytes that a device's gathers of weights bring over the slow link in a step."""
    found, step = calls(cfg)
    layout, total = step.layout, 0.0
    for call in found:
        across = layout.size(layout.between_nodes(call.axes))
        if call.kind == "all_gather" and call.traffic == "weights" and across > 1:
            inside = layout.size(layout.inside_node(call.axes))
            devices = inside * across
            total += call.calls * call.bytes * (devices - 1) / devices / inside
    return total


def weights_of(cfg, *, router):
    """Parameters that are sharded over all eight devices: matrices, the router's or the others."""
    step = step_for(cfg)
    pairs = zip(jax.tree.leaves(step.dims), jax.tree.leaves(step.abstract.params), strict=True)
    return sum(x.size for dims, x in pairs if len(dims) > 1 and (dims == "DE") == router)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=LATER)])
@pytest.mark.parametrize("parts", [1, 2])
def test_weights_cross_nodes_as_often_as_is_said(parts, dtype):
    """Blocks are gathered for forward and again for backward, the vocabulary's matrices once."""
    settings = {"train.micro_batches": parts, "model.dtype": dtype}
    flat = case("flat", **settings)
    embeddings = 2 * flat.model.vocab_size * flat.model.width
    width = 4 if dtype == "float32" else 2
    blocks, router = weights_of(flat, router=False) - embeddings, weights_of(flat, router=True)
    # In float32 whatever the dtype; gathered for both passes.
    uses = parts * (width * (embeddings + 2 * blocks) + 4 * 2 * router)
    sent = {across: gathers_across(case(across, **settings)) for across in ACROSS}
    # A ring of eight devices, four on a node, passes 7/8 over each node's link; each brings a part.
    assert sent["flat"] == pytest.approx(uses * 7 / 8 / 4)
    assert sent["use"] == pytest.approx(uses / 2 / 4)
    once = parts * (width * (embeddings + blocks) + 4 * router)
    assert sent["passes"] == pytest.approx(once / 2 / 4)
    kept = width * (embeddings + blocks) + parts * 4 * 2 * router
    assert sent["step"] == pytest.approx(kept / 2 / 4)


@pytest.mark.slow
def test_gradients_cross_nodes_once_a_step_where_weights_do():
    def crossing(across, parts):
        found, step = calls(case(across, **{"train.micro_batches": parts}))
        layout = step.layout
        return sum(
            call.calls * call.bytes
            for call in found
            if call.kind == "reduce_scatter" and layout.between_nodes(call.axes)
        )

    once = crossing("flat", 1)
    assert once > 0
    assert crossing("use", 2) == 2 * once
    assert crossing("step", 2) == crossing("step", 1) == once


@pytest.mark.slow
@pytest.mark.parametrize("across", ["use", pytest.param("step", marks=LATER)])
def test_the_codec_of_weights_crosses_nodes_alone(across):
    """The gather inside a node sends plain numbers; all shards are rounded, own ones too."""
    changes = {"compression.weights": "int8"}
    found, step = calls(case(across, **changes))
    layout, kinds = step.layout, {}
    for call in found:
        if call.kind == "all_gather" and call.traffic == "weights":
            kinds.setdefault(bool(layout.between_nodes(call.axes)), set()).add(call.dtype)
    assert kinds[True] == {"uint8", "float32"}  # in float32 the router's matrix
    assert kinds[False] == {"float32"}
    assert_same_sums(stepped(case(across, **changes)), stepped(case("flat", **changes)))
