"""Weights gathered once, or across nodes first, and what is kept: same gradients, fewer bytes."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.config.fields import change
from moejax.plan.trace.reader import collectives
from moejax.step import train_step
from moejax.step.train_step import build_step
from tests.cases import CERTAIN, on_nodes, place, random_batch, small_config, step_for

MODEL = {"num_layers": 3, "first_dense_layers": 1, "tie_embeddings": False}


def case(mesh=(1, 8, 1, 1), nodes=2, **changes):
    cfg = small_config(mesh, model=MODEL, moe=CERTAIN, train={"batch_sequences": 16})
    return change(cfg, {"model.remat": "full", "mesh.nodes": nodes} | changes)


def stepped(cfg):
    """Loss and gradients."""
    step = step_for(cfg)
    found = step.gradients(step.init(), place(step, random_batch(cfg)))
    return jax.tree.map(np.asarray, found)


def assert_same_sums(found, wanted):
    """Sums in another order, or of products that a compiler orders otherwise."""

    def check(have, want):
        bound = 128 * np.finfo(np.float32).eps * max(np.abs(want).max(), 1e-6)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)

    jax.tree.map(check, found, wanted)


ACROSS, DENSE = "mesh.gather_across", "mesh.gather_dense"
PARTS = {"train.micro_batches": 2}


def later(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "nodes", "setting", "others"),
    [
        ((1, 4, 2, 1), 4, {ACROSS: "use"}, {"model.scan_layers": False}),
        ((1, 8, 1, 1), 2, {ACROSS: "passes"}, {"model.remat": "token_collectives"}),
        ((1, 2, 2, 2), 2, {ACROSS: "step"}, PARTS),
        later((2, 4, 1, 1), 4, {ACROSS: "step"}, PARTS),
        later((1, 4, 2, 1), 2, {ACROSS: "use"}, {"train.reduction_bytes": 2000}),
        later((1, 4, 2, 1), 2, {ACROSS: "step", DENSE: "step"}, {}),
        later((1, 8, 1, 1), 4, {ACROSS: "step"}, {"lora.rank": 4}),
        later((1, 4, 1, 1), 4, {ACROSS: "use"}, {"mesh.stage": 2, **PARTS}),
        ((2, 1, 2, 2), 1, {DENSE: "step"}, {"model.tie_embeddings": True}),
        later((2, 2, 1, 2), 1, {DENSE: "step"}, {"model.tie_embeddings": True, **PARTS}),
        ((1, 1, 2, 1), 1, {"model.remat": "full"}, {}),
    ],
)
def test_when_weights_cross_and_what_is_kept_change_no_gradient(mesh, nodes, setting, others):
    plain = {ACROSS: "flat", DENSE: "use", "model.remat": "none"}
    found = stepped(case(mesh, nodes, **(others | setting)))
    wanted = others | {name: plain[name] for name in setting}
    assert_same_sums(found, stepped(case(mesh, nodes, **wanted)))


@pytest.mark.slow
def test_unrolled_layers_behind_barriers_have_the_same_gradients(monkeypatch):
    """On CPU there are no barriers; the order that they ask for is computed all the same."""
    wanted = stepped(case((1, 1, 2, 1), 1, **{"model.remat": "none"}))
    plain = train_step.build_spec

    def with_barriers(*args, **options):
        return dataclasses.replace(plain(*args, **options), barriers=True)

    monkeypatch.setattr(train_step, "build_spec", with_barriers)
    changes = {"model.remat": "experts", "model.scan_layers": False}
    assert_same_sums(stepped(case((1, 1, 2, 1), 1, **changes)), wanted)


@pytest.mark.slow
def test_sums_of_whole_gradients_enter_the_codec_across_nodes():
    def reduced(codec, gathered):
        cfg = change(on_nodes((2, 2, 1, 2), codec=codec), {DENSE: gathered, **PARTS})
        return stepped(cfg)[0]

    def check(have, exact):
        # Each of the two nodes' shares is rounded to 8 bits of mantissa.
        bound = 2**-7 * np.abs(exact).max()
        np.testing.assert_allclose(have, exact, rtol=0, atol=bound)
        return np.any(have != exact)

    differ = jax.tree.map(check, reduced("bfloat16", "step"), reduced("none", "use"))
    assert any(jax.tree.leaves(differ))


def calls(cfg):
    """The collectives of a step, and the step."""
    plain = step_for(cfg)
    step = build_step(cfg, plain.mesh.abstract_mesh, "cpu")
    traced = step.step.trace(step.abstract, step.abstract_batch())
    return collectives(traced.jaxpr.jaxpr), step


@pytest.mark.exhaustive
def test_dense_weights_gathered_once_cross_once_a_step_and_so_do_their_gradients():
    def sent(kind, gathered, parts):
        """Bytes that a step's collectives of one kind carry over fsdp."""
        found, _ = calls(case((1, 2, 1, 1), 1, **{DENSE: gathered, "train.micro_batches": parts}))
        found = [one for one in found if one.kind == kind and one.axes == ("fsdp",)]
        return sum(one.bytes * one.calls for one in found)

    for kind in ("all_gather", "reduce_scatter"):
        # All is one number a part: experts' weights and the router's matrix, at each use.
        use = sent(kind, "use", 2) / 2
        assert sent(kind, "use", 4) == 4 * use
        once = sent(kind, "step", 2)
        rest = (sent(kind, "step", 4) - once) / 2
        dense = once - 2 * rest
        assert dense > 0
        if kind == "reduce_scatter":
            assert rest + dense == use
        else:  # without the setting a part gathers layers twice, as they are recomputed
            assert rest + dense < use <= rest + 2 * dense


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
@pytest.mark.parametrize("dtype", ["float32", later("bfloat16")])
@pytest.mark.parametrize("parts", [1, 2])
def test_weights_cross_nodes_as_often_as_is_said(parts, dtype):
    """Blocks are gathered for forward and again for backward, the vocabulary's matrices once."""
    settings = {"train.micro_batches": parts, "model.dtype": dtype}
    flat = case(**settings)
    embeddings = 2 * flat.model.vocab_size * flat.model.width
    width = 4 if dtype == "float32" else 2
    blocks, router = weights_of(flat, router=False) - embeddings, weights_of(flat, router=True)
    # In float32 whatever the dtype; gathered for both passes.
    uses = parts * (width * (embeddings + 2 * blocks) + 4 * 2 * router)
    sent = {
        across: gathers_across(case(**settings, **{ACROSS: across}))
        for across in ("flat", "use", "passes", "step")
    }
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
        found, step = calls(case(**{ACROSS: across, "train.micro_batches": parts}))
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
@pytest.mark.parametrize("across", ["use", later("step")])
def test_the_codec_of_weights_crosses_nodes_alone(across):
    """The gather inside a node sends plain numbers; all shards are rounded, own ones too."""
    cfg = case(**{"compression.weights": "int8", ACROSS: across})
    found, step = calls(cfg)
    layout, kinds = step.layout, {}
    for call in found:
        if call.kind == "all_gather" and call.traffic == "weights":
            kinds.setdefault(bool(layout.between_nodes(call.axes)), set()).add(call.dtype)
    assert kinds[True] == {"uint8", "float32"}  # in float32 the router's matrix
    assert kinds[False] == {"float32"}
    assert_same_sums(stepped(cfg), stepped(change(cfg, {ACROSS: "flat"})))
