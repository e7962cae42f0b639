"""Compression in the step: right within the codecs' errors, with a state that adds up."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.config.schema import CompressionConfig
from moejax.plan.trace.reader import collectives
from tests.cases import (
    CERTAIN,
    one_device_state,
    part_of,
    place,
    random_batch,
    small_config,
    spread,
    step_for,
)

MESHES = [((8, 1, 1, 1), 4), ((1, 8, 1, 1), 2), ((2, 2, 2, 1), 4), ((2, 1, 2, 2), 4)]


def with_codecs(mesh, nodes, changes=None, **codecs):
    changes = changes or {}
    cfg = small_config(mesh, **changes | {"moe": CERTAIN | changes.get("moe", {})})
    policy = CompressionConfig(**{"block": 16, **codecs})
    across = dataclasses.replace(cfg.mesh, nodes=nodes)
    return dataclasses.replace(cfg, compression=policy, mesh=across)


def compressed(mesh, nodes, codec, **changes):
    return with_codecs(mesh, nodes, changes, dense_gradient=codec, expert_gradient=codec)


def plain(cfg):
    return dataclasses.replace(cfg, compression=CompressionConfig())


def first(cfg):
    """A trainer, and the same weights on every mesh."""
    train_step = step_for(cfg)
    state = one_device_state(plain(cfg))._replace(reduction=train_step.first_reduction())
    return train_step, spread(state, train_step)


@functools.cache  # many cases share what they are compared with
def gradients_of(cfg):
    train_step, state = first(cfg)
    return train_step.gradients(state, place(train_step, random_batch(cfg)))[0]


def losses_of(cfg, steps=8):
    """Losses of some steps, and the state after them."""
    losses, states = zip(*run(cfg, steps), strict=True)
    return np.array(losses), states[-1]


def run(cfg, steps):
    """Yields each step's loss, and the state after it."""
    train_step, state = first(cfg)
    policy = train_step.spec.compression
    for step in range(steps):
        now = train_step.at(policy.at(step))
        state, metrics = now.step(state, place(train_step, random_batch(cfg, step % 2)))
        yield float(metrics.loss), state


def assert_off_by(found, wanted, share):
    """Differs, by at most four times the codec's share of each array's largest value."""

    def compare(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 4 * share * np.abs(a).max() + 1e-6
        return not np.array_equal(a, b)

    assert any(jax.tree.leaves(jax.tree.map(compare, wanted, found)))


def assert_equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "nodes", "codec"), part_of(MESHES, ["bfloat16", "int8+feedback"], parts=4)
)
def test_gradients_are_off_by_what_the_codec_leaves_out(mesh, nodes, codec):
    cfg = compressed(mesh, nodes, codec)
    share = {"bfloat16": 2**-8}.get(codec, 1 / 127)
    assert_off_by(gradients_of(cfg), gradients_of(plain(cfg)), share)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [
        ("int4+feedback", 1e-9, 0.05),
        pytest.param("loco", 1e-9, 0.5, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_with_feedback_follows_the_plain_run(codec, least, most):
    cfg = compressed((2, 2, 2, 1), 4, codec)
    off = np.abs(losses_of(cfg)[0] - plain_losses()).max()
    assert least <= off < most


@functools.cache
def plain_losses():
    return losses_of(plain(compressed((2, 2, 2, 1), 4, "int8")))[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", ["int4+feedback", "loco"])
def test_micro_batches_with_feedback_follow_the_plain_run(codec):
    train = {"micro_batches": 2, "batch_sequences": 16}
    cfg = compressed((2, 2, 2, 1), 4, codec, train=train)
    off = np.abs(losses_of(cfg)[0] - losses_of(plain(cfg))[0]).max()
    assert 0 < off < (0.05 if codec == "int4+feedback" else 0.5)


@pytest.mark.slow
def test_what_is_kept_shards_by_device_and_grows_from_nothing():
    cfg = compressed((2, 2, 2, 1), 4, "int4+feedback")
    train_step = step_for(cfg)
    state = train_step.init()
    kept = jax.tree.leaves(state.reduction)
    assert kept
    assert not any(np.asarray(x).any() for x in kept)
    for x in kept:
        assert x.addressable_shards[0].data.size == x.size // 8
    state, _ = train_step.step(state, place(train_step, random_batch(cfg)))
    assert all(np.asarray(x).any() for x in jax.tree.leaves(state.reduction) if x.size)


@pytest.mark.slow
def test_an_update_that_is_not_finite_keeps_what_was_kept():
    """The loss is not finite; then the loss is, and the norm of the gradient is not."""
    changes = {"model": {"tie_embeddings": False}, "router": {"bias_update_rate": 0.01}}
    cfg = compressed((2, 2, 2, 1), 4, "int4+feedback", **changes)
    train_step = step_for(cfg)
    state, _ = train_step.step(train_step.init(), place(train_step, random_batch(cfg)))
    good = jax.tree.map(np.asarray, state.params)
    infinite, huge = (jax.tree.map(lambda p: p, good) for _ in range(2))
    infinite["norm"]["scale"] = np.full_like(good["norm"]["scale"], np.inf)
    # Logits of about 1e25: so is the loss, and the gradient of what came before. Its square is not.
    huge["embedding"]["project"] = good["embedding"]["project"] * np.float32(1e25)
    for count, params in enumerate((infinite, huge), 1):
        state = spread(state._replace(params=params), train_step)
        kept = (state.reduction, state.optimizer, state.router_bias)
        before = jax.tree.map(np.array, (params, *kept))
        state, metrics = train_step.step(state, place(train_step, random_batch(cfg)))
        assert bool(np.isfinite(metrics.loss)) == (params is huge)
        assert not np.isfinite(metrics.gradient_norm)
        assert int(metrics.skipped) == int(state.skipped) == count
        kept = (state.reduction, state.optimizer, state.router_bias)
        assert_equal(before, (state.params, *kept))


TOKENS = [
    {"dispatch": "int8", "combine": "int8"},
    {"dispatch_backward": "int8", "combine_backward": "int8"},
    {"dispatch": "e4m3", "combine": "bfloat16", "combine_backward": "e5m2"},
]
SHARES = {"int8": 1 / 127, "e4m3": 2**-4, "e5m2": 2**-3}


def exchanges(cfg):
    train_step = step_for(cfg)
    traced = train_step.step.trace(train_step.abstract, train_step.abstract_batch())
    found = [one for one in collectives(traced.jaxpr.jaxpr) if one.kind == "all_to_all"]
    floats = [one for one in found if "float" in one.dtype]
    # Not those of one number a row: the gradients of the router's weights.
    largest = max(one.bytes for one in floats)
    return [one for one in floats if one.bytes > largest / 32], [
        one for one in found if one.dtype == "uint8"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "codecs"),
    part_of(["split", "merge", "two_level_merge", "two_level"], TOKENS, parts=5),
)
def test_tokens_cross_nodes_as_their_codecs_say(route, codecs):
    cfg = with_codecs((1, 1, 8, 1), 4, {"moe": {"num_experts": 16}}, **codecs)
    cfg = dataclasses.replace(cfg, route=route, route_chunks=2)
    share = max(SHARES[codec] for codec in codecs.values() if codec in SHARES)
    assert_off_by(gradients_of(cfg), gradients_of(plain(cfg)), 4 * share)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "bytes_each"), [("int8", 1 + 4 / 16), ("bfloat16", 2)])
