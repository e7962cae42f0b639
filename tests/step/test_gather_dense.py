"""Dense weights that are gathered once a step give the same gradients, and less traffic."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.plan.trace.reader import collectives
from tests.cases import CERTAIN, on_nodes, place, random_batch, small_config, step_for

MODEL = {"num_layers": 3, "first_dense_layers": 1, "qk_norm": "full", "tie_embeddings": False}


def case(gather_dense, mesh, *, parts=2, **model):
    cfg = small_config(mesh, model=MODEL | model, moe=CERTAIN, train={"micro_batches": parts})
    return dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, gather_dense=gather_dense))


def gradients(*args, **settings):
    cfg = case(*args, **settings)
    step = step_for(cfg)
    found, _ = step.gradients(step.init(), place(step, random_batch(cfg)))
    return jax.tree.map(np.asarray, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "parts", "settings"),
    [
        pytest.param((1, 2, 2, 1), 2, {}, marks=pytest.mark.exhaustive),
        ((2, 1, 2, 2), 1, {"remat": "full", "tie_embeddings": True}),
        pytest.param(
            (1, 2, 2, 2),
            2,
            {"scan_layers": False, "remat": "experts"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param((2, 2, 1, 2), 2, {"tie_embeddings": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_weights_gathered_once_a_step_change_no_gradient(mesh, parts, settings):
    found = gradients("step", mesh, parts=parts, **settings)
    wanted = gradients("use", mesh, parts=parts, **settings)

    def check(have, want):
        # The same sums; a compiler may order them otherwise.
        bound = 128 * np.finfo(np.float32).eps * np.abs(want).max()
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)

    jax.tree.map(check, found, wanted)


@pytest.mark.slow
def test_sums_of_whole_gradients_enter_the_codec_across_nodes():
    def reduced(gather_dense, codec):
        cfg = on_nodes((2, 2, 1, 2), codec=codec)
        cfg = dataclasses.replace(
            cfg,
            mesh=dataclasses.replace(cfg.mesh, gather_dense=gather_dense),
            train=dataclasses.replace(cfg.train, micro_batches=2),
        )
        step = step_for(cfg)
        return step.gradients(step.init(), place(step, random_batch(cfg)))[0]

    def check(have, exact):
        # Each of the two nodes' shares is rounded to 8 bits of mantissa.
        bound = 2**-7 * np.abs(exact).max()
        np.testing.assert_allclose(have, exact, rtol=0, atol=bound)

    exact = jax.tree.map(np.asarray, reduced("use", "none"))
    coded = jax.tree.map(np.asarray, reduced("step", "bfloat16"))
    jax.tree.map(check, coded, exact)
    assert any(
        np.any(have != want)
        for have, want in zip(jax.tree.leaves(coded), jax.tree.leaves(exact), strict=True)
    )


def wire_bytes(gather_dense, parts, kind):
    """Bytes that a step's collectives of one kind carry over fsdp."""
    step = step_for(case(gather_dense, (1, 2, 1, 1), parts=parts, remat="full"))
    traced = step.gradients.trace(step.abstract, step.abstract_batch())
    calls = [one for one in collectives(traced.jaxpr.jaxpr) if one.kind == kind]
    return sum(one.bytes * one.calls for one in calls if one.axes == ("fsdp",))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_dense_weights_kept_whole_cross_once_a_step():
    """The gathers of more parts and of recomputed layers are those of one part."""

    def gathered(gather_dense, parts):
        return wire_bytes(gather_dense, parts, "all_gather")

    # All is one number a part: experts' weights and the router's matrix, at each use.
    once, rest = gathered("step", 2), (gathered("step", 4) - gathered("step", 2)) / 2
    use = gathered("use", 2) / 2
    assert gathered("use", 4) == 4 * use
    dense = once - 2 * rest
    assert dense > 0
    # Without the setting a part gathers layers twice, as they are recomputed, the vocabulary once.
    assert rest + dense < use <= rest + 2 * dense


@pytest.mark.exhaustive
def test_gradients_of_dense_weights_kept_whole_are_reduced_once_a_step():
    def reduced(gather_dense, parts):
        return wire_bytes(gather_dense, parts, "reduce_scatter")

    # All is one number a part: every weight that is sharded, in float32.
    use = reduced("use", 2) / 2
    assert reduced("use", 4) == 4 * use
    # Experts and the router's matrix remain in each part, dense matrices once.
    rest = (reduced("step", 4) - reduced("step", 2)) / 2
    dense = reduced("step", 2) - 2 * rest
    assert dense > 0
    assert rest + dense == use
