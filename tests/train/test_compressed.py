"""Compressed gradients in the step: right within the codecs' errors, with a state that adds up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import CompressionConfig
from tests.cases import one_device_state, place, random_batch, small_config, spread, trainer_for

MESHES = [((8, 1, 1, 1), 4), ((1, 8, 1, 1), 2), ((2, 2, 2, 1), 4), ((2, 1, 2, 2), 4)]


def compressed(mesh, nodes, codec, **changes):
    cfg = small_config(mesh, **changes)
    both = CompressionConfig(dense_gradient=codec, expert_gradient=codec, block=16)
    return dataclasses.replace(
        cfg, compression=both, mesh=dataclasses.replace(cfg.mesh, nodes=nodes)
    )


def first(cfg):
    """A trainer, and the same weights on every mesh."""
    trainer = trainer_for(cfg)
    state = one_device_state(cfg)._replace(reduction=trainer.first_reduction())
    return trainer, spread(state, trainer)


def gradients_of(cfg, seed=0):
    trainer, state = first(cfg)
    return trainer.gradients(state, place(trainer, random_batch(cfg, seed)))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "nodes"), MESHES)
@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int8+feedback"])
def test_gradients_are_off_by_what_the_codec_leaves_out(mesh, nodes, codec):
    cfg = compressed(mesh, nodes, codec)
    plain = gradients_of(dataclasses.replace(cfg, compression=CompressionConfig()))
    found = gradients_of(cfg)
    share = {"bfloat16": 2**-8}.get(codec, 1 / 127)

    def compare(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 4 * share * np.abs(a).max() + 1e-6

    jax.tree.map(compare, plain, found)
    different = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True)
    ]
    assert any(different)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_run_with_feedback_follows_the_plain_run(micro_batches):
    losses = {}
    for codec in ("none", "int4", "int4+feedback"):
        cfg = compressed((2, 2, 2, 1), 4, codec, train={"micro_batches": micro_batches})
        trainer, state = first(cfg)
        losses[codec] = []
        for step in range(8):
            state, metrics = trainer.step(state, place(trainer, random_batch(cfg, step)))
            losses[codec].append(float(metrics.loss))
    off = {name: np.abs(np.subtract(found, losses["none"])).max() for name, found in losses.items()}
    assert 0 < off["int4+feedback"] < 0.05
    assert off["int4"] > 0


def test_what_is_kept_shards_by_device_and_grows_from_nothing():
    cfg = compressed((2, 2, 2, 1), 4, "int4+feedback")
    trainer = trainer_for(cfg)
    state = trainer.init()
    kept = jax.tree.leaves(state.reduction)
    assert kept
    assert not any(np.asarray(x).any() for x in kept)
    for x in kept:
        assert x.addressable_shards[0].data.size == x.size // 8
    state, _ = trainer.step(state, place(trainer, random_batch(cfg)))
    assert all(np.asarray(x).any() for x in jax.tree.leaves(state.reduction) if x.size)


def test_an_update_that_is_not_finite_keeps_what_was_kept():
    cfg = compressed((2, 2, 2, 1), 4, "int4+feedback")
    trainer = trainer_for(cfg)
    state, _ = trainer.step(trainer.init(), place(trainer, random_batch(cfg)))
    bad = jax.tree.map(lambda p: p, state.params)
    bad["norm"]["scale"] = bad["norm"]["scale"].at[0].set(jnp.inf)
    state = spread(state._replace(params=bad), trainer)
    before = jax.tree.map(np.asarray, state.reduction)
    state, metrics = trainer.step(state, place(trainer, random_batch(cfg)))
    assert int(metrics.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, before, state.reduction)