def test_rows_of_tokens_are_that_much_smaller_on_the_wire(codec, bytes_each):
    cfg = with_codecs((1, 1, 8, 1), 4, dispatch=codec, combine=codec)
    rows, _ = exchanges(plain(cfg))
    backward, coded = exchanges(cfg)
    width = cfg.model.width
    usual = sorted({one.bytes for one in rows})
    assert {one.bytes for one in backward} == set(usual), "gradients of tokens travel as they are"
    assert len(backward) == len(rows) / 2
    expected = {size / (4 * width) * width * bytes_each for size in usual}
    assert expected <= {one.bytes for one in coded}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "nodes"), [MESHES[2], pytest.param(*MESHES[1], marks=pytest.mark.exhaustive)]
)
def test_gathered_weights_are_off_by_their_codec_and_gradients_follow(mesh, nodes):
    cfg = with_codecs(mesh, nodes, weights="int8")
    assert_off_by(gradients_of(cfg), gradients_of(plain(cfg)), 8 / 127)


@pytest.mark.exhaustive
def test_gradients_of_the_first_blocks_travel_as_they_are():
    cfg = with_codecs(
        (2, 2, 2, 1),
        4,
        {"model": {"num_layers": 3}},
        dense_gradient="int4",
        expert_gradient="int4",
        start_layer=2,
    )
    wanted = gradients_of(plain(cfg))["groups"]
    found = gradients_of(cfg)["groups"]

    def compare(a, b):
        np.testing.assert_array_equal(np.asarray(a)[:2], np.asarray(b)[:2])
        return not np.array_equal(np.asarray(a)[2], np.asarray(b)[2])

    assert any(jax.tree.leaves(jax.tree.map(compare, found, wanted)))


@pytest.mark.exhaustive
def test_a_start_layer_inside_a_pattern_leaves_the_whole_pattern_as_it_is():
    """Of four blocks in two repeats of a pattern of two: none, one repeat or both are coded."""

    def coded(start):
        changes = {"model": {"num_layers": 4, "moe_every": 2}}
        cfg = with_codecs((2, 1, 1, 1), 2, changes, dense_gradient="int8", start_layer=start)
        train_step = step_for(cfg)
        traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
        found = collectives(traced.jaxpr.jaxpr)
        return sum(one.bytes * one.calls for one in found if one.dtype == "uint8")

    none, one, two, three, four = map(coded, range(5))
    assert one == two
    assert three == four
    assert none - two == two - four > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "nodes", "limit"),
    part_of([((2, 2, 2, 1), 4), ((1, 4, 2, 1), 1)], [1000, 1 << 20], parts=4),
)
def test_gradients_reduced_in_pieces_are_the_same_bits(mesh, nodes, limit):
    cfg = with_codecs(mesh, nodes)
    pieces = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, reduction_bytes=limit))
    assert_equal(gradients_of(pieces), gradients_of(cfg))


def test_pieces_are_no_larger_than_said():
    cfg = with_codecs((8, 1, 1, 1), 8, {"train": {"reduction_bytes": 1000}})
    train_step = step_for(cfg)
    traced = train_step.step.trace(train_step.abstract, train_step.abstract_batch())
    sums = [one.bytes for one in collectives(traced.jaxpr.jaxpr) if one.kind == "all_reduce"]
    assert max(sums) <= 1024  # which is the one sum of all norm scales
    assert sum(500 < size <= 1000 for size in sums) > 10


@pytest.mark.exhaustive
def test_a_warm_up_is_the_plain_run_bit_by_bit():
    cfg = compressed((2, 2, 2, 1), 4, "none,int4+feedback@2")
    found, state = losses_of(cfg, 4)
    wanted, _ = losses_of(plain(cfg), 4)
    # The third step's loss still sees only updates that were not compressed.
    np.testing.assert_array_equal(found[:3], wanted[:3])
    assert found[3] != wanted[3]
    assert any(np.asarray(x).any() for x in jax.tree.leaves(state.reduction))
